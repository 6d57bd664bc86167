//! What a device is asked for by its properties, and does by itself where it is asked for nothing.

use crate::runtime::Core;

/// A device and the properties it is given.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) core: &'a Core,
    pub(crate) device: &'a str,
    pub(crate) properties: &'a [(String, String)],
}

impl<'a> Asked<'a> {
    /// What is given.
    pub(crate) fn given(&self, key: &str) -> Option<&'a str> {
        self.properties.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Whether all is to be as accurate as it can.
    pub(crate) fn is_accurate(&self) -> bool {
        self.given("EXECUTION_MODE_HINT") == Some("ACCURACY")
    }

    /// A precision: the given one, or what the device takes.
    pub(crate) fn precision(&self, key: &str) -> String {
        match self.given(key) {
            Some(value) => value.to_owned(),
            None if self.is_accurate() => "f32".to_owned(),
            None => self.core.property(self.device, key).unwrap_or_default(),
        }
    }

    /// Whether the device computes in f16.
    pub(crate) fn in_f16(&self) -> bool {
        self.precision("INFERENCE_PRECISION_HINT") == "f16"
    }

    /// Whether the device computes in bf16.
    pub(crate) fn in_bf16(&self) -> bool {
        self.precision("INFERENCE_PRECISION_HINT") == "bf16"
    }
}
