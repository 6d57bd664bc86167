//! Determines how the text of an answer is parsed: the formats, the tools, and the parts that the client receives. The
//! model defines the formats that it writes; this module decides which of them apply to a request.

use std::sync::Arc;

use server_engine::{TokenId, mix};
use server_parsers::{Formats, Tools};

use super::conversation::Conversation;
use crate::model::Model;

/// The settings for parsing the text of a choice.
#[derive(Clone, Debug)]
pub(crate) struct ParserSettings {
    pub(crate) formats: Formats,
    pub(crate) tools: Arc<Tools>,
    /// The end of the rendered prompt, in which a tag may have opened reasoning.
    pub(crate) prompt_end: String,
    /// The maximum number of calls that the client receives. A further call ends the choice.
    pub(crate) calls_max: u32,
    /// Whether the client receives the reasoning.
    pub(crate) shows_reasoning: bool,
    /// Special tokens that the parser reads as text, ascending.
    pub(crate) visible_tokens: Arc<[TokenId]>,
    /// The seed of the IDs of calls, which is unique to the request.
    pub(crate) seed: u64,
}

impl ParserSettings {
    /// Returns the settings for parsing answers to `conversation`, or `None` if all of their text is content.
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
        let visible_tokens = if tools.is_empty() {
            &model.visible_tokens_without_tools
        } else {
            &model.visible_tokens_with_tools
        };
        Some(Self {
            formats,
            tools: Arc::new(tools),
            prompt_end,
            calls_max: if conversation.parallel.unwrap_or(true) { u32::MAX } else { 1 },
            shows_reasoning: conversation.reasoning.is_shown,
            visible_tokens: Arc::clone(visible_tokens),
            seed,
        })
    }

    /// Returns the ID of a call, in the format of OpenAI's IDs.
    pub(crate) fn call_id(&self, choice: u32, call: u32) -> String {
        const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        const LENGTH: usize = 24;
        /// Number of characters that are derived from one 64-bit number: 62^8 is less than 2^64.
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
    fn the_ids_of_calls_have_one_form_and_are_unique() {
        let settings = |seed| ParserSettings {
            formats: Formats::default(),
            tools: Arc::default(),
            prompt_end: String::new(),
            calls_max: 1,
            shows_reasoning: true,
            visible_tokens: Arc::default(),
            seed,
        };
        let ids: Vec<String> = (0..20)
            .flat_map(|seed| (0..20).flat_map(move |choice| (0..20).map(move |call| (seed, choice, call))))
            .map(|(seed, choice, call)| settings(seed).call_id(choice, call))
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
