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
        let cache = match asked("KV_CACHE_PRECISION").unwrap_or("u8") {
            "f32" => CachePrecision::F32,
            "bf16" => CachePrecision::Bf16,
            "f16" => CachePrecision::F16,
            "u8" => CachePrecision::U8,
            _ => return None,
        };
        let in_bf16 = match (asked("INFERENCE_PRECISION_HINT"), asked("EXECUTION_MODE_HINT")) {
            (Some(precision), _) => precision == "bf16",
            (None, Some(mode)) => mode == "PERFORMANCE" && computes_in_bf16(core, device),
            (None, None) => computes_in_bf16(core, device),
        };
        Some(Self { cache, in_bf16 })
    }
}

/// Whether a device that is asked for nothing computes in bf16.
fn computes_in_bf16(core: &Core, device: &str) -> bool {
    core.property(device, "INFERENCE_PRECISION_HINT").is_ok_and(|precision| precision == "bf16")
}
