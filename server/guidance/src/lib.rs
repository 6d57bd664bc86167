//! Forms that answers can be held to: JSON schemas, regular expressions, grammars, choices, tags, and what they are
//! made of. A [`Form`] is compiled, for a vocabulary, to a [`Guide`], which tells an engine the tokens that may come
//! next.
//!
//! ```text
//! structural tag ─┐
//! JSON schema    ─┼─► Form ─► lark (a grammar as text) ─► llguidance ─► Guide ─► the engine
//! EBNF ─► lark   ─┘                                          cache ◄─┘
//! ```
//!
//! It knows no HTTP and no model: a vocabulary is the bytes of its tokens. It reads no file, no clock and no
//! environment, and starts no thread. What is wrong with a form is told with the place where it is, so that a request
//! can be refused for it.

mod cache;
mod compiler;
mod dialect;
mod ebnf;
mod error;
mod form;
mod guide;
mod lane;
mod lark;
pub mod limits;
mod locate;
mod preface;
mod schema;
mod structural_tag;
mod vocabulary;

pub use compiler::Compiler;
pub use dialect::Dialect;
pub use error::{BuildError, Invalid};
pub use form::{Form, Place, Tag, Triggered};
pub use guide::Guide;
pub use preface::Preface;
pub use structural_tag::{is_structural_tag_type, structural_tag};
pub use vocabulary::Vocabulary;
