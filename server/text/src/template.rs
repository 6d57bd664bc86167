//! Chat templates: Jinja as `transformers` renders it, by minijinja.
//!
//! A template comes with the model, the values come with the request. Neither can make rendering run forever:
//! steps, recursion and output are limited. Of memory a template can take more than its output: one that doubles a
//! variable in a loop is not stopped, and is trusted as the model's weights are.

use std::{fmt, io, panic::AssertUnwindSafe, time::SystemTime};

use minijinja::{Environment, Value, context, value::Serde};
use serde_json::{Map, Value as Json};

mod environment;
mod functions;
mod probe;
mod python;
mod strftime;

pub use probe::{Abilities, Arguments, CallCount, CallIds, CallStyle, NoText, ToolsPlace};

/// The named limits of rendering.
pub mod limits {
    /// Number of template engine instructions to render a conversation. A message takes some hundreds.
    ///
    /// Beyond it: 400, `invalid_value`.
    pub const STEPS_MAX: u64 = 20_000_000;
    /// Number of template engine instructions to render one of the trial conversations, which show what a template
    /// supports. They have three messages.
    pub const TRIAL_STEPS_MAX: u64 = 1_000_000;
    /// Depth of nested calls and blocks in a chat template.
    ///
    /// Beyond it: 400, `invalid_value`.
    pub const RECURSION_MAX: usize = 200;
    /// Size of a rendered conversation.
    ///
    /// Beyond it: 400, `invalid_value`.
    pub const OUTPUT_BYTES_MAX: usize = 64 << 20;
    /// Size of the source of a chat template.
    ///
    /// Beyond it: the server does not start.
    pub const SOURCE_BYTES_MAX: usize = 4 << 20;
}

/// A model's chat templates.
pub struct ChatTemplate {
    environment: Environment<'static>,
    names: Vec<String>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct RenderInput<'a> {
    /// The conversation: objects with `role` and `content`.
    pub messages: &'a [Json],
    /// The tools that the model may call, as the client gave them.
    pub tools: Option<&'a [Json]>,
    /// Documents to answer from.
    pub documents: Option<&'a [Json]>,
    /// Whether to end with what makes the model answer.
    pub add_generation_prompt: bool,
    /// Further variables of the template. They win over all others.
    pub extra: Option<&'a Map<String, Json>>,
    /// The template of this name, where the model has several.
    pub name: Option<&'a str>,
    /// What `strftime_now` tells (in UTC); the present if `None`.
    pub now: Option<SystemTime>,
}

/// A conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The template itself refuses the conversation, in these words.
    #[error("{0}")]
    Refused(String),
    /// There is no template of that name.
    #[error("the model has no chat template named {name:?}; it has {}", known.join(", "))]
    NoTemplate {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// The rendered text is too long.
    #[error("the rendered conversation is longer than {} bytes", limits::OUTPUT_BYTES_MAX)]
    TooLong,
    /// The template could not cope with the conversation.
    #[error("failed to render the chat template")]
    Render(#[source] Box<minijinja::Error>),
    /// The template engine could not, which is its own fault.
    #[error("the template engine failed")]
    Engine,
}

/// A template's source is not a template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// It is too long.
    #[error("is longer than {} bytes", limits::SOURCE_BYTES_MAX)]
    TooLong,
    /// It is no Jinja.
    #[error("cannot be parsed: {0}")]
    Syntax(String),
}

/// The name of the template that is used unless another is asked for.
pub(crate) const DEFAULT: &str = "default";
/// The name of the template that is used when there are tools, if the model has it.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// A template by itself, of a model without special tokens.
    ///
    /// # Errors
    /// The source is no template.
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
                .map_err(|error| TemplateError::Syntax(chain(&error)))?;
            names.push(name);
        }
        Ok(Self { environment, names, bos_token, eos_token })
    }

    /// The names of the templates there are.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The source of all of them, one after the other.
    pub fn source(&self) -> String {
        let source = |name: &String| {
            self.environment.get_template(name).ok().map(|template| template.source().to_owned())
        };
        self.names.iter().filter_map(source).collect()
    }

    /// The conversation as text, to be tokenized with special tokens parsed and none added.
    ///
    /// # Errors
    /// The template refuses the conversation or cannot cope with it: both are the client's doing.
    pub fn render(&self, input: &RenderInput<'_>) -> Result<String, RenderError> {
        let name = self.choose(input);
        let template = self
            .environment
            .get_template(name)
            .map_err(|_| RenderError::NoTemplate { name: name.to_owned(), known: self.names.clone() })?;
        let variables = self.variables(input);
        let mut output = Limited { text: Vec::new() };
        let rendered = || template.render_captured_to(variables, &mut output).map(drop);
        let rendered = || functions::at_time(input.now.unwrap_or_else(SystemTime::now), rendered);
        // The engine panics at a few expressions, such as an empty text backwards. Of what is used here only
        // `output` is left in whatever state, and dropped.
        let rendered =
            std::panic::catch_unwind(AssertUnwindSafe(rendered)).map_err(|_| RenderError::Engine)?;
        rendered.map_err(|error| classify(error, &output))?;
        Ok(String::from_utf8(output.text).expect("invariant: templates write whole strings"))
    }

    fn choose<'a>(&'a self, input: &RenderInput<'a>) -> &'a str {
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

fn classify(error: minijinja::Error, output: &Limited) -> RenderError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(functions::Raised(message)) = error.downcast_ref() {
            return RenderError::Refused(message.clone());
        }
        cause = error.source();
    }
    if output.text.len() >= limits::OUTPUT_BYTES_MAX {
        return RenderError::TooLong;
    }
    RenderError::Render(Box::new(error))
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Text up to the limit.
struct Limited {
    text: Vec<u8>,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > limits::OUTPUT_BYTES_MAX {
            // Marks the limit as reached.
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

#[cfg(test)]
mod tests;
