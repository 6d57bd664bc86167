//! Whose projections a model has: our own, which round what they multiply to 8 bits, or the plugin's.

use crate::asked::Asked;
use crate::unpacked::Unpack;
use crate::{processor, shim};

#[cfg(test)]
mod tests;

/// The property by which the plugin is told how it rounds; asking for anything by it asks for the plugin's projections.
const PLUGINS_ROUNDING: &str = "DYNAMIC_QUANTIZATION_GROUP_SIZE";

/// Whether projections are to be our own where they can.
pub(crate) fn are_own(asked: Asked<'_>, unpack: Unpack) -> bool {
    asked.device == "CPU"
        && !matches!(unpack, Unpack::FromTokens(_))
        && !asked.is_accurate()
        && asked.given(PLUGINS_ROUNDING).is_none()
        && shim::has_own_projections()
}

/// Whether they are the plugin's, and multiply 8-bit integers: for which it wants integer zero points.
pub(crate) fn are_plugins_in_bytes(asked: Asked<'_>, unpack: Unpack) -> bool {
    asked.device == "CPU"
        && !are_own(asked, unpack)
        && asked.given(PLUGINS_ROUNDING) != Some("0")
        && processor::multiplies_bytes()
}
