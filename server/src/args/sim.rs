//! The flags of the simulator.

use std::time::Duration;

use clap::{Args as ClapArgs, value_parser};

use process::units::duration;

/// The flags of the simulator.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Simulator")]
pub struct SimArgs {
    /// Base time of a step, to which the times of its tokens are added.
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = duration)]
    pub sim_step_time: Duration,

    /// Time that each prompt token adds to a step.
    #[arg(long, value_name = "TIME", default_value = "250us", value_parser = duration)]
    pub sim_prefill_token_time: Duration,

    /// Time that each generating sequence adds to a step.
    #[arg(
        long,
        alias = "sim-decode-row-time",
        value_name = "TIME",
        default_value = "400us",
        value_parser = duration
    )]
    pub sim_decode_token_time: Duration,

    /// Number of blocks in the KV cache. The simulator ignores --kv-cache-size.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 4096,
        value_parser = value_parser!(u32).range(1..=16_777_216)
    )]
    pub sim_blocks: u32,

    /// Number of tokens in a block.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 16,
        value_parser = value_parser!(u32).range(1..=1024)
    )]
    pub sim_block_tokens: u32,

    /// Number of the step, counted from 1, at which the simulated device fails permanently. Use this flag to test how a
    /// fleet handles a replica whose engine has failed. Default: the device does not fail.
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u64).range(1..))]
    pub sim_fatal_step: Option<u64>,

    /// The answer of the simulated model in the first turn of a conversation. Repeatable: further values are the
    /// answers in the following turns, and the last value is the answer in all later turns. The text may contain
    /// special tokens. If --model is set, the model must have a chat template. Default: gibberish.
    #[arg(long = "sim-answer", value_name = "TEXT")]
    pub sim_answers: Vec<String>,

    /// Simulate a model that accepts images. Each image takes 16 tokens. Not supported together with --model.
    #[arg(long, conflicts_with = "model")]
    pub sim_images: bool,

    /// Context length in tokens, if neither --max-model-len nor the model files specify it.
    #[arg(long, value_name = "COUNT", default_value_t = 8192, value_parser = value_parser!(u32).range(2..))]
    pub sim_model_len: u32,
}
