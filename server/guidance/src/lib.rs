//! Constraints on the output of a model: JSON schemas, regular expressions, grammars, choices, tags, and
//! combinations of them. A [`Form`] is compiled for a vocabulary into a [`Guide`], which provides the engine
//! with the tokens that are allowed next.
//!
//! ```text
//! structural tag ─┐
//! JSON schema    ─┼─► Form ─► lark (a grammar as text) ─► llguidance ─► Guide ─► the engine
//! EBNF, Lark     ─┘                                          cache ◄─┘
//! ```
//!
//! The crate is independent of HTTP and of models: a vocabulary consists of the bytes of its tokens, and of whether
//! each token is special. It reads no files, no clock and no environment variables. It starts a thread only to compile
//! a form on a large stack. An error about a form contains the path of the invalid part in the request, if the part can
//! be located.

mod cache;
mod compiler;
mod dialect;
mod ebnf;
mod error;
mod form;
mod grammar;
mod guide;
mod lark;
pub mod limits;
mod locate;
mod memory;
mod nesting;
mod preface;
mod schema;
mod sequence;
mod shared_lexer;
mod structural_tag;
mod trial;
mod vocabulary;

pub use compiler::{Compiler, try_grammar};
pub use error::{FormError, VocabularyError};
pub use form::{Dialect, Form, Tag, TriggeredTags};
pub use guide::Guide;
pub use preface::Preface;
pub use structural_tag::{is_structural_tag_type, structural_tag};
pub use trial::{Trial, TrialError};
pub use vocabulary::Vocabulary;
