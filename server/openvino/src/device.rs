//! The properties of a device that affect the choice of kernels: the configured values and, for precisions that are not
//! configured, defaults.

use crate::runtime::Core;

/// The prefixes of properties that configure a KV cache that only the plugin's attention supports.
const PLUGIN_CACHE_PREFIXES: [&str; 2] = ["KEY_CACHE_", "VALUE_CACHE_"];

/// A device with its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceOptions {
    /// Whether the CPU is the only device.
    pub(crate) is_cpu: bool,
    /// The precision of floating-point computations: `f32`, `bf16` or `f16`.
    pub(crate) inference_precision: String,
    pub(crate) kv_cache_precision: String,
    /// Whether the configuration prefers accuracy over speed.
    pub(crate) prefers_accuracy: bool,
    /// Whether the dynamic quantization of the plugin's projections is configured, on or off. If it is, the plugin's
    /// projections are used.
    pub(crate) configures_plugin_projections: bool,
    /// Whether the KV cache is configured by properties that only the plugin's attention supports.
    pub(crate) configures_plugin_cache: bool,
}

/// The configured value of a property. The last value of a repeated property applies.
pub(crate) fn configured_property<'a>(plugin_config: &'a [(String, String)], key: &str) -> Option<&'a str> {
    plugin_config.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
}

impl DeviceOptions {
    /// Reads the configuration. A precision that is not configured is f32 if the configuration prefers accuracy, and
    /// the device's default otherwise.
    pub(crate) fn read(core: &Core, device: &str, plugin_config: &[(String, String)]) -> Self {
        let configured = |key: &str| configured_property(plugin_config, key).map(str::to_owned);
        let prefers_accuracy = configured("EXECUTION_MODE_HINT").as_deref() == Some("ACCURACY");
        let precision = |key: &str| match configured(key) {
            Some(value) => value,
            None if prefers_accuracy => "f32".to_owned(),
            None => core.property(device, key).unwrap_or_default(),
        };
        let is_plugin_cache =
            |(key, _): &(String, String)| PLUGIN_CACHE_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        Self {
            is_cpu: device == "CPU",
            inference_precision: precision("INFERENCE_PRECISION_HINT"),
            kv_cache_precision: precision("KV_CACHE_PRECISION"),
            prefers_accuracy,
            configures_plugin_projections: configured("DYNAMIC_QUANTIZATION_GROUP_SIZE").is_some(),
            configures_plugin_cache: plugin_config.iter().any(is_plugin_cache),
        }
    }
}
