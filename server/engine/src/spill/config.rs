//! The location of stored blocks, and the identity of their content.

use std::path::PathBuf;

use server_scheduler::{BlockKey, BlockKeyScheme, TokenId};
use sha2::{Digest as _, Sha256};

/// The configuration of the directory for evicted blocks.
#[derive(Clone, Debug)]
pub struct SpillConfig {
    /// The path of the directory. Only one server at a time uses it. A second server stores no blocks until the first
    /// one exits.
    pub directory: PathBuf,
    /// The maximum total size of all files in bytes.
    pub bytes_max: u64,
    /// The inputs, other than tokens, that determine the content of a block. When the directory is opened, blocks with
    /// another identity are removed, except for those of other adapters.
    pub identity: SpillIdentity,
}

/// The inputs on which the content of a block depends, other than its tokens.
#[derive(Clone, Debug)]
pub struct SpillIdentity {
    /// A description of how the content is computed and laid out.
    pub description: String,
    /// The files of the model and of the runtime, which are identified by their content.
    pub files: Vec<PathBuf>,
    /// A digest of the content of each adapter. Blocks of other adapters remain stored, but are not used.
    pub adapters: Vec<u64>,
}

/// The keys of blocks: each key is the SHA-256 hash of the previous block's key and the tokens of the block. No client
/// can therefore create a block that has the key of a block with other content, which would be possible with the hash
/// of the prefix cache.
pub(crate) fn key_scheme(identity: &SpillIdentity) -> BlockKeyScheme {
    let base = BlockKey([0; 32]);
    let adapter = |digest: &u64| block_key(base, &[*digest as u32, (*digest >> 32) as u32, 1]);
    let adapters = std::iter::once(base).chain(identity.adapters.iter().map(adapter)).collect();
    BlockKeyScheme { block_key, adapters }
}

fn block_key(previous: BlockKey, tokens: &[TokenId]) -> BlockKey {
    let mut hash = Sha256::new();
    hash.update(previous.0);
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    BlockKey(hash.finalize().into())
}
