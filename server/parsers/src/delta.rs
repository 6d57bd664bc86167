//! What a parser gives out.

/// What is new in an answer. Text is never empty.
///
/// # Guarantees
/// Joined (adjacent deltas of a kind put together), the deltas of an answer are the same however its text was
/// cut into pieces. What was given out is never taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text for the reader.
    Content(String),
    /// What the model thought before, or between.
    Reasoning(String),
    /// A call begins.
    ToolCallBegin {
        /// Which call of the answer: 0, 1, 2 and so on.
        index: u32,
        /// The tool, whether or not it was offered. Not empty.
        name: String,
    },
    /// More of the arguments, as JSON. It belongs to the call that began last.
    ToolCallArguments {
        /// The call's.
        index: u32,
        /// All such text of a call, joined, is the beginning of a JSON object.
        text: String,
    },
    /// The arguments are a whole JSON object. A call that was cut off, or went wrong half way, has no end.
    ToolCallEnd {
        /// The call's.
        index: u32,
    },
}
