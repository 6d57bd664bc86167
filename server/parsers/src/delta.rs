//! The output of a parser.

/// The new part of a response. Its text is never empty.
///
/// # Guarantees
/// With adjacent deltas of a kind joined, the deltas of a response are the same however its text is split.
/// Deltas are never revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text for the reader.
    Content(String),
    /// Text of the reasoning of the model.
    Reasoning(String),
    /// The beginning of a tool call.
    ToolCallBegin {
        /// The index of the call in the response: 0, 1, 2 and so on.
        index: u32,
        /// The name of the tool, whether or not it was offered; never empty.
        name: String,
    },
    /// More of the arguments, as JSON, of the call that began last.
    ToolCallArguments {
        /// The index of the call.
        index: u32,
        /// The text. The texts of a call, joined, are the beginning of a JSON object.
        text: String,
    },
    /// The end of a call whose arguments are a complete JSON object. A call that was cut off or is malformed
    /// has no end.
    ToolCallEnd {
        /// The index of the call.
        index: u32,
    },
}
