//! When memory is given back.

use std::time::Duration;

use clap::Args as ClapArgs;

use super::duration;

/// When memory is given back, and how much.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Sleep")]
pub struct SleepArgs {
    /// Time without requests after which memory is given back, e.g. 10m. Default: never.
    ///
    /// The server stays ready. The next request wakes it, and waits for that.
    #[arg(long, env = "OVFLEET_SLEEP_AFTER", value_name = "TIME", value_parser = duration)]
    pub sleep_after: Option<Duration>,

    /// What is given back then. 1: the KV cache, and what is cached of prompts in it. 2: the model too, which is loaded
    /// again to wake; --cache-dir makes that faster.
    #[arg(
        long,
        env = "OVFLEET_SLEEP_LEVEL",
        value_name = "LEVEL",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(1..=2)
    )]
    pub sleep_level: u8,

    /// Answer POST /sleep, POST /wake_up and GET /is_sleeping, as vLLM has them, on the port of the API.
    ///
    /// Whoever reaches that port may then put the server to sleep.
    #[arg(long, env = "OVFLEET_ENABLE_SLEEP_MODE")]
    pub enable_sleep_mode: bool,
}
