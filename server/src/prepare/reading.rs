//! How the text of an answer is read: which formats, for which tools, and what of it goes out. Which formats a
//! model writes is the model's; which of them count for a request is decided here.

use std::sync::Arc;

use server_engine::TokenId;
use server_parsers::{Formats, Tools};

use super::conversation::Conversation;
use crate::mix::mix;
use crate::model::Model;

/// How the text of a choice is read.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) formats: Formats,
    pub(crate) tools: Arc<Tools>,
    /// The end of the rendered prompt: a tag in it may have opened reasoning.
    pub(crate) prompt_end: String,
    /// Most calls that go out. With the next one the choice ends.
    pub(crate) calls_max: u32,
    /// Whether reasoning goes out.
    pub(crate) shows_reasoning: bool,
    /// Special tokens that are text to the parser, ascending.
    pub(crate) kept: Arc<[TokenId]>,
    /// What the ids of calls are made of; no other request has it.
    pub(crate) seed: u64,
}

impl Reading {
    /// How answers to `conversation` are read; `None` if all of them is content.
    pub(super) fn of(
        conversation: &Conversation,
        prompt_end: String,
        model: &Model,
        seed: u64,
    ) -> Option<Self> {
        let offered: &[_] = if conversation.may_call() { &conversation.tools } else { &[] };
        let tools = Tools::new(offered.iter().map(|tool| (tool.name.as_str(), tool.parameters.as_ref())));
        let formats = model.formats.with_tools(&tools);
        if formats == Formats::default() {
            return None;
        }
        let kept = if tools.is_empty() { &model.kept_without_tools } else { &model.kept_with_tools };
        Some(Self {
            formats,
            tools: Arc::new(tools),
            prompt_end,
            calls_max: if conversation.parallel.unwrap_or(true) { u32::MAX } else { 1 },
            shows_reasoning: conversation.reasoning.is_shown,
            kept: Arc::clone(kept),
            seed,
        })
    }

    /// The id of a call, as OpenAI makes them.
    pub(crate) fn call_id(&self, choice: u32, call: u32) -> String {
        const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        const LENGTH: usize = 24;
        /// Letters out of one number: 62^8 is less than 2^64.
        const LETTERS_EACH: usize = 8;

        let mut state = mix(self.seed ^ mix(u64::from(choice) << 32 | u64::from(call)));
        let mut id = String::from("call_");
        for _ in 0..LENGTH / LETTERS_EACH {
            let mut number = state;
            for _ in 0..LETTERS_EACH {
                id.push(char::from(LETTERS[(number % 62) as usize]));
                number /= 62;
            }
            state = mix(state);
        }
        id
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_ids_of_calls_are_of_one_form_and_none_is_there_twice() {
        let reading = |seed| Reading {
            formats: Formats::default(),
            tools: Arc::default(),
            prompt_end: String::new(),
            calls_max: 1,
            shows_reasoning: true,
            kept: Arc::default(),
            seed,
        };
        let ids: Vec<String> = (0..20)
            .flat_map(|seed| (0..20).flat_map(move |choice| (0..20).map(move |call| (seed, choice, call))))
            .map(|(seed, choice, call)| reading(seed).call_id(choice, call))
            .collect();
        for id in &ids {
            let letters = id.strip_prefix("call_").unwrap();
            assert!(
                letters.len() == 24 && letters.bytes().all(|letter| letter.is_ascii_alphanumeric()),
                "{id}"
            );
        }
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len());
    }
}
