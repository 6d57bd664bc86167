//! What an answer is held to: the form that a request asks for in one of several ways, the calls that it wants, and
//! what may come before either.
//!
//! ```text
//! response_format, structured_outputs, guided_* ─► format ─┐
//! tools, tool_choice ─► tools ─────────────────────────────┼─► Form ─► compiled (or found) ─► Guide
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

use super::Target;
use super::conversation::Conversation;
use super::tools::{Tool, ToolChoice};
use crate::error::Error;
use crate::model::Model;

/// What answers to a plain prompt are held to.
///
/// # Errors
/// The form that is asked for is none, or cannot be followed.
pub(super) fn of_prompt(
    generation: &Generation,
    target: Target<'_>,
) -> Result<Option<Arc<dyn Guide>>, Error> {
    let Some(wanted) = format::wanted(generation)? else { return Ok(None) };
    let guide =
        target.model.compiler()?.compile(&wanted.form).map_err(|invalid| refused(invalid, &wanted.param))?;
    Ok(Some(Arc::new(guide)))
}

/// What answers to a conversation are held to. `prompt_end` is the end of its prompt.
///
/// # Errors
/// The form that is asked for is none, or cannot be followed, or a tool's schema.
pub(super) fn of_conversation(
    generation: &Generation,
    conversation: &Conversation,
    prompt_end: &str,
    target: Target<'_>,
) -> Result<Option<Arc<dyn Guide>>, Error> {
    let wanted = format::wanted(generation)?;
    let model = target.model;
    let asked =
        Asked { conversation, formats: model.formats, content: wanted.as_ref().map(|wanted| &wanted.form) };
    if asked.is_nothing() {
        return Ok(None);
    }
    let param = wanted.as_ref().map_or("tools", |wanted| &wanted.param);
    let compiler = model.compiler()?;
    let guide = asked.compiled(compiler, param)?;
    let guide = match preface(compiler, model, prompt_end) {
        Some(preface) => guide.after(preface),
        None => guide,
    };
    Ok(Some(Arc::new(guide)))
}

/// A request's wishes for the form of its answers.
struct Asked<'a> {
    conversation: &'a Conversation,
    formats: Formats,
    /// What content is held to.
    content: Option<&'a Form>,
}

impl Asked<'_> {
    /// Whether there are none.
    fn is_nothing(&self) -> bool {
        let Self { conversation, content, .. } = self;
        let must_call = conversation.may_call() && conversation.choice.is_required();
        let strict = conversation.may_call() && tools::offered(conversation).any(|(_, tool)| tool.strict);
        // Which tools may be called is not only a matter of what must be.
        let limited = conversation.may_call() && matches!(conversation.choice, ToolChoice::Allowed { .. });
        content.is_none() && !must_call && !strict && !limited
    }

    /// The compiled form. A schema that cannot be followed is an error if it is a strict tool's, and of another
    /// tool's arguments nothing is asked then.
    fn compiled(&self, compiler: &Compiler, param: &str) -> Result<server_guidance::Guide, Error> {
        self.compiled_by(&Attempts {
            vocabulary: compiler.vocabulary(),
            compile: &|form| compiler.compile(form),
            accepts: &|form| compiler.accepts(form),
            param,
        })
    }

    /// As [`Self::compiled`]. However many schemas cannot be followed, each is tried by itself once, and all together three
    /// times at most.
    fn compiled_by<T>(&self, attempts: &Attempts<'_, T>) -> Result<T, Error> {
        let Attempts { vocabulary, compile, accepts, param } = attempts;
        let mut refusal = match compile(&self.form(vocabulary, &HashSet::new())?) {
            Ok(compiled) => return Ok(compiled),
            Err(invalid) => invalid,
        };
        let lenient: Vec<(usize, &Tool)> =
            tools::offered(self.conversation).filter(|(_, tool)| !tool.strict).collect();
        if !lenient.iter().any(|(index, _)| tools::is_of(&refusal.at, *index)) {
            return Err(refused(refusal, param));
        }
        let is_broken = |tool: &Tool| self.alone(tool, vocabulary).is_ok_and(|form| !accepts(&form));
        let broken = lenient.iter().filter(|(_, tool)| is_broken(tool)).map(|(index, _)| *index).collect();
        let all = lenient.iter().map(|(index, _)| *index).collect();
        for loose in [broken, all] {
            match compile(&self.form(vocabulary, &loose)?) {
                Ok(compiled) => return Ok(compiled),
                Err(invalid) => refusal = invalid,
            }
        }
        Err(refused(refusal, param))
    }

    /// The form of a call of this tool alone, whether or not the request requires one.
    fn alone(&self, tool: &Tool, vocabulary: &Vocabulary) -> Result<Form, Error> {
        let conversation = Conversation {
            param: self.conversation.param,
            tools: vec![tool.clone()],
            choice: ToolChoice::Required,
            ..Conversation::default()
        };
        Asked { conversation: &conversation, formats: self.formats, content: None }
            .form(vocabulary, &HashSet::new())
    }

    fn form(&self, vocabulary: &Vocabulary, loose: &HashSet<usize>) -> Result<Form, Error> {
        let Self { conversation, formats, content } = self;
        if !conversation.may_call() {
            let content = (*content).cloned().unwrap_or_else(Form::text);
            return Ok(if reads_channels(*formats) { harmony::answer(content) } else { content });
        }
        let calls = tools::Calls::new(conversation, formats.tool, loose);
        let must_call = conversation.choice.is_required();
        if reads_channels(*formats) {
            return Ok(harmony::with_calls(&calls, must_call, *content));
        }
        match (must_call, *content) {
            (true, _) => calls.alone(vocabulary).ok_or_else(|| {
                let problem = "asks for a call, but this model is not known to write any";
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

/// How a form is compiled to a `T`.
struct Attempts<'a, T> {
    vocabulary: &'a Vocabulary,
    compile: &'a dyn Fn(&Form) -> Result<T, FormError>,
    /// Whether it would succeed.
    accepts: &'a dyn Fn(&Form) -> bool,
    /// The parameter that asks for the form, for errors without a place.
    param: &'a str,
}

/// Whether the whole text is messages in channels.
fn reads_channels(formats: Formats) -> bool {
    formats.tool == ToolFormat::Gptoss || formats.reasoning == ReasoningFormat::Gptoss
}

/// Free reasoning before the form, if the model reasons.
fn preface(compiler: &Compiler, model: &Model, prompt_end: &str) -> Option<Preface> {
    let (open, close) = match model.formats.reasoning {
        // Harmony's messages are part of the form.
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
    // The prompt has it over and done with.
    if end.ends_with(close) {
        return None;
    }
    compiler.preface(Some(open), close)
}

fn refused(invalid: FormError, param: &str) -> Error {
    let FormError { at, problem } = invalid;
    Error::invalid(if at.is_empty() { param.to_owned() } else { at }, problem)
}

/// Whether a body may ask for a form that has to be compiled: that takes longer than all else.
pub(crate) fn may_compile(body: &[u8]) -> bool {
    // The last is `text.format` of responses.
    const SIGNS: [&[u8]; 5] =
        [b"\"response_format\"", b"\"structured_outputs\"", b"\"guided_", b"\"tools\"", b"\"format\""];
    SIGNS.iter().any(|sign| memchr::memmem::find(body, sign).is_some())
}

#[cfg(test)]
mod tests;
