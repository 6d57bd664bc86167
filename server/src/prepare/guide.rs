//! Determines the constraint on an answer: the form that one of several parameters demands, the tool calls, and the
//! reasoning that may precede them.
//!
//! ```text
//! response_format, structured_outputs, guided_* ─► format ─┐
//! tools, tool_choice ─► tools ─────────────────────────────┼─► Form ─► compiled (or cached) ─► Guide
//! formats of the model, end of the prompt ─► reasoning ────┘
//! ```

mod format;
mod harmony;
mod tools;

use std::collections::HashSet;
use std::sync::Arc;

use server_engine::Guide;
use server_guidance::{Compiler, Form, FormError, Preface, Vocabulary};
use server_openai::Generation;
use server_parsers::{Formats, ReasoningFormat, ToolFormat};

use super::conversation::Conversation;
use super::prepared::Target;
use super::tools::{Tool, ToolChoice};
use crate::error::Error;
use crate::model::Model;
use format::rejected;

/// Returns the constraint on the answers to a plain prompt.
///
/// # Errors
/// The requested form is invalid or not supported.
pub(super) fn of_prompt(
    generation: &Generation,
    target: Target<'_>,
) -> Result<Option<Arc<dyn Guide>>, Error> {
    let Some(requested) = format::requested(generation)? else { return Ok(None) };
    let guide = target.model.compiler()?.compile(&requested.form);
    let guide = guide.map_err(|invalid| rejected(invalid, &requested.param))?;
    Ok(Some(Arc::new(guide)))
}

/// Returns the constraint on the answers to a conversation. `prompt_end` is the end of the rendered prompt.
///
/// # Errors
/// The requested form or the schema of a strict tool is invalid or not supported. Or a call is required, but the format
/// of the model's calls is unknown.
pub(super) fn of_conversation(
    generation: &Generation,
    conversation: &Conversation,
    prompt_end: &str,
    target: Target<'_>,
) -> Result<Option<Arc<dyn Guide>>, Error> {
    let requested = format::requested(generation)?;
    let model = target.model;
    let content = requested.as_ref().map(|requested| &requested.form);
    let request = FormRequest { conversation, formats: model.formats, content };
    if request.is_unconstrained() {
        return Ok(None);
    }
    let param = requested.as_ref().map_or("tools", |requested| &requested.param);
    let compiler = model.compiler()?;
    let guide = request.compiled(compiler, param)?;
    let guide = match preface(compiler, model, prompt_end) {
        Some(preface) => guide.after(preface),
        None => guide,
    };
    Ok(Some(Arc::new(guide)))
}

/// The form that a request demands of its answers.
struct FormRequest<'a> {
    conversation: &'a Conversation,
    formats: Formats,
    /// The form of the content.
    content: Option<&'a Form>,
}

