//! Tests that transcripts of each format are parsed as expected, however they are split.

mod check;
mod deepseek;
mod gemma4;
mod gptoss;
mod granite;
mod hermes3;
mod lfm2;
mod llama3;
mod minicpm5;
mod mistral;
mod phi4;
mod promises;
mod qwen3coder;
