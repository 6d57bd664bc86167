//! The order in which cached blocks without references are evicted.
//!
//! With plain LRU, a series of one-off prompts would evict the prefixes that many requests share. Therefore, a block
//! with hits is retained longer than a block without hits, as if it had last been used a number of evictions later.
//! Time is measured in evictions, so that no block ages while there is space, and a prefix that is no longer popular is
//! evicted eventually.
//!
//! The queue has one list for each number of hits up to a maximum, each in LRU order. The next block to evict is the
//! head of one of the lists. Each operation accesses at most the ends of the lists and two neighbors, and no operation
//! allocates memory.
//!
//! ```text
//! no hits    ○─○─○─○─○─○   deadline: when the block was used last
//! one hit    ○─○─○         … plus one cache size of evictions
//! two hits   ○─○           … plus two
//! ```

use crate::block::BlockId;

/// The value of a link at the end of a list.
const NONE: u32 = u32::MAX;

/// The number of evictions by which a block's deadline is extended, for each number of hits, as a multiple of the
/// number of blocks in the cache. The last entry also applies to all higher numbers of hits.
pub(super) const RETENTION: [u32; 4] = [0, 1, 2, 4];

/// The evictable blocks, in the order of their deadlines.
#[derive(Clone, Debug)]
pub(super) struct EvictionQueue {
    links: Vec<Link>,
    lists: [List; RETENTION.len()],
    len: u32,
    /// Number of evictions so far.
    evictions: u64,
    /// Number of blocks added so far.
    additions: u64,
}

/// The neighbors of a block in its list.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    /// The index of the list.
    list: u8,
    deadline: Deadline,
}

/// The position of a block in the order of eviction. The block with the smallest deadline is evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Deadline {
    /// The deadline, as a number of evictions since the start.
    time: u64,
    /// The number of blocks that had been added when this block was added, which decides between equal times.
    order: u64,
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    /// The number of evictions by which the deadlines are extended.
    retention: u64,
}

impl EvictionQueue {
    /// Creates an empty queue. `retention` has the meaning of [`RETENTION`].
    pub(super) fn new(blocks_total: u32, retention: [u32; RETENTION.len()]) -> Self {
        let blank = Link { older: NONE, newer: NONE, list: 0, deadline: Deadline::default() };
        Self {
            links: vec![blank; blocks_total as usize],
            lists: retention.map(|retention| List {
                oldest: NONE,
                newest: NONE,
                retention: u64::from(retention) * u64::from(blocks_total),
            }),
            len: 0,
            evictions: 0,
            additions: 0,
        }
    }

    /// Number of evictable blocks.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Number of evictions so far.
    pub(super) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Adds a block that is not in the queue. Its children were added before it and have at most as many hits, so they
    /// are evicted before it.
    pub(super) fn push(&mut self, block: BlockId, hits: u8) {
        let index = usize::from(hits).min(self.lists.len() - 1);
        self.additions += 1;
        let list = &mut self.lists[index];
        let deadline = Deadline { time: self.evictions + list.retention, order: self.additions };
        let older = std::mem::replace(&mut list.newest, block.0);
        self.links[block.0 as usize] = Link { older, newer: NONE, list: index as u8, deadline };
        match self.links.get_mut(older as usize) {
            Some(neighbor) => neighbor.newer = block.0,
            None => list.oldest = block.0,
        }
        self.len += 1;
    }

    pub(super) fn remove(&mut self, block: BlockId) {
        let Link { older, newer, list, .. } = self.links[block.0 as usize];
        let list = &mut self.lists[usize::from(list)];
        match self.links.get_mut(older as usize) {
            Some(neighbor) => neighbor.newer = newer,
            None => list.oldest = newer,
        }
        match self.links.get_mut(newer as usize) {
            Some(neighbor) => neighbor.older = older,
            None => list.newest = older,
        }
        self.len -= 1;
    }

    /// Removes and returns the next block to evict.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        let heads = self.lists.iter().map(|list| list.oldest).filter(|&head| head != NONE);
        let block = BlockId(heads.min_by_key(|&head| self.links[head as usize].deadline)?);
        self.remove(block);
        self.evictions += 1;
        Some(block)
    }

    /// Returns all blocks, list by list, with the indices of the lists and the deadlines. Panics unless the lists are
    /// consistent.
    pub(super) fn check_invariants(&self) -> Vec<(BlockId, u8, Deadline)> {
        let mut all = Vec::new();
        for (number, list) in (0..).zip(&self.lists) {
            let (mut older, mut at) = (NONE, list.oldest);
            let mut deadline = Deadline::default();
            while at != NONE {
                assert!(all.len() < self.links.len(), "invariant: a list ends");
                let link = self.links[at as usize];
                assert!(
                    link.older == older && link.list == number,
                    "invariant: neighbors link to each other"
                );
                assert!(link.deadline > deadline, "invariant: a list is in order");
                deadline = link.deadline;
                all.push((BlockId(at), number, deadline));
                (older, at) = (at, link.newer);
            }
            assert_eq!(list.newest, older, "invariant: a list ends with the newest block");
        }
        assert_eq!(all.len(), self.len as usize, "invariant: the evictable blocks are counted");
        all
    }
}
