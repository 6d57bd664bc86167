//! Which blocks of which content are being computed, and by whom.
//!
//! A claim is a hint for admission: a request whose next block somebody computes already waits for it. It
//! goes by hash alone; a collision makes a request wait for nothing, which ends with the claim.

use crate::block::{BlockHash, IdMap};

/// The claims of the running sequences, each for one block that is not in the prefix cache yet.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    owners: IdMap<BlockHash, u32>,
}

impl Claims {
    pub(crate) fn with_capacity(blocks_total: u32) -> Self {
        Self { owners: IdMap::with_capacity_and_hasher(2 * blocks_total as usize, Default::default()) }
    }

    pub(crate) fn contains(&self, hash: BlockHash) -> bool {
        self.owners.contains_key(&hash)
    }

    /// `owner` is going to compute the block, unless somebody is already.
    pub(crate) fn claim(&mut self, hash: BlockHash, owner: u32) {
        self.owners.entry(hash).or_insert(owner);
    }

    /// `owner` has computed the block, or never will.
    pub(crate) fn release(&mut self, hash: BlockHash, owner: u32) {
        if self.owners.get(&hash) == Some(&owner) {
            self.owners.remove(&hash);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, u32)> {
        self.owners.iter().map(|(&hash, &owner)| (hash, owner))
    }
}
