//! The events of a streamed response.

use serde::Serialize;

use super::{Item, Part, Response, SummaryText};
use crate::ChatTokenLogprob;

/// The types of events.
pub mod kind {
    /// The first event: the response as it begins.
    pub const CREATED: &str = "response.created";
    /// It is to be made in the background.
    pub const QUEUED: &str = "response.queued";
    /// The model has begun.
    pub const IN_PROGRESS: &str = "response.in_progress";
    /// All of it was said; the last event.
    pub const COMPLETED: &str = "response.completed";
    /// It was cut off; the last event.
    pub const INCOMPLETE: &str = "response.incomplete";
    /// It failed, or was cancelled; the last event.
    pub const FAILED: &str = "response.failed";
    /// An item begins.
    pub const ITEM_ADDED: &str = "response.output_item.added";
    /// An item is as it stays.
    pub const ITEM_DONE: &str = "response.output_item.done";
    /// A part of a message begins.
    pub const PART_ADDED: &str = "response.content_part.added";
    /// A part of a message is as it stays.
    pub const PART_DONE: &str = "response.content_part.done";
    /// More text.
    pub const TEXT_DELTA: &str = "response.output_text.delta";
    /// All the text.
    pub const TEXT_DONE: &str = "response.output_text.done";
    /// The reasoning's text begins.
    pub const SUMMARY_PART_ADDED: &str = "response.reasoning_summary_part.added";
    /// The reasoning's text is as it stays.
    pub const SUMMARY_PART_DONE: &str = "response.reasoning_summary_part.done";
    /// More reasoning.
    pub const SUMMARY_DELTA: &str = "response.reasoning_summary_text.delta";
    /// All the reasoning.
    pub const SUMMARY_DONE: &str = "response.reasoning_summary_text.done";
    /// More of a call's arguments.
    pub const ARGUMENTS_DELTA: &str = "response.function_call_arguments.delta";
    /// All of a call's arguments.
    pub const ARGUMENTS_DONE: &str = "response.function_call_arguments.done";
    /// More of the input of a custom tool's call.
    pub const INPUT_DELTA: &str = "response.custom_tool_call_input.delta";
    /// All of the input of a custom tool's call.
    pub const INPUT_DONE: &str = "response.custom_tool_call_input.done";
    /// What went wrong.
    pub const ERROR: &str = "error";
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Event<'a> {
    /// One of [`kind`].
    pub r#type: &'static str,
    /// What it is about.
    #[serde(flatten)]
    pub data: EventData<'a>,
    /// From 0, without gaps.
    pub sequence_number: u64,
}

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EventData<'a> {
    /// The response.
    Response {
        /// As it is now.
        response: &'a Response,
    },
    /// An item.
    Item {
        /// Its place in the output.
        output_index: usize,
        /// As it is now.
        item: &'a Item,
    },
    /// A part of a message.
    Part {
        /// The message.
        item_id: &'a str,
        /// The message's place in the output.
        output_index: usize,
        /// The part's place in the message.
        content_index: usize,
        /// As it is now.
        part: &'a Part,
    },
    /// More text.
    TextDelta {
        /// The message.
        item_id: &'a str,
        /// The message's place in the output.
        output_index: usize,
        /// The part's place in the message.
        content_index: usize,
        /// The text.
        delta: &'a str,
        /// Of the tokens of the text, if asked for.
        logprobs: &'a [ChatTokenLogprob],
    },
    /// All the text.
    TextDone {
        /// The message.
        item_id: &'a str,
        /// The message's place in the output.
        output_index: usize,
        /// The part's place in the message.
        content_index: usize,
        /// The text.
        text: &'a str,
        /// Of the tokens of the text, if asked for.
        logprobs: &'a [ChatTokenLogprob],
    },
    /// The reasoning's text, as it begins and as it stays.
    SummaryPart {
        /// The reasoning.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The part's place in it.
        summary_index: usize,
        /// As it is now.
        part: &'a SummaryText,
    },
    /// More reasoning.
    SummaryDelta {
        /// The reasoning.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The part's place in it.
        summary_index: usize,
        /// The text.
        delta: &'a str,
    },
    /// All the reasoning.
    SummaryDone {
        /// The reasoning.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The part's place in it.
        summary_index: usize,
        /// The text.
        text: &'a str,
    },
    /// More of a call's arguments.
    ArgumentsDelta {
        /// The call's item.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The call.
        call_id: &'a str,
        /// The text.
        delta: &'a str,
    },
    /// All of a call's arguments.
    ArgumentsDone {
        /// The call's item.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The call.
        call_id: &'a str,
        /// The tool.
        name: &'a str,
        /// The text.
        arguments: &'a str,
    },
    /// More of the input of a custom tool's call.
    InputDelta {
        /// The call's item.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The text.
        delta: &'a str,
    },
    /// All of the input of a custom tool's call.
    InputDone {
        /// The call's item.
        item_id: &'a str,
        /// Its place in the output.
        output_index: usize,
        /// The text.
        input: &'a str,
    },
    /// What went wrong.
    Error {
        /// For programs.
        code: Option<&'a str>,
        /// For people.
        message: &'a str,
        /// The parameter at fault.
        param: Option<&'a str>,
    },
}
