//! Turns the engine's tokens into deltas: detokenized text up to a stop string, parsed into content, reasoning and tool
//! calls, with log probabilities. Every answer is a stream of events. The endpoints encode its deltas one by one if the
//! client requested a stream, and combine them otherwise.

mod answer;
mod best;
mod choice;
mod delta;
mod parsed;

pub(crate) use answer::{Answer, AnswerEvent, SubmittedPrompt};
pub(crate) use delta::{ChoiceDelta, TokenText};
