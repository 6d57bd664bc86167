//! The simulator's part of the command line.

use std::time::Duration;

use clap::Args as ClapArgs;

use super::duration;

/// What the simulator simulates.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Simulator")]
pub struct SimArgs {
    /// Time of a step, whatever it computes.
    #[arg(
        long,
        env = "OVFLEET_SIM_STEP_TIME",
        value_name = "TIME",
        default_value = "5ms",
        value_parser = duration
    )]
    pub sim_step_time: Duration,

    /// Time of each prompt token in a step.
    #[arg(
        long,
        env = "OVFLEET_SIM_PREFILL_TOKEN_TIME",
        value_name = "TIME",
        default_value = "250us",
        value_parser = duration
    )]
    pub sim_prefill_token_time: Duration,

    /// Time of each generating sequence in a step.
    #[arg(
        long,
        env = "OVFLEET_SIM_DECODE_ROW_TIME",
        value_name = "TIME",
        default_value = "400us",
        value_parser = duration
    )]
    pub sim_decode_row_time: Duration,

    /// Blocks in the KV cache.
    #[arg(
        long,
        env = "OVFLEET_SIM_BLOCKS",
        value_name = "COUNT",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(1..=16_777_216)
    )]
    pub sim_blocks: u32,

    /// Tokens that a block holds.
    #[arg(
        long,
        env = "OVFLEET_SIM_BLOCK_TOKENS",
        value_name = "COUNT",
        default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub sim_block_tokens: u32,

    /// The step at which the simulated device fails for good, the first being 1: what a replica does whose engine
    /// dies. Default: none.
    #[arg(
        long,
        env = "OVFLEET_SIM_FATAL_STEP",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub sim_fatal_step: Option<u64>,

    /// What the simulated model says in the first, the second and so on of its turns in a conversation; after the last
    /// the last one again. Repeatable. Special tokens may be written out. Default: gibberish.
    #[arg(long = "sim-answer", env = "OVFLEET_SIM_ANSWER", value_name = "TEXT")]
    pub sim_answers: Vec<String>,

    /// Tokens of the longest sequence, if the model does not say.
    #[arg(
        long,
        env = "OVFLEET_SIM_MODEL_LEN",
        value_name = "COUNT",
        default_value_t = 8192,
        value_parser = clap::value_parser!(u32).range(2..)
    )]
    pub sim_model_len: u32,
}
