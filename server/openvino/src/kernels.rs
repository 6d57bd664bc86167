//! Decides which kernels compute a model: the native kernels (ovfleet's, in `shim/`) or the plugin kernels
//! (OpenVINO's), for which instruction set and in which precision.
//!
//! The decision is a pure function of the configuration, the device, the processor and the graph. Its result is a
//! [`KernelPlan`], which the shim applies to the graph. To add kernels for another instruction set, add the instruction
//! set to [`Isa`] and to the order of preference in this module, and add the kernels to `shim/`; see `shim/README.md`.

use std::fmt;

use crate::Error;
use crate::config::{ActivationPrecision, Config};
use crate::cpu::{CpuFeatures, Isa};
use crate::device::DeviceOptions;

#[cfg(test)]
mod tests;

/// The parts of the configuration that affect the choice of kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct KernelOptions {
    /// The fraction of the attention mass that the selected keys of long prompts must cover. With `None`, prompts
    /// attend to all keys.
    pub(crate) sparse_attention: Option<f32>,
    /// Whether decodes report the attention to each block.
    pub(crate) block_scores: bool,
    pub(crate) activation_precision: ActivationPrecision,
    pub(crate) has_adapters: bool,
}

impl From<&Config> for KernelOptions {
    fn from(config: &Config) -> Self {
        Self {
            sparse_attention: config.sparse_attention,
            block_scores: config.block_scores,
            activation_precision: config.activation_precision,
            has_adapters: !config.adapters.is_empty(),
        }
    }
}

/// The parts of a graph that the native kernels support, regardless of the configuration and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphProperties {
    /// Whether the native kernels support every multiplication by weights, including those of experts.
    pub(crate) native_projections: bool,
    /// Whether the native attention supports every attention layer.
    pub(crate) native_attention: bool,
    pub(crate) experts: ExpertSupport,
}

/// Which kernels support the experts of a graph. The numbers are those of `ovfleet_experts` in `shim/shim.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertSupport {
    /// The graph has no experts.
    Absent = 0,
    /// Only the plugin kernels support all of them.
    Plugin = 1,
    Native = 2,
}

impl ExpertSupport {
    /// Returns the value with this number, or `None` if no value has it.
    pub(crate) fn new(number: u64) -> Option<Self> {
        [Self::Absent, Self::Plugin, Self::Native].into_iter().find(|one| *one as u64 == number)
    }
}

/// A floating-point or cache precision. The numbers are those of `ovfleet_element` in `shim/shim.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Precision {
    U4 = 0,
    U8 = 1,
    F16 = 3,
    Bf16 = 4,
    F32 = 5,
}

impl Precision {
    /// Returns the KV cache precision with this name, or `None` if the native attention does not support it.
    fn of_kv_cache(name: &str) -> Option<Self> {
        match name {
            "u4" => Some(Self::U4),
            "u8" => Some(Self::U8),
            "f16" => Some(Self::F16),
            "bf16" => Some(Self::Bf16),
            "f32" => Some(Self::F32),
            _ => None,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::U4 => "u4",
            Self::U8 => "u8",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// The kernels for multiplications by integer weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProjectionKernels {
    /// The native kernels, wherever they support the weights.
    Native(Isa),
    /// The plugin kernels, which read weights in any format.
    Plugin,
}

/// The precision in which the native projections multiply activations by weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProductPrecision {
    /// Activations are 8-bit integers, with a scale for every 32 activations. Activations far above the root mean
    /// square of their row are multiplied in f32.
    Int8,
    /// Activations are 15-bit integers, with a scale for every 32 activations. Kernels with VNNI multiply them as two
    /// 8-bit terms, and all other kernels as one 16-bit number.
    Int16,
    /// Activations and weights are in bf16.
    Bf16,
}

impl ProductPrecision {
    fn new(isa: Isa, activation_precision: ActivationPrecision) -> Self {
        match (isa, activation_precision) {
            // With AMX, 8-bit integers would not be faster: scaling the products of a group takes longer than computing
            // them.
            (Isa::Amx, _) => Self::Bf16,
            (_, ActivationPrecision::Auto) => Self::Int16,
            (_, ActivationPrecision::Int8) => Self::Int8,
        }
    }
}

impl fmt::Display for ProductPrecision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Bf16 => "bf16",
        })
    }
}

/// The native projections of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NativeProjections {
    pub(crate) isa: Isa,
    pub(crate) products: ProductPrecision,
    /// The precision of activations between projections and the operations around them: f32 or bf16.
    pub(crate) activations: Precision,
}

impl fmt::Display for NativeProjections {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { isa, products, activations } = self;
        write!(formatter, "native {isa}, {products} products, {activations} activations")
    }
}

/// The kernels of the experts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertKernels {
    /// The kernels of the native projections, which multiply the weights of each expert only by the rows that are
    /// assigned to it.
    Native,
    /// The plugin kernels.
    Plugin,
}

impl fmt::Display for ExpertKernels {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Native => "native",
            Self::Plugin => "plugin",
        })
    }
}

