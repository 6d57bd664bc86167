//! Each format by transcripts: what each means, and that it means it however it is cut into pieces.

mod check;
mod granite;
mod hermes3;
mod mistral;
mod phi4;