impl FormRequest<'_> {
    /// Whether the request demands no form.
    fn is_unconstrained(&self) -> bool {
        let Self { conversation, content, .. } = self;
        let must_call = conversation.may_call() && conversation.choice.is_required();
        let strict = conversation.may_call() && tools::offered(conversation).any(|(_, tool)| tool.strict);
        // Even if the tool choice does not require a call, the form must prevent calls of the tools that it excludes.
        let limited = conversation.may_call() && matches!(conversation.choice, ToolChoice::Allowed { .. });
        content.is_none() && !must_call && !strict && !limited
    }

    /// Compiles the form. An unsupported schema of a tool is an error if the tool is strict. Otherwise, the arguments
    /// of the tool are not constrained.
    fn compiled(&self, compiler: &Compiler, param: &str) -> Result<server_guidance::Guide, Error> {
        self.compiled_by(&Attempts {
            vocabulary: compiler.vocabulary(),
            compile: &|form| compiler.compile(form),
            accepts: &|form| compiler.accepts(form),
            param,
        })
    }

    /// Implements [`Self::compiled`]. Regardless of how many schemas are unsupported, each schema is compiled alone at
    /// most once, and the whole form at most three times.
    fn compiled_by<T>(&self, attempts: &Attempts<'_, T>) -> Result<T, Error> {
        let Attempts { vocabulary, compile, accepts, param } = attempts;
        let mut rejection = match compile(&self.form(vocabulary, &HashSet::new())?) {
            Ok(compiled) => return Ok(compiled),
            Err(invalid) => invalid,
        };
        let lenient: Vec<(usize, &Tool)> =
            tools::offered(self.conversation).filter(|(_, tool)| !tool.strict).collect();
        if !lenient.iter().any(|(_, tool)| tools::is_of(&rejection.at, tool)) {
            return Err(rejected(rejection, param));
        }
        let is_broken = |tool: &Tool| self.alone(tool, vocabulary).is_ok_and(|form| !accepts(&form));
        let broken = lenient.iter().filter(|(_, tool)| is_broken(tool)).map(|(index, _)| *index).collect();
        let all = lenient.iter().map(|(index, _)| *index).collect();
        for unconstrained in [broken, all] {
            match compile(&self.form(vocabulary, &unconstrained)?) {
                Ok(compiled) => return Ok(compiled),
                Err(invalid) => rejection = invalid,
            }
        }
        Err(rejected(rejection, param))
    }

    /// Returns the form of an answer that calls only this tool, whether or not the request requires a call.
    fn alone(&self, tool: &Tool, vocabulary: &Vocabulary) -> Result<Form, Error> {
        let conversation = Conversation {
            param: self.conversation.param,
            tools: vec![tool.clone()],
            choice: ToolChoice::Required,
            ..Conversation::default()
        };
        FormRequest { conversation: &conversation, formats: self.formats, content: None }
            .form(vocabulary, &HashSet::new())
    }

    /// Returns the form of the answers. The arguments of the tools with the indices in `unconstrained` may be any
    /// object.
    fn form(&self, vocabulary: &Vocabulary, unconstrained: &HashSet<usize>) -> Result<Form, Error> {
        let Self { conversation, formats, content } = self;
        if !conversation.may_call() {
            let content = (*content).cloned().unwrap_or_else(Form::text);
            return Ok(if reads_channels(*formats) { harmony::answer(content) } else { content });
        }
        let calls = tools::Calls::new(conversation, formats.tool, unconstrained);
        let must_call = conversation.choice.is_required();
        if reads_channels(*formats) {
            return Ok(harmony::with_calls(&calls, must_call, *content));
        }
        match (must_call, *content) {
            (true, _) => calls.alone(vocabulary).ok_or_else(|| {
                let problem = "requires a tool call, but the tool call format of this model is unknown";
                Error::invalid("tool_choice", problem)
            }),
            (false, Some(content)) => Ok(match calls.alone(vocabulary) {
                Some(calls) => Form::Choice(vec![calls, content.clone()]),
                None => content.clone(),
            }),
            (false, None) => Ok(calls.in_text(vocabulary).unwrap_or_else(Form::text)),
        }
    }
}

/// The functions that compile a form to a `T`.
struct Attempts<'a, T> {
    vocabulary: &'a Vocabulary,
    compile: &'a dyn Fn(&Form) -> Result<T, FormError>,
    /// Whether a form can be compiled.
    accepts: &'a dyn Fn(&Form) -> bool,
    /// The name of the parameter with the form, for errors without a location.
    param: &'a str,
}

/// Whether the whole text consists of messages in channels (Harmony).
fn reads_channels(formats: Formats) -> bool {
    formats.tool == ToolFormat::Gptoss || formats.reasoning == ReasoningFormat::Gptoss
}

/// Returns the unconstrained reasoning before the form, if the model reasons and the prompt has not closed the
/// reasoning.
fn preface(compiler: &Compiler, model: &Model, prompt_end: &str) -> Option<Preface> {
    let (open, close) = match model.formats.reasoning {
        // The form itself includes Harmony's messages with reasoning.
        ReasoningFormat::None | ReasoningFormat::Gptoss => return None,
        ReasoningFormat::Qwen3
        | ReasoningFormat::DeepSeek
        | ReasoningFormat::MiniCpm5
        | ReasoningFormat::Granite => ("<think>", "</think>"),
        ReasoningFormat::Gemma4 => ("<|channel>", "<channel|>"),
        ReasoningFormat::Mistral => ("[THINK]", "[/THINK]"),
    };
    let end = prompt_end.trim_end();
    if end.ends_with(open) || end.ends_with("<|channel>thought") {
        return compiler.preface(None, close);
    }
    // The prompt has already closed the reasoning.
    if end.ends_with(close) {
        return None;
    }
    compiler.preface(Some(open), close)
}

/// Whether a body may demand a form that must be compiled. Compiling takes longer than the rest of the preparation.
pub(crate) fn may_compile(body: &[u8]) -> bool {
    // `format` is a member of `text` in requests to the responses endpoint. The last entry is the beginning of an
    // escape sequence, which can hide the name of a key.
    const SIGNS: [&[u8]; 8] = [
        b"\"response_format\"",
        b"\"structured_outputs\"",
        b"\"structural_tag\"",
        b"\"guided_",
        b"\"tools\"",
        b"\"functions\"",
        b"\"format\"",
        b"\\u00",
    ];
    SIGNS.iter().any(|sign| memchr::memmem::find(body, sign).is_some())
}

#[cfg(test)]
mod tests;
