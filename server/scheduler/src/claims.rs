//! Records which blocks are being computed, and by which sequence.
//!
//! A claim is a hint for admission: a request usually waits if another sequence is computing the request's next block.
//! Claims are compared by hash alone. If hashes collide, a request waits unnecessarily until the claim is released.

use crate::block::BlockHash;
use crate::id_map::IdMap;

/// The claims of the running sequences. Each claim is for one block that its owner has not registered in the prefix
/// cache yet.
#[derive(Clone, Debug, Default)]
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

    /// Records that `owner` will compute the block, unless another sequence has claimed it.
    pub(crate) fn claim(&mut self, hash: BlockHash, owner: u32) {
        self.owners.entry(hash).or_insert(owner);
    }

    /// Removes the claim of `owner`, which has computed the block or will not compute it.
    pub(crate) fn release(&mut self, hash: BlockHash, owner: u32) {
        if self.owners.get(&hash) == Some(&owner) {
            self.owners.remove(&hash);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, u32)> {
        self.owners.iter().map(|(&hash, &owner)| (hash, owner))
    }
}
