//! The output of a parser.

/// A new part of a response. Its text, if it has one, is never empty.
///
/// # Guarantees
/// After adjacent deltas of the same kind are joined, the deltas of a response do not depend on how its text was split.
/// Deltas are never revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the response that is neither reasoning nor part of a tool call.
    Content(String),
    /// Text of the reasoning of the model.
    Reasoning(String),
    /// The beginning of a tool call.
    ToolCallBegin {
        /// The index of the call in the response: 0, 1, 2 and so on.
        index: u32,
        /// The name of the tool, which is never empty. It is not necessarily a tool that the request offers.
        name: String,
    },
    /// The next part of the arguments, as JSON, of the call that began last.
    ToolCallArguments {
        /// The index of the call.
        index: u32,
        /// The text. Joined together, the texts of a call are the beginning of a JSON object, or the whole object if
        /// [`Delta::ToolCallEnd`] follows.
        text: String,
    },
    /// The end of a call whose arguments are a complete JSON object. A call whose arguments are cut off or malformed
    /// has no such delta.
    ToolCallEnd {
        /// The index of the call.
        index: u32,
    },
}
