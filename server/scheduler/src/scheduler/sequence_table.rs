//! The sequences of the scheduler, each in a fixed slot, with an index from the ids to the slots.

use crate::id_map::IdMap;
use crate::request::SequenceId;
use crate::sequence::Sequence;

#[derive(Clone, Debug)]
pub(super) struct SequenceTable {
    slots: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
    by_id: IdMap<SequenceId, u32>,
}

impl SequenceTable {
    pub(super) fn with_capacity(sequences: usize) -> Self {
        Self {
            slots: Vec::with_capacity(sequences),
            vacant: Vec::with_capacity(sequences),
            by_id: IdMap::with_capacity_and_hasher(2 * sequences, Default::default()),
        }
    }

    /// Adds `sequence` under its id and the ids of its siblings. Returns its slot.
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

    /// Removes a sequence and all its ids.
    pub(super) fn remove(&mut self, slot: u32) -> Sequence {
        let sequence = self.slots[slot as usize].take().expect("invariant: a sequence is removed once");
        self.vacant.push(slot);
        self.by_id.remove(&sequence.id);
        for sibling in &sequence.siblings {
            self.by_id.remove(sibling);
        }
        sequence
    }

    /// Removes an id whose slot has other ids as well.
    pub(super) fn remove_id(&mut self, id: SequenceId) {
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

    /// Returns the sequences of two different slots.
    pub(super) fn get_disjoint_mut(&mut self, slots: [u32; 2]) -> [&mut Sequence; 2] {
        let slots = self.slots.get_disjoint_mut(slots.map(|slot| slot as usize));
        let slots = slots.expect("invariant: the slots exist and differ");
        slots.map(|slot| slot.as_mut().expect("invariant: a listed slot has a sequence"))
    }

    /// All sequences with their slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        (0..).zip(&self.slots).filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)))
    }

    /// The number of ids.
    pub(super) fn num_ids(&self) -> usize {
        self.by_id.len()
    }
}
