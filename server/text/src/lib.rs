//! Text to tokens and back, and everything else that makes a language model out of a token model: tokenizer,
//! chat template, incremental detokeniser, stop strings, default generation parameters.
//!
//! It knows no network and no engine. Loading reads files; everything after that is synchronous and pure,
//! and can be shared between threads.
//!
//! ```text
//! messages ─► ChatTemplate::render ─► text ─► Tokenizer::encode ─► tokens
//!                                                                    │ the engine
//! text ◄─ StopFilter::push ◄─ Detokenizer::push ◄──────────────── token
//! ```

mod defaults;
mod detokenizer;
mod error;
mod json_file;
mod model;
mod stop;
mod template;
mod tokenizer;
mod vocabulary;

pub use defaults::GenerationDefaults;
pub use detokenizer::{DetokenizeOptions, Detokenizer};
pub use error::LoadError;
pub use model::{LoadOptions, ModelText, TextSource};
pub use stop::{Filtered, StopFilter};
pub use template::{
    Abilities, Arguments, CallCount, CallIds, CallStyle, ChatTemplate, NoText, RenderError, RenderInput,
    TemplateError, ToolsPlace, limits as template_limits,
};
pub use tokenizer::{ENCODE_MEMORY_PER_BYTE, EncodeError, TEXT_BYTES_MAX, Tokenizer};
