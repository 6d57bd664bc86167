//! The wire types of the responses and conversations endpoints: requests, items, responses, conversations, and the
//! events of a stream.
//!
//! A server stores responses in the format in which it sends them, so responses and items can be parsed as well
//! as serialized.

mod conversation;
mod event;
mod item;
mod request;
mod response;

pub use crate::text_or_list::TextOrList;
pub use conversation::{Conversation, DeletedObject, InputTokens, List};
pub use event::{Event, EventData, kind};
pub use item::{
    Call, CallOutput, CustomCall, Item, ItemStatus, Message, Output, Part, Reasoning, ReasoningText,
    SummaryText,
};
pub use request::{
    ConversationRequest, InputItem, InputPart, ItemsRequest, ReasoningParameter, Request, TextParameter,
};
pub use response::{
    ConversationName, IncompleteDetails, InputTokensDetails, Object, OutputTokensDetails, Response,
    ResponseError, ResponseUsage, Status, Warning,
};

#[cfg(test)]
mod tests;
