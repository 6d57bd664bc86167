//! The reasons why an object cannot be stored or read, and the limits that errors name.

use std::path::{Path, PathBuf};

/// Number of items after which a conversation accepts no more items.
///
/// If exceeded: 400, `array_above_max_length`, for requests that add items; 400, `invalid_value`, for requests that
/// generate a response.
pub(super) const CONVERSATION_ITEMS_MAX: usize = 8192;
/// Stored size after which a conversation accepts no more items.
///
/// If exceeded: 400, `array_above_max_length`, for requests that add items; 400, `invalid_value`, for requests that
/// generate a response.
pub(super) const CONVERSATION_BYTES_MAX: u64 = 16 << 20;
/// Nesting depth of the JSON of a stored object. The server could not read deeper JSON again.
///
/// If exceeded: the response has `"store": false`, or fails if it is a background response or is added to a
/// conversation; other requests are rejected with 400, `invalid_value`.
pub(super) const DEPTH_MAX: usize = 127;

/// The reason why a record could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The record is larger than the limit for a record or than the whole store.
    #[error("cannot store {bytes} bytes in one record (limit: {bytes_max} bytes)")]
    TooLarge { bytes: u64, bytes_max: u64 },
    /// No items can be added to the conversation.
    #[error(
        "the conversation is full: it has {items} items and {bytes} bytes; the limits are {CONVERSATION_ITEMS_MAX} items \
         and {CONVERSATION_BYTES_MAX} bytes"
    )]
    Full { items: usize, bytes: u64 },
    /// Two items of a list would have the same ID.
    #[error("duplicate item found with id {id:?}: remove the item, or give it another ID")]
    DuplicateItem { id: String },
    /// The record would be too deeply nested to be read again.
    #[error("the JSON is nested more than {DEPTH_MAX} levels deep")]
    TooDeep,
    /// A file could not be accessed.
    #[error("failed to access {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Another server uses the directory.
    #[error("another server uses the directory {}", .0.display())]
    InUse(PathBuf),
}

impl Error {
    pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }
}
