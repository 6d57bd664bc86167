//! Renders conversations with the chat templates of a model.

use std::{fmt, io, panic::AssertUnwindSafe, time::SystemTime};

use minijinja::{Environment, Value, context, value::Serde};
use serde_json::{Map, Value as Json};

use super::{environment, functions, limits};

/// The chat templates of a model.
pub struct ChatTemplate {
    pub(super) environment: Environment<'static>,
    pub(super) names: Vec<String>,
    pub(super) bos_token: Option<String>,
    pub(super) eos_token: Option<String>,
}

/// The input of a template.
#[derive(Clone, Copy, Debug, Default)]
pub struct RenderInput<'a> {
    /// The messages of the conversation, as objects with `role` and `content`.
    pub messages: &'a [Json],
    /// The tools that the model may call, in the format of chat completions.
    pub tools: Option<&'a [Json]>,
    /// The documents on which to base the answer.
    pub documents: Option<&'a [Json]>,
    /// Whether to append the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Additional variables of the template, which take precedence over all others.
    pub extra: Option<&'a Map<String, Json>>,
    /// The name of the template to use, if the model has several.
    pub name: Option<&'a str>,
    /// The time that `strftime_now` formats (in UTC); the current time if `None`.
    pub now: Option<SystemTime>,
}

/// The reason why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The template raised an exception with this message.
    #[error("{0}")]
    Refused(String),
    /// The model has no template with the requested name.
    #[error("the model has no chat template named {name:?}; its templates are {}", known.join(", "))]
    NoTemplate {
        /// The name of the requested template.
        name: String,
        /// The names of the templates of the model.
        known: Vec<String>,
    },
    /// The rendered text is too long.
    #[error("the rendered conversation is longer than {} bytes", limits::OUTPUT_BYTES_MAX)]
    TooLong,
    /// The template cannot process the conversation.
    #[error("failed to render the chat template")]
    Render(#[source] Box<minijinja::Error>),
    /// The template engine panicked.
    #[error("the template engine panicked while it rendered the conversation")]
    Engine,
}

/// The reason why the source of a template is invalid.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The source is too long.
    #[error("is longer than {} bytes", limits::SOURCE_BYTES_MAX)]
    TooLong,
    /// The source is not valid Jinja.
    #[error("cannot be parsed: {0}")]
    Syntax(Box<minijinja::Error>),
}

/// The name of the default template.
pub(crate) const DEFAULT: &str = "default";
/// The name of the template that is used for requests with tools, if the model has it.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Parses a single template without defining the variables `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// The source is too long or is not valid Jinja.
    pub fn parse(source: &str) -> Result<Self, TemplateError> {
        Self::new([(DEFAULT.to_owned(), source.to_owned())], None, None)
    }

    /// Parses named templates.
    pub(crate) fn new(
        sources: impl IntoIterator<Item = (String, String)>,
        bos_token: Option<String>,
        eos_token: Option<String>,
    ) -> Result<Self, TemplateError> {
        let mut environment = environment::new();
        let mut names = Vec::new();
        for (name, source) in sources {
            if source.len() > limits::SOURCE_BYTES_MAX {
                return Err(TemplateError::TooLong);
            }
            let source = environment::without_generation_tags(&source);
            environment
                .add_template_owned(name.clone(), source)
                .map_err(|error| TemplateError::Syntax(Box::new(error)))?;
            names.push(name);
        }
        Ok(Self { environment, names, bos_token, eos_token })
    }

    /// The names of the templates of the model.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The sources of all templates, concatenated.
    pub fn source(&self) -> String {
        let source = |name: &String| {
            self.environment.get_template(name).ok().map(|template| template.source().to_owned())
        };
        self.names.iter().filter_map(source).collect()
    }

    /// Renders the conversation as text. To tokenize this text, parse its special tokens, but do not add any.
    ///
    /// # Errors
    /// The model has no template with the requested name, the template rejects the conversation or cannot process it,
    /// the result is too long, or the template engine panics. All of these are client errors.
    pub fn render(&self, input: &RenderInput<'_>) -> Result<String, RenderError> {
        let name = self.template_name(input);
        let template = self
            .environment
            .get_template(name)
            .map_err(|_| RenderError::NoTemplate { name: name.to_owned(), known: self.names.clone() })?;
        let variables = self.variables(input);
        let mut output = LimitedOutput { text: Vec::new() };
        let rendered = || template.render_captured_to(variables, &mut output).map(drop);
        let rendered = || functions::at_time(input.now.unwrap_or_else(SystemTime::now), rendered);
        // The template engine panics on a few expressions, such as reversing an empty string. Only `output` may be left
        // in an inconsistent state, and it is dropped.
        let rendered =
            std::panic::catch_unwind(AssertUnwindSafe(rendered)).map_err(|_| RenderError::Engine)?;
        rendered.map_err(|error| classify(error, &output))?;
        Ok(String::from_utf8(output.text).expect("invariant: templates write whole strings"))
    }

    fn template_name<'a>(&'a self, input: &RenderInput<'a>) -> &'a str {
        let has = |name: &str| self.names.iter().any(|known| known == name);
        match input.name {
            Some(name) => name,
            None if input.tools.is_some() && has(TOOL_USE) => TOOL_USE,
            None => DEFAULT,
        }
    }

    fn variables(&self, input: &RenderInput<'_>) -> Value {
        let given = |list: Option<&[Json]>| list.map(|list| Value::from(Serde(list)));
        let base = context! {
            messages => Value::from(Serde(input.messages)),
            tools => given(input.tools),
            documents => given(input.documents),
            add_generation_prompt => input.add_generation_prompt,
        };
        let special = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)];
        let special = special.into_iter().filter_map(|(name, token)| Some((name, token.as_deref()?)));
        let special = Value::from_pairs(special);
        let extra = input.extra.into_iter().flatten();
        let extra = Value::from_pairs(extra.map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        context! { ..extra, ..special, ..base }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("names", &self.names).finish_non_exhaustive()
    }
}

fn classify(error: minijinja::Error, output: &LimitedOutput) -> RenderError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(functions::RaisedException(message)) = error.downcast_ref() {
            return RenderError::Refused(message.clone());
        }
        cause = error.source();
    }
    if output.text.len() >= limits::OUTPUT_BYTES_MAX {
        return RenderError::TooLong;
    }
    RenderError::Render(Box::new(error))
}

/// An output buffer that cannot exceed the output limit.
struct LimitedOutput {
    text: Vec<u8>,
}

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > limits::OUTPUT_BYTES_MAX {
            // Fill the output up to the limit, so that `classify` returns `TooLong`.
            self.text.resize(limits::OUTPUT_BYTES_MAX, b' ');
            return Err(io::Error::other("the output is too long"));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
