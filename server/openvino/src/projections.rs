//! Whose projections a model has: our own, which round what they multiply to 8 bits as the plugin's do, or the plugin's.

use crate::asked::Asked;
use crate::shim;
use crate::unpacked::Unpack;

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
