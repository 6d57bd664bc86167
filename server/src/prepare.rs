//! Turns wire requests into requests to the engine: resolves defaults, checks ranges, and renders and tokenizes
//! conversations. No later stage reads the wire request.
//!
//! This module accesses neither files nor the network. The same arguments always produce the same result, unless the
//! chat template renders the current date or a memory limit is reached. Costly grammars are first compiled in a
//! separate process. Images are no longer decoded once the client has disconnected.

mod chat;
mod completion;
mod conversation;
mod encode;
mod fitting;
mod functions;
mod guide;
mod images;
mod infill;
mod media;
mod parameters;
mod parser_settings;
mod prepared;
mod prompt;
mod resolved;
pub(crate) mod responses;
mod tokens;
mod tools;

pub(crate) use chat::chat;
pub(crate) use completion::completion;
pub(crate) use guide::may_compile;
pub(crate) use images::{IMAGES_MAX, may_decode_images};
pub(crate) use media::Media;
pub(crate) use parameters::{Endpoint, Kind, Parameter, PeerSupport, Support, checked};
pub(crate) use parser_settings::ParserSettings;
pub(crate) use prepared::{AnswerOptions, PreparedRequest, Target, TextOptions, UsageReporting};
pub(crate) use tokens::{detokenize, may_pad, tokenize};
