//! What the processor can do that decides about the form of weights.

/// Whether the processor multiplies 8-bit integers, for which plugins want integer zero points.
pub(crate) fn multiplies_bytes() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::is_x86_feature_detected!("avx512vnni") || std::is_x86_feature_detected!("avxvnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}
