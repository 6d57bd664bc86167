//! Parses the text that a model generates into content, reasoning and tool calls. Model families mark these parts
//! differently. Each format is parsed by an incremental state machine that reads one character at a time, so streamed
//! and complete responses use the same code.
//!
//! The crate does not depend on the network, the engine or the wire types, and reads no clock. Parsing never fails: a
//! malformed call is content.
//!
//! ```text
//! text ─► Parser::push ─┬─ marked text ─┬─ reasoning between tags
//!                       │               └─ a tool format, from its marker on
//!                       └─ Harmony: messages in channels
//!                                  └─► deltas
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use server_parsers::{Delta, Formats, Parser, Tools};
//!
//! let formats = Formats::detect("… {{ '<tool_call>' }} … {{ '<think>' }} …");
//! let tools = Arc::new(Tools::new([("now", None)]));
//! let mut parser = Parser::new(formats, &tools, "<|im_start|>assistant\n<think>\n");
//! assert_eq!(parser.push("What time?</th"), [Delta::Reasoning("What time?".to_owned())]);
//! let deltas = parser.push("ink><tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>");
//! assert_eq!(deltas[0], Delta::ToolCallBegin { index: 0, name: "now".to_owned() });
//! assert_eq!(parser.finish(), []);
//! ```

mod delta;
mod delta_buffer;
mod detect;
mod format;
mod gemma;
mod harmony;
mod json;
mod literal;
mod marked;
mod parser;
mod python;
mod reasoning;
mod scanner;
mod schema;
mod tool;
mod typed;

pub use delta::Delta;
pub use format::{Formats, IncompatibleFormats, ReasoningFormat, ToolFormat, UnknownFormat};
pub use json::NESTING_MAX;
pub use parser::Parser;
pub use schema::Tools;
