//! The flags for sleep mode.

use std::time::Duration;

use clap::{Args as ClapArgs, value_parser};

use process::units::duration;

/// The flags for sleep mode, which determine when an idle server releases memory, and which memory it releases.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Sleep")]
pub struct SleepArgs {
    /// Time without requests, such as `10m`, after which the server falls asleep and releases memory. Default: never.
    ///
    /// A sleeping server remains ready. The next request wakes the server, and waits until it is awake.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub sleep_after: Option<Duration>,

    /// The sleep level that --sleep-after uses. Level 1 releases the KV cache, including the prefix cache. Level 2 also
    /// releases the model, which is reloaded on wake-up; --cache-dir makes reloading faster. POST /sleep has its own
    /// parameter, `level`.
    #[arg(long, value_name = "LEVEL", default_value_t = 1, value_parser = value_parser!(u8).range(1..=2))]
    pub sleep_level: u8,

    /// Serve vLLM's POST /sleep, POST /wake_up and GET /is_sleeping on the port of the API.
    ///
    /// Any client that can reach the port can then put the server to sleep.
    #[arg(long)]
    pub enable_sleep_mode: bool,
}
