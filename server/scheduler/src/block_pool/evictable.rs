//! In which order the cached blocks that nobody holds are given up.
//!
//! By age alone, a run of prompts that never come again drives out what everybody begins with. So a block that is used
//! again stays longer than one that never was: as if its last use had been when so many more blocks had been given up.
//! Time is counted in blocks given up, so that nothing ages while there is room, and what was popular once goes when
//! its time is over.
//!
//! There is a list for each number of times used again, in the order of last use; the first to go is at the head of one
//! of them. Each operation looks at the heads and at two neighbours, and none allocates.
//!
//! ```text
//! never used again   ○─○─○─○─○─○   due when it was last used
//! once               ○─○─○         … and the whole cache was given up after that
//! twice              ○─○           … twice
//! ```

use crate::block::BlockId;

/// No neighbour.
const NONE: u32 = u32::MAX;

/// How many blocks more are given up before a block is, in sizes of the cache: one that was never used again, once, and
/// so on; the last is for all that were oftener.
pub(super) const STAYS: [u32; 4] = [0, 1, 2, 4];

/// The evictable blocks.
#[derive(Debug)]
pub(super) struct Evictable {
    links: Vec<Link>,
    lists: [List; STAYS.len()],
    len: u32,
    /// Blocks given up so far.
    evictions: u64,
    /// Blocks added so far.
    additions: u64,
}

/// A block's place.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    /// Which list.
    list: u8,
    due: Due,
}

/// The smallest goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    /// In blocks given up.
    time: u64,
    /// As they were added.
    order: u64,
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    /// How many blocks more are given up before one of these is.
    stays: u64,
}

impl Evictable {
    /// None of so many blocks. `stays` as [`STAYS`].
    pub(super) fn new(blocks_total: u32, stays: [u32; STAYS.len()]) -> Self {
        let blank = Link { older: NONE, newer: NONE, list: 0, due: Due::default() };
        Self {
            links: vec![blank; blocks_total as usize],
            lists: stays.map(|stays| List {
                oldest: NONE,
                newest: NONE,
                stays: u64::from(stays) * u64::from(blocks_total),
            }),
            len: 0,
            evictions: 0,
            additions: 0,
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Blocks given up so far.
    pub(super) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Adds a block that is not among them, and was used again so many times. What follows it in a sequence was added
    /// before it, and not used oftener: so that goes before.
    pub(super) fn add(&mut self, block: BlockId, reused: u8) {
        let at = usize::from(reused).min(self.lists.len() - 1);
        self.additions += 1;
        let list = &mut self.lists[at];
        let due = Due { time: self.evictions + list.stays, order: self.additions };
        let older = std::mem::replace(&mut list.newest, block.0);
        self.links[block.0 as usize] = Link { older, newer: NONE, list: at as u8, due };
        match self.links.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = block.0,
            None => list.oldest = block.0,
        }
        self.len += 1;
    }

    /// Takes a block out that is among them.
    pub(super) fn remove(&mut self, block: BlockId) {
        let Link { older, newer, list, .. } = self.links[block.0 as usize];
        let list = &mut self.lists[usize::from(list)];
        match self.links.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = newer,
            None => list.oldest = newer,
        }
        match self.links.get_mut(newer as usize) {
            Some(neighbour) => neighbour.older = older,
            None => list.newest = older,
        }
        self.len -= 1;
    }

    /// Takes out the one that is given up first.
    pub(super) fn evict(&mut self) -> Option<BlockId> {
        let heads = self.lists.iter().map(|list| list.oldest).filter(|&head| head != NONE);
        let block = BlockId(heads.min_by_key(|&head| self.links[head as usize].due)?);
        self.remove(block);
        self.evictions += 1;
        Some(block)
    }

    /// All of them, list by list, each with its list and when it goes. Panics unless all is in order.
    pub(super) fn check_invariants(&self) -> Vec<(BlockId, u8, Due)> {
        let mut all = Vec::new();
        for (number, list) in (0..).zip(&self.lists) {
            let (mut older, mut at) = (NONE, list.oldest);
            let mut due = Due::default();
            while at != NONE {
                assert!(all.len() < self.links.len(), "invariant: a list ends");
                let link = self.links[at as usize];
                assert!(link.older == older && link.list == number, "invariant: neighbours know each other");
                assert!(link.due > due, "invariant: a list is in order");
                due = link.due;
                all.push((BlockId(at), number, due));
                (older, at) = (at, link.newer);
            }
            assert_eq!(list.newest, older, "invariant: a list ends at the newest");
        }
        assert_eq!(all.len(), self.len as usize, "invariant: the evictable blocks are counted");
        all
    }
}