/// The native attention of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NativeAttention {
    pub(crate) isa: Isa,
    pub(crate) kv_cache: Precision,
    /// The precision of the queries, keys, values and outputs: f32 or bf16.
    pub(crate) activations: Precision,
    /// The fraction of the attention mass that the selected keys of long prompts must cover. With `None`, prompts
    /// attend to all keys.
    pub(crate) attention_mass: Option<f32>,
    /// Whether decodes report the attention to each block.
    pub(crate) block_scores: bool,
}

/// The kernels of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct KernelPlan {
    /// `None` leaves all projections to the plugin.
    pub(crate) projections: Option<NativeProjections>,
    /// `None` if the model has no experts.
    pub(crate) experts: Option<ExpertKernels>,
    /// `None` leaves the attention to the plugin.
    pub(crate) attention: Option<NativeAttention>,
    /// Whether the native kernels compute all projections and the attention. In this case, the plugin computes all
    /// other operations in f32 regardless of the configured precision, because these operations take little time.
    pub(crate) is_native: bool,
}

impl KernelPlan {
    /// Returns the properties that are passed to the plugin.
    pub(crate) fn plugin_properties(&self, plugin_config: &[(String, String)]) -> Vec<(String, String)> {
        const PRECISION: &str = "INFERENCE_PRECISION_HINT";
        let mut properties = plugin_config.to_vec();
        if self.is_native {
            properties.retain(|(key, _)| key != PRECISION);
            properties.push((PRECISION.to_owned(), "f32".to_owned()));
        }
        properties
    }
}

impl fmt::Display for KernelPlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.projections {
            Some(projections) => write!(formatter, "projections: {projections}; ")?,
            None => formatter.write_str("projections: plugin; ")?,
        }
        if let Some(experts) = self.experts {
            write!(formatter, "experts: {experts}; ")?;
        }
        let Some(attention) = self.attention else { return formatter.write_str("attention: plugin") };
        let NativeAttention { isa, kv_cache, activations, attention_mass, block_scores } = attention;
        write!(formatter, "attention: native {isa}")?;
        if isa == Isa::Amx && kv_cache != Precision::U4 {
            formatter.write_str(" (prompts in tiles, decodes in vectors)")?;
        }
        write!(formatter, ", {kv_cache} KV cache, {activations} activations")?;
        if let Some(mass) = attention_mass {
            write!(formatter, ", sparse (attention mass {mass})")?;
        }
        if block_scores { formatter.write_str(", block scores") } else { Ok(()) }
    }
}

/// The instruction sets of the native projections, the fastest first. Portable kernels also exist, but the plugin is
/// faster.
pub(crate) const PROJECTION_ISAS: [Isa; 4] = [Isa::Amx, Isa::Avx512Vnni, Isa::AvxVnni, Isa::Avx2];

/// The instruction sets of the native attention, the fastest first. The kernels of the first two multiply in bf16
/// (those for AMX, with a u4 cache, in f32), and are used only if the device prefers bf16. Those for AVX-512 with bf16
/// also require that the processor's AVX-512 products in bf16 are not slow. The kernels of the other three multiply in
/// f32. Prompts and decodes use the same kernels, so that the result of a token does not depend on the division of its
/// prompt into chunks. The kernels for AMX compute small numbers of queries with vector instructions, which produce the
/// same bits as the tiles.
pub(crate) const ATTENTION_ISAS: [Isa; 5] =
    [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Portable];
/// The instruction sets of [`ATTENTION_ISAS`] whose kernels multiply in bf16.
pub(crate) const BF16_ATTENTION_ISAS: [Isa; 2] = [Isa::Amx, Isa::Avx512Bf16];

impl CpuFeatures {
    /// Whether the processor can run the kernels for an instruction set.
    pub(crate) fn has(self, isa: Isa) -> bool {
        match isa {
            Isa::Portable => true,
            Isa::Avx2 => self.avx2,
            Isa::AvxVnni => self.avx_vnni,
            Isa::Avx512 => self.avx512,
            Isa::Avx512Vnni => self.avx512_vnni,
            Isa::Avx512Bf16 => self.avx512_bf16,
            Isa::Amx => self.amx,
        }
    }

    fn first(self, isas: &[Isa]) -> Option<Isa> {
        isas.iter().copied().find(|isa| self.has(*isa))
    }

    /// Returns the instruction set for attention in bf16, or `None` if the processor has none or computes attention
    /// faster in f32.
    fn bf16_attention(self) -> Option<Isa> {
        self.first(&BF16_ATTENTION_ISAS).filter(|isa| *isa == Isa::Amx || !self.slow_avx512_bf16)
    }

    /// Returns the instruction set for the attention of a language model.
    fn attention(self, prefers_bf16: bool) -> Option<Isa> {
        let bf16 = self.bf16_attention().filter(|_| prefers_bf16);
        bf16.or_else(|| self.first(&ATTENTION_ISAS[BF16_ATTENTION_ISAS.len()..]))
    }
}

