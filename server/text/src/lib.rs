//! Converts text to tokens and back. Also provides chat templates, incremental detokenization, stop strings and default
//! generation parameters.
//!
//! The crate depends neither on the network nor on the engine. Loading reads files; the other operations need only
//! memory. All operations are synchronous, and threads can share the loaded model. Only rendering reads the clock, and
//! only if the caller does not pass a time.
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
pub use error::{EncodeError, LoadError};
pub use model::{ModelText, TextSource, model_name};
pub use stop::{StopFilter, StopFilterOutput};
pub use template::{
    ArgumentsFormat, CallCount, CallIdFormat, CallStyle, ChatTemplate, EmptyContent, RenderError,
    RenderInput, TemplateError, TemplateFeatures, ToolsLocation, limits as template_limits,
};
pub use tokenizer::{ENCODE_MEMORY_PER_BYTE, TEXT_BYTES_MAX, Tokenizer};
