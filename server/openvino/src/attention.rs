//! Whose attention a model has: our own, over a cache of our own layout, where that does what is asked, else the plugin's.

use crate::asked::Asked;

#[cfg(test)]
mod tests;

/// Our own attention, as a model is to have it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OwnAttention {
    /// How the cache keeps numbers.
    pub(crate) cache: CachePrecision,
    /// What prompts are computed in.
    pub(crate) compute: Compute,
    /// What share of the weight the keys are to have that long prompts look at, if not all.
    pub(crate) share: Option<f32>,
    /// Whether it tells what weight decodes gave to blocks.
    pub(crate) weighs: bool,
}

/// What our own attention does only if it is asked to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// Of the weight of all keys, what share those are to have that long prompts look at, from 0 to 1. `None`: they look at all.
    /// It is not exact.
    pub share: Option<f32>,
    /// Whether it tells what weight decodes gave to blocks ([`server_engine::ModelRunner::block_scores`]).
    pub weighs: bool,
}

impl Attention {
    /// Whether anything is asked that the plugin's does not do.
    pub(crate) fn is_own(self) -> bool {
        self != Self::default()
    }
}

/// How our own cache keeps numbers. As the shim numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CachePrecision {
    F32 = 0,
    Bf16 = 1,
    F16 = 2,
    U8 = 3,
}

/// What our own attention computes prompts in, and what it is given. As the shim numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compute {
    F32 = 0,
    /// In bf16, as what is around it.
    Bf16 = 1,
    /// In bf16, what is around it is f32.
    Bf16AroundF32 = 2,
}

/// How properties begin by which a cache is asked for that only the plugin has.
const PLUGINS_OWN: [&str; 2] = ["KEY_CACHE_", "VALUE_CACHE_"];

impl OwnAttention {
    /// `None` where the attention is the plugin's. `is_around_f32` says that what is around it is f32 in any case.
    pub(crate) fn wanted(asked: Asked<'_>, is_around_f32: bool, attention: Attention) -> Option<Self> {
        let is_plugins =
            |(key, _): &(String, String)| PLUGINS_OWN.iter().any(|prefix| key.starts_with(prefix));
        if asked.device != "CPU" || asked.properties.iter().any(is_plugins) {
            return None;
        }
        let cache = match asked.precision("KV_CACHE_PRECISION").as_str() {
            "f32" => CachePrecision::F32,
            "bf16" => CachePrecision::Bf16,
            "f16" => CachePrecision::F16,
            "u8" => CachePrecision::U8,
            _ => return None,
        };
        let compute = match (asked.in_bf16(), is_around_f32) {
            (false, _) => Compute::F32,
            (true, false) => Compute::Bf16,
            (true, true) => Compute::Bf16AroundF32,
        };
        let Attention { share, weighs } = attention;
        Some(Self { cache, compute, share, weighs })
    }
}
