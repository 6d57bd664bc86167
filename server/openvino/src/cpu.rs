//! The features of the processor on which kernels depend.

use std::fmt;

use crate::tiles::{TileSupport, tile_support};

/// An instruction set for which native kernels are compiled. The numbers are those of `ovfleet_isa` in `shim/shim.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Isa {
    /// Plain C++ without intrinsics, which every processor runs.
    Portable = 1,
    /// AVX2, FMA and F16C.
    Avx2 = 2,
    /// AVX2 with 8-bit dot products.
    AvxVnni = 3,
    /// AVX-512 F, BW, VL and DQ.
    Avx512 = 4,
    /// AVX-512 with 8-bit dot products.
    Avx512Vnni = 5,
    /// AVX-512 with bf16 dot products.
    Avx512Bf16 = 6,
    /// AVX-512 with the tile registers of AMX and their bf16 products.
    Amx = 7,
}

impl Isa {
    /// All instruction sets.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 7] = [
        Self::Portable,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::Amx,
    ];
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx_vnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512_vnni",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx_bf16",
        })
    }
}

/// The features of a processor that affect the choice of kernels. The field of an instruction set is true only if the
/// processor also has the other instruction sets on which the native kernels of the same name depend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuFeatures {
    pub(crate) avx2: bool,
    pub(crate) avx_vnni: bool,
    pub(crate) avx512: bool,
    pub(crate) avx512_vnni: bool,
    pub(crate) avx512_bf16: bool,
    /// Whether the f32 products of AVX-512 are faster than its bf16 products, as on Intel's processors
    /// ([decision 0108](../../../docs/decisions/0108-slow-bf16.md)).
    pub(crate) slow_avx512_bf16: bool,
    /// Whether the processor has AMX and the operating system permits this process to use it.
    pub(crate) amx: bool,
}

impl CpuFeatures {
    /// The features of the processor on which this process runs.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            let avx512 = avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
            Self {
                avx2,
                avx_vnni: avx2 && has!("avxvnni"),
                avx512,
                avx512_vnni: avx512 && has!("avx512vnni"),
                avx512_bf16: avx512 && has!("avx512bf16"),
                slow_avx512_bf16: is_intel(),
                amx: avx512 && tile_support() == TileSupport::Granted,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::default()
    }
}

/// Whether Intel made the processor.
#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == *b"GenuineIntel"
}

/// Returns, as text, the model and the features of the processor, and whether AMX is permitted. A cached compiled model
/// is used only if this text equals that of the processor for which the model was compiled.
pub(crate) fn identity() -> String {
    const RELEVANT: [&str; 9] = [
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
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let first = processors.split("\n\n").next().unwrap_or_default();
    let is_relevant = |line: &&str| RELEVANT.iter().any(|word| line.starts_with(word));
    let lines: Vec<&str> =
        std::iter::once(std::env::consts::ARCH).chain(first.lines().filter(is_relevant)).collect();
    format!("{}\n{:?}", lines.join("\n"), tile_support())
}
