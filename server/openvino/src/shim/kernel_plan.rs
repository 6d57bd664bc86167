//! Converts the kernel plan to the struct of the C interface.

use super::ffi::RawKernelPlan;
use crate::kernels::{
    ExpertKernels, KernelPlan, NativeAttention, NativeProjections, Precision, ProductPrecision,
};

/// Number of 8-bit terms into which activations are split; 1 for the bf16 kernels, which do not split activations.
pub(super) fn terms(products: ProductPrecision) -> u32 {
    match products {
        ProductPrecision::Int8 | ProductPrecision::Bf16 => 1,
        ProductPrecision::Int16 => 2,
    }
}

/// `OVFLEET_PLUGIN` in `shim/shim.h`: the value of an instruction set that selects the plugin's kernels.
pub(super) const PLUGIN: u32 = 0;

impl From<&KernelPlan> for RawKernelPlan {
    fn from(plan: &KernelPlan) -> Self {
        let (projection_isa, projection_activations, products) = match plan.projections {
            Some(NativeProjections { isa, activations, products }) => (isa as u32, activations, products),
            None => (PLUGIN, Precision::F32, ProductPrecision::Int16),
        };
        let raw = Self {
            projection_isa,
            projection_activations: projection_activations as u32,
            attention_isa: PLUGIN,
            attention_activations: Precision::F32 as u32,
            kv_cache: Precision::F32 as u32,
            attention_mass: 0.0,
            block_scores: 0,
            projection_terms: terms(products),
            native_experts: u32::from(plan.experts == Some(ExpertKernels::Native)),
        };
        let Some(attention) = plan.attention else { return raw };
        let NativeAttention { isa, kv_cache, activations, attention_mass, block_scores } = attention;
        Self {
            attention_isa: isa as u32,
            attention_activations: activations as u32,
            kv_cache: kv_cache as u32,
            attention_mass: attention_mass.unwrap_or(0.0),
            block_scores: u32::from(block_scores),
            ..raw
        }
    }
}
