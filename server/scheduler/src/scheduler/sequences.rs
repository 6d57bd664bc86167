//! Where the sequences are kept: slots that stay where they are, found by any of the ids they stand for.

use crate::SequenceId;
use crate::block::IdMap;
use crate::sequence::Sequence;

#[derive(Debug)]
pub(super) struct Sequences {
    slots: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
    by_id: IdMap<SequenceId, u32>,
}

impl Sequences {
    pub(super) fn with_capacity(sequences: usize) -> Self {
        Self {
            slots: Vec::with_capacity(sequences),
            vacant: Vec::with_capacity(sequences),
            by_id: IdMap::with_capacity_and_hasher(2 * sequences, Default::default()),
        }
    }

    /// Keeps `sequence` under its id and those of its siblings.
    pub(super) fn insert(&mut self, sequence: Sequence) -> u32 {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.by_id.insert(sequence.id, slot);
        for &sibling in &sequence.siblings {
            self.by_id.insert(sibling, slot);
        }
        self.slots[slot as usize] = Some(sequence);
        slot
    }

    /// Takes a sequence and all its ids out.
    pub(super) fn remove(&mut self, slot: u32) -> Sequence {
        let sequence = self.slots[slot as usize].take().expect("invariant: a sequence is removed once");
        self.vacant.push(slot);
        self.by_id.remove(&sequence.id);
        for sibling in &sequence.siblings {
            self.by_id.remove(sibling);
        }
        sequence
    }

    /// Makes `id` unknown, which stands for a sequence that has others.
    pub(super) fn forget(&mut self, id: SequenceId) {
        self.by_id.remove(&id);
    }

    pub(super) fn slot(&self, id: SequenceId) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn get(&self, slot: u32) -> &Sequence {
        self.slots[slot as usize].as_ref().expect("invariant: a listed slot has a sequence")
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Sequence {
        self.slots[slot as usize].as_mut().expect("invariant: a listed slot has a sequence")
    }

    /// Two of them at once.
    pub(super) fn pair_mut(&mut self, slots: [u32; 2]) -> [&mut Sequence; 2] {
        let slots = self.slots.get_disjoint_mut(slots.map(|slot| slot as usize));
        let slots = slots.expect("invariant: different slots of the list");
        slots.map(|slot| slot.as_mut().expect("invariant: a listed slot has a sequence"))
    }

    /// All sequences with their slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        (0..).zip(&self.slots).filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)))
    }

    /// How many ids are known.
    pub(super) fn ids(&self) -> usize {
        self.by_id.len()
    }
}
