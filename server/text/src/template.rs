//! Renders chat templates with minijinja, which is configured to behave like Jinja in `transformers`.
//!
//! A template comes with the model; the values come with the request. Neither can make rendering run forever: steps,
//! recursion and output are limited. Apart from the output, memory is not limited: a template that doubles a variable
//! in a loop is not stopped. Templates are trusted as much as the weights of the model.

mod chat;
mod environment;
mod features;
mod functions;
pub mod limits;
mod python;

pub(crate) use chat::DEFAULT;
pub use chat::{ChatTemplate, RenderError, RenderInput, TemplateError};
pub use features::{
    ArgumentsFormat, CallCount, CallIdFormat, CallStyle, EmptyContent, TemplateFeatures, ToolsLocation,
};

#[cfg(test)]
mod tests;
