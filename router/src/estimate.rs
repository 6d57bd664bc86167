//! Estimates quantities that a request does not contain: bytes per token, tokens per generated sequence, and tokens per
//! event of a stream. The estimates are updated from the usage that answers report.

/// The estimates for one model: moving averages that start at typical values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimates {
    bytes_per_token: f64,
    output_tokens: f64,
    tokens_per_event: f64,
}

/// The weight of a single observation in the moving averages.
const WEIGHT: f64 = 0.02;

impl Default for Estimates {
    fn default() -> Self {
        Self { bytes_per_token: 4.0, output_tokens: 128.0, tokens_per_event: 1.0 }
    }
}

impl Estimates {
    /// Updates the estimate of bytes per token from a prompt of `bytes` bytes and `tokens` tokens. An empty prompt is
    /// ignored.
    pub fn observe_prompt(&mut self, bytes: usize, tokens: u32) {
        if bytes > 0 && tokens > 0 {
            let ratio = (bytes as f64 / f64::from(tokens)).clamp(0.5, 16.0);
            self.bytes_per_token += WEIGHT * (ratio - self.bytes_per_token);
        }
    }

    /// Updates the estimate of tokens per sequence from a generated sequence of `tokens` tokens.
    pub fn observe_output(&mut self, tokens: u32) {
        self.output_tokens += WEIGHT * (f64::from(tokens) - self.output_tokens);
    }

    /// Updates the estimate of tokens per event from a stream of `events` events and `tokens` tokens. With speculative
    /// decoding, an event can contain several tokens.
    pub fn observe_events(&mut self, events: u32, tokens: u32) {
        if events > 0 && tokens > 0 {
            let ratio = (f64::from(tokens) / f64::from(events)).clamp(0.5, 64.0);
            self.tokens_per_event += WEIGHT * (ratio - self.tokens_per_event);
        }
    }

    /// The estimated number of tokens in a stream of `events` events.
    #[must_use]
    pub fn tokens_of_events(&self, events: u32) -> u32 {
        (f64::from(events) * self.tokens_per_event).ceil().min(f64::from(u32::MAX)) as u32
    }

    /// The average number of bytes per token.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_per_token
    }

    /// The estimated number of tokens in a text of `bytes` bytes, at least 1.
    #[must_use]
    pub fn prompt_tokens(&self, bytes: usize) -> u32 {
        (bytes as f64 / self.bytes_per_token).ceil().clamp(1.0, f64::from(u32::MAX)) as u32
    }

    /// The expected number of tokens in a generated sequence. It is at most `tokens_max`, if the client has set this
    /// limit.
    #[must_use]
    pub fn output_tokens(&self, tokens_max: Option<u32>) -> u32 {
        (self.output_tokens.round().clamp(1.0, f64::from(u32::MAX)) as u32)
            .min(tokens_max.unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_the_observations() {
        let mut estimates = Estimates::default();
        assert_eq!(estimates.tokens_of_events(7), 7);
        for _ in 0..1000 {
            estimates.observe_prompt(3000, 1000);
            estimates.observe_prompt(0, 5);
            estimates.observe_output(10);
            estimates.observe_events(100, 300);
            estimates.observe_events(0, 300);
        }
        assert_eq!(estimates.tokens_of_events(7), 21);
        assert!((estimates.bytes_per_token() - 3.0).abs() < 1e-3);
        assert_eq!(estimates.output_tokens(None), 10);
        assert_eq!(estimates.output_tokens(Some(4)), 4);
        assert_eq!((estimates.prompt_tokens(0), estimates.prompt_tokens(7)), (1, 3));
    }
}
