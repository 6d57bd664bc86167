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

/// What kind of processor it is: what was compiled for one is for no other.
pub(crate) fn identity() -> String {
    const TELLING: [&str; 9] = [
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
        "CPU variant",
    ];
    let all = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let first = all.split("\n\n").next().unwrap_or_default();
    let tells = |line: &&str| TELLING.iter().any(|word| line.starts_with(word));
    let lines: Vec<&str> =
        std::iter::once(std::env::consts::ARCH).chain(first.lines().filter(tells)).collect();
    lines.join("\n")
}
