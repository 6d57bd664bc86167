//! The attacks. They try to trigger the defects that commit 3432560 had, and imitate careless clients.
//!
//! Most attacks check the statuses of their responses: a client error must be a 4xx, and 500 and 502 must never occur.

use std::pin::Pin;

use super::client::Targets;

mod connections;
pub(crate) mod forms;
mod generation;
mod protocol;
mod stored;
mod tenants;
mod texts;

type Attempt = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;

/// An attack, which returns a line that summarizes its responses.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Targets) -> Attempt,
}

macro_rules! attacks {
    ($($module:ident::$name:ident),* $(,)?) => {
        /// All attacks, in the order in which they run.
        pub(crate) const ATTACKS: &[Attack] = &[
            $(Attack { name: stringify!($name), run: |targets| Box::pin($module::$name(targets)) }),*
        ];
    };
}

attacks![
    stored::references_to_one_item,
    stored::huge_conversations,
    stored::long_chain_of_responses,
    stored::background_responses,
    tenants::other_tenants_objects,
    tenants::other_tenants_cache,
    tenants::unknown_keys,
    generation::many_choices_with_lookup,
    generation::long_drafts,
    generation::wide_beams,
    generation::prompt_log_probabilities,
    generation::numbers_at_the_edge,
    forms::expensive_grammars,
    forms::exponential_patterns,
    forms::exhausted_form_again,
    forms::thousands_of_alternatives,
    forms::broken_tool_schemas,
    forms::costly_forms,
    texts::digits_to_tokenize,
    texts::long_prompts,
    texts::truncated_conversations,
    texts::padded_bodies,
    texts::deep_nesting,
    texts::wide_json,
    connections::bodies_that_never_end,
    connections::silent_sockets,
    connections::readers_that_never_read,
    connections::slow_readers,
    connections::disconnects,
    protocol::half_closed_clients,
    protocol::broken_http,
];