/// Chooses the kernels for projections. This choice does not depend on the graph, so it can be made before the graph is
/// read.
pub(crate) fn projection_kernels(device: &DeviceOptions, cpu: CpuFeatures) -> ProjectionKernels {
    let allows_native = device.is_cpu && !device.prefers_accuracy && !device.configures_plugin_projections;
    match cpu.first(&PROJECTION_ISAS) {
        Some(isa) if allows_native => ProjectionKernels::Native(isa),
        _ => ProjectionKernels::Plugin,
    }
}

/// The native kernels of an image encoder. The plugin computes everything else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EncoderPlan {
    /// The multiplications by integer weights. `None` leaves them to the plugin.
    pub(crate) projections: Option<NativeProjections>,
    /// The attention without masks. `None` leaves it to the plugin.
    pub(crate) attention: Option<Isa>,
}

/// Chooses the kernels of an image encoder. `precision` is that of the plugin's operations, which is f32 unless another
/// one is configured. In any other precision, the plugin computes everything.
///
/// Projections with AMX and the native attention multiply in bf16, so they are used only if the device prefers bf16.
/// The attention also requires fast bf16 instructions. A language model has the same conditions for attention in bf16,
/// but its projections use AMX regardless of the preference. All other operations read and return f32. In f32, the
/// plugin's attention is faster than the native one.
pub(crate) fn plan_encoder(
    options: &KernelOptions,
    device: &DeviceOptions,
    cpu: CpuFeatures,
    precision: &str,
) -> EncoderPlan {
    if precision != "f32" {
        return EncoderPlan::default();
    }
    let uses_bf16 = device.is_cpu && device.inference_precision == "bf16";
    let projections = match projection_kernels(device, CpuFeatures { amx: cpu.amx && uses_bf16, ..cpu }) {
        ProjectionKernels::Native(isa) => Some(NativeProjections {
            isa,
            products: ProductPrecision::new(isa, options.activation_precision),
            activations: Precision::F32,
        }),
        ProjectionKernels::Plugin => None,
    };
    EncoderPlan { projections, attention: cpu.bf16_attention().filter(|_| uses_bf16) }
}

/// Chooses the kernels of a model.
///
/// # Errors
/// The configuration requires native kernels, but they do not support the device, the graph or the rest of the
/// configuration.
pub(crate) fn plan_kernels(
    options: &KernelOptions,
    device: &DeviceOptions,
    cpu: CpuFeatures,
    graph: GraphProperties,
) -> Result<KernelPlan, Error> {
    let projections = match projection_kernels(device, cpu) {
        ProjectionKernels::Native(isa) => Some(isa),
        ProjectionKernels::Plugin => None,
    };
    let are_all_projections_native = projections.is_some() && graph.native_projections;
    let is_bf16 = device.inference_precision == "bf16";
    // If the plugin computed in f16, it would pass f16 activations to the native kernels, which read only f32 and bf16.
    // Therefore, if f16 is configured, a graph whose kernels can all be native is compiled in f32, and any other graph
    // uses no native kernels.
    let is_f16 = device.inference_precision == "f16";
    let float = |is_bf16: bool| if is_bf16 { Precision::Bf16 } else { Precision::F32 };
    let allows_native_attention = device.is_cpu
        && !device.configures_plugin_cache
        && graph.native_attention
        && (!is_f16 || are_all_projections_native);
    let kv_cache = Precision::of_kv_cache(&device.kv_cache_precision).filter(|_| allows_native_attention);
    let attention = kv_cache.zip(cpu.attention(is_bf16)).map(|(kv_cache, isa)| NativeAttention {
        isa,
        kv_cache,
        activations: float(is_bf16 && !are_all_projections_native),
        attention_mass: options.sparse_attention,
        block_scores: options.block_scores,
    });
    if attention.is_none() && (options.sparse_attention.is_some() || options.block_scores) {
        return Err(Error::Unsupported(
            "sparse attention and KV eviction need the native attention kernels, which do not support this device, \
             model, inference precision or KV cache configuration"
                .to_owned(),
        ));
    }
    let is_native = are_all_projections_native && attention.is_some();
    let projections = projections.filter(|_| !is_f16 || is_native).map(|isa| NativeProjections {
        isa,
        products: ProductPrecision::new(isa, options.activation_precision),
        activations: float(is_bf16 && !is_native),
    });
    // In a graph whose projections can all be native, the adapters are attached to the projections instead of being
    // added to the graph, so the plugin cannot compute them.
    if are_all_projections_native && projections.is_none() && options.has_adapters {
        return Err(Error::Unsupported(
            "with INFERENCE_PRECISION_HINT=f16, LoRA adapters need the native attention kernels, which do not support this \
             KV cache configuration or model; use bf16 or f32"
                .to_owned(),
        ));
    }
    let experts = match graph.experts {
        ExpertSupport::Absent => None,
        ExpertSupport::Native if projections.is_some() => Some(ExpertKernels::Native),
        ExpertSupport::Native | ExpertSupport::Plugin => Some(ExpertKernels::Plugin),
    };
    Ok(KernelPlan { projections, experts, attention, is_native })
}
