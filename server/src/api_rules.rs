//! The rules for requests, in cases where OpenAI's API and OVMS's differ.

use server_openai::{Content, Generation, Message};

/// The API whose rules apply to requests where OpenAI's API and OVMS's differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiRules {
    /// The rules of OpenAI's API.
    #[default]
    OpenAi,
    /// The rules of OVMS's API.
    Ovms,
}

impl ApiRules {
    /// Sets the parameters that are implied by other parameters of a request.
    pub(crate) fn complete(self, generation: &mut Generation) {
        // In OVMS, `best_of` is the width of a beam search.
        if self == Self::Ovms && generation.best_of.is_some_and(|width| width > 1) {
            generation.use_beam_search.get_or_insert(true);
        }
    }

    /// Sets the message fields that a request may omit under these rules.
    pub(crate) fn complete_messages(self, messages: &mut [Message]) {
        // In OVMS, missing content counts as empty. In both APIs, an assistant's message may lack content, so it is
        // left unchanged.
        if self == Self::Ovms {
            for message in messages.iter_mut().filter(|message| message.role != "assistant") {
                message.content.get_or_insert_with(|| Content::Text(String::new()));
            }
        }
    }

    /// Returns the default of `max_tokens` for completions; `None` means as many tokens as fit into the context.
    pub(crate) fn completion_tokens_default(self) -> Option<u32> {
        match self {
            Self::OpenAi => Some(16),
            Self::Ovms => None,
        }
    }
}
