//! Whose attention a model has: our own, over a cache of our own layout, where that does what is asked, else the plugin's.

use crate::runtime::Core;

#[cfg(test)]
mod tests;

/// Our own attention, as a model is to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnAttention {
    /// How the cache keeps numbers.
    pub(crate) cache: CachePrecision,
    /// Whether what is around it is computed in bf16.
    pub(crate) in_bf16: bool,
}

/// How our own cache keeps numbers. As the shim numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CachePrecision {
    F32 = 0,
    Bf16 = 1,
    F16 = 2,
    U8 = 3,
}

/// How properties begin by which a cache is asked for that only the plugin has.
const PLUGINS_OWN: [&str; 2] = ["KEY_CACHE_", "VALUE_CACHE_"];

impl OwnAttention {
    /// On this device with these properties; `None` where the attention is the plugin's.
    pub(crate) fn wanted(core: &Core, device: &str, properties: &[(String, String)]) -> Option<Self> {
        let asked = |key: &str| {
            properties.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
        };
        let is_plugins =
            |(key, _): &(String, String)| PLUGINS_OWN.iter().any(|prefix| key.starts_with(prefix));
        if device != "CPU" || properties.iter().any(is_plugins) {
            return None;
        }
        let by_itself = |key: &str| match asked("EXECUTION_MODE_HINT") {
            Some("ACCURACY") => "f32".to_owned(),
            _ => core.property(device, key).unwrap_or_default(),
        };
        let precision = |key: &str| asked(key).map_or_else(|| by_itself(key), str::to_owned);
        let cache = match precision("KV_CACHE_PRECISION").as_str() {
            "f32" => CachePrecision::F32,
            "bf16" => CachePrecision::Bf16,
            "f16" => CachePrecision::F16,
            "u8" => CachePrecision::U8,
            _ => return None,
        };
        Some(Self { cache, in_bf16: precision("INFERENCE_PRECISION_HINT") == "bf16" })
    }
}
