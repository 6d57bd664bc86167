//! The flags for the server's limits.

use std::time::Duration;

use clap::{Args, value_parser};

use crate::limits::HttpLimits;
use process::units::{ByteSize, duration};

/// The flags for the server's limits.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Maximum number of requests that the server handles at the same time.
    ///
    /// If exceeded: further requests are rejected with 429, `too_many_requests`, and `Retry-After`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1024,
        value_parser = value_parser!(u32).range(1..=1_048_576)
    )]
    pub max_concurrent_requests: u32,

    /// Maximum number of waiting sequences.
    ///
    /// If exceeded: further requests are rejected with 429, `queue_full`, and `Retry-After`; a single request with more
    /// sequences than the limit is rejected with 400, `integer_above_max_value`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1024,
        value_parser = value_parser!(u32).range(1..=1_048_576)
    )]
    pub max_queue: u32,

    /// Maximum size of a request body, including base64-encoded images. Accepts a unit suffix, as in 4MiB.
    ///
    /// If exceeded: the request is rejected with 413, `request_too_large`.
    #[arg(long, value_name = "SIZE", default_value = "32MiB")]
    pub max_body_bytes: ByteSize,

    /// Maximum total size of request bodies and their parsed JSON values in memory, from their arrival until the
    /// requests are prepared. Image files also count toward the limit, whether they are fetched or decoded from data:
    /// URLs. The parts of a request that its response repeats, and the items to be stored with the response, count
    /// toward the limit until the response is complete. Up to one eighth of the total is reserved for bodies of up to
    /// 64 KiB. The total must be at least four times `--max-body-bytes`.
    ///
    /// If exceeded: further requests are rejected with 429, `body_buffer_full`, and `Retry-After`; a request whose
    /// images alone need more than the part that is not reserved for small bodies is rejected with 400,
    /// `array_above_max_length`.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub max_buffered_body_bytes: ByteSize,

    /// Maximum memory for texts that are being tokenized. Tokenization takes up to 400 bytes of memory per byte of
    /// text. Texts of up to 64 KiB do not count toward the limit.
    ///
    /// If exceeded: further texts wait; a text that could need more than the limit is rejected with 400,
    /// `string_above_max_length`.
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    pub max_tokenizer_memory: ByteSize,

    /// Maximum memory for preprocessed images, from the preparation of their requests until the responses are complete.
    ///
    /// If exceeded: further requests are rejected with 429, `image_memory_full`, and `Retry-After`; a request whose
    /// images alone need more than the limit is rejected with 400, `array_above_max_length`.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub max_image_memory: ByteSize,

    /// Maximum number of open HTTP connections to the API.
    ///
    /// If exceeded: further connections wait, and connections that have not sent a request within one second are closed
    /// to make room for them.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 4096,
        value_parser = value_parser!(u32).range(1..=1_048_576)
    )]
    pub max_connections: u32,

    /// Time within which a client must send the headers of a request, and the same time again for its body. Idle
    /// connections are closed after the same time.
    ///
    /// If exceeded: the connection is closed; if only the body is late, the client first receives 408,
    /// `request_incomplete`.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub read_timeout: Duration,

    /// Time within which a client must read at least 16 KiB of a response, or the rest if less remains, once the
    /// buffers of its connection are full.
    ///
    /// If exceeded: the connection is closed and the request is canceled.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub write_timeout: Duration,

    /// Time within which requests, including background responses, must finish after SIGTERM or SIGINT. If
    /// `ovfleet-server drain` was run before the signal, the time counts from the start of that drain.
    ///
    /// If exceeded: the remaining requests are aborted.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub drain_timeout: Duration,
}

impl LimitArgs {
    /// Returns the limits of the HTTP listeners.
    pub(crate) fn http(&self) -> HttpLimits {
        HttpLimits {
            max_body_bytes: self.max_body_bytes.to_usize(),
            max_buffered_body_bytes: self.max_buffered_body_bytes.to_usize(),
            max_concurrent_requests: self.max_concurrent_requests as usize,
            max_connections: self.max_connections as usize,
            read_timeout: self.read_timeout,
            write_timeout: self.write_timeout,
        }
    }
}
