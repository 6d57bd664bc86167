//! The format of scenario files.

use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Scenario {
    Generate(Generate),
    Floor(Generate),
    Score(Score),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Generate {
    #[serde(default)]
    pub(crate) warmup: Vec<Work>,
    pub(crate) requests: Vec<Work>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Work {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: u32,
    #[serde(default)]
    pub(crate) ignore_eos: bool,
    #[serde(default)]
    pub(crate) logprobs: Option<u32>,
    #[serde(default)]
    pub(crate) arrival: Option<Arrival>,
}

/// The condition for the arrival of a request: the earlier request with the index `after_request` has generated
/// `tokens` tokens or has ended.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arrival {
    pub(crate) after_request: usize,
    pub(crate) tokens: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Score {
    pub(crate) sequences: Vec<Vec<u32>>,
    #[serde(default)]
    pub(crate) logits: Option<WantedLogits>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WantedLogits {
    pub(crate) file: String,
    /// Pairs of the index of a sequence and a position in it.
    pub(crate) rows: Vec<(usize, usize)>,
}
