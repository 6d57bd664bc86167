//! The events of a streamed response.

use serde::Serialize;

use super::{Item, Part, Response, SummaryText};
use crate::ChatTokenLogprob;

/// The types of the events of a stream.
pub mod kind {
    /// The first event: the response was created.
    pub const CREATED: &str = "response.created";
    /// The response is queued for generation in the background.
    pub const QUEUED: &str = "response.queued";
    /// The model began to generate the response.
    pub const IN_PROGRESS: &str = "response.in_progress";
    /// The last event: the response is complete.
    pub const COMPLETED: &str = "response.completed";
    /// The last event: the response was cut off.
    pub const INCOMPLETE: &str = "response.incomplete";
    /// The last event: the response failed or was canceled.
    pub const FAILED: &str = "response.failed";
    /// An output item begins.
    pub const ITEM_ADDED: &str = "response.output_item.added";
    /// An output item has ended: it is complete or was cut off.
    pub const ITEM_DONE: &str = "response.output_item.done";
    /// A part of a message begins.
    pub const PART_ADDED: &str = "response.content_part.added";
    /// A part of a message has ended.
    pub const PART_DONE: &str = "response.content_part.done";
    /// The event contains more text of a message.
    pub const TEXT_DELTA: &str = "response.output_text.delta";
    /// The text of a part of a message has ended.
    pub const TEXT_DONE: &str = "response.output_text.done";
    /// The part with the text of the reasoning begins.
    pub const SUMMARY_PART_ADDED: &str = "response.reasoning_summary_part.added";
    /// The part with the text of the reasoning has ended.
    pub const SUMMARY_PART_DONE: &str = "response.reasoning_summary_part.done";
    /// The event contains more text of the reasoning.
    pub const SUMMARY_DELTA: &str = "response.reasoning_summary_text.delta";
    /// The text of the reasoning has ended.
    pub const SUMMARY_DONE: &str = "response.reasoning_summary_text.done";
    /// The event contains more of the arguments of a function call.
    pub const ARGUMENTS_DELTA: &str = "response.function_call_arguments.delta";
    /// The arguments of a function call have ended.
    pub const ARGUMENTS_DONE: &str = "response.function_call_arguments.done";
    /// The event contains the input of a custom tool call, which is sent as a whole when the call ends.
    pub const INPUT_DELTA: &str = "response.custom_tool_call_input.delta";
    /// The input of a custom tool call has ended.
    pub const INPUT_DONE: &str = "response.custom_tool_call_input.done";
    /// An error occurred within the stream.
    pub const ERROR: &str = "error";
}

/// An event of a streamed response.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Event<'a> {
    /// The type of the event, one of the constants in [`kind`].
    pub r#type: &'static str,
    /// The data of the event.
    #[serde(flatten)]
    pub data: EventData<'a>,
    /// The number of the event in its stream, starting at 0 without gaps.
    pub sequence_number: u64,
}

/// The data of an event.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EventData<'a> {
    /// The state of the whole response.
    Response {
        /// The response in its current state.
        response: &'a Response,
    },
    /// An output item that was added or is complete.
    Item {
        /// The index of the item in the output.
        output_index: usize,
        /// The item in its current state.
        item: &'a Item,
    },
    /// A part of a message that was added or is complete.
    Part {
        /// The identifier of the message.
        item_id: &'a str,
        /// The index of the message in the output.
        output_index: usize,
        /// The index of the part in the message.
        content_index: usize,
        /// The part in its current state.
        part: &'a Part,
    },
    /// More text of a message.
    TextDelta {
        /// The identifier of the message.
        item_id: &'a str,
        /// The index of the message in the output.
        output_index: usize,
        /// The index of the part in the message.
        content_index: usize,
        /// The new text of the part.
        delta: &'a str,
        /// The log probabilities of the tokens of the text, if requested.
        logprobs: &'a [ChatTokenLogprob],
    },
    /// The whole text of a part, at its end.
    TextDone {
        /// The identifier of the message.
        item_id: &'a str,
        /// The index of the message in the output.
        output_index: usize,
        /// The index of the part in the message.
        content_index: usize,
        /// The whole text of the part.
        text: &'a str,
        /// The log probabilities of the tokens of the text, if requested.
        logprobs: &'a [ChatTokenLogprob],
    },
    /// The part with the text of the reasoning, at its beginning or its end.
    SummaryPart {
        /// The identifier of the reasoning item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The index of the part in the item.
        summary_index: usize,
        /// The part in its current state.
        part: &'a SummaryText,
    },
    /// More text of the reasoning.
    SummaryDelta {
        /// The identifier of the reasoning item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The index of the part in the item.
        summary_index: usize,
        /// The new text of the part.
        delta: &'a str,
    },
    /// The whole text of the reasoning, at its end.
    SummaryDone {
        /// The identifier of the reasoning item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The index of the part in the item.
        summary_index: usize,
        /// The whole text of the part.
        text: &'a str,
    },
    /// The next part of the arguments of a function call.
    ArgumentsDelta {
        /// The identifier of the item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The identifier of the call.
        call_id: &'a str,
        /// The new part of the arguments.
        delta: &'a str,
    },
    /// All generated arguments of a function call, at its end.
    ArgumentsDone {
        /// The identifier of the item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The identifier of the call.
        call_id: &'a str,
        /// The name of the tool.
        name: &'a str,
        /// The whole text of the arguments.
        arguments: &'a str,
    },
    /// The input of a custom tool call, which one event contains as a whole.
    InputDelta {
        /// The identifier of the item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The whole text of the input.
        delta: &'a str,
    },
    /// The input of a custom tool call, at its end.
    InputDone {
        /// The identifier of the item.
        item_id: &'a str,
        /// The index of the item in the output.
        output_index: usize,
        /// The whole text of the input.
        input: &'a str,
    },
    /// An error within the stream.
    Error {
        /// The machine-readable code of the error.
        code: Option<&'a str>,
        /// The human-readable description of the error.
        message: &'a str,
        /// The path of the parameter that caused the error.
        param: Option<&'a str>,
    },
}
