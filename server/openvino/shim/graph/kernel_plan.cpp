// Applies a kernel plan, which src/kernels.rs creates, to a graph.
#include <cstddef>

#include "../attention/encoder_op.hpp"
#include "../attention/op.hpp"
#include "../experts/rewrite.hpp"
#include "../projection/fuse_stages.hpp"
#include "../projection/rewrite.hpp"
#include "deferred.hpp"
#include "model.hpp"

namespace {

ovfleet::Precision precision(uint32_t element) {
    switch (element) {
        case OVFLEET_F32: return ovfleet::Precision::f32;
        case OVFLEET_BF16: return ovfleet::Precision::bf16;
        case OVFLEET_F16: return ovfleet::Precision::f16;
        case OVFLEET_U8: return ovfleet::Precision::u8;
        case OVFLEET_U4: return ovfleet::Precision::u4;
    }
    OPENVINO_THROW("a kernel plan has an unsupported KV cache precision: ", element);
}

bool is_bf16(uint32_t element) {
    OPENVINO_ASSERT(element == OVFLEET_F32 || element == OVFLEET_BF16, "a kernel plan has an unsupported precision: ", element);
    return element == OVFLEET_BF16;
}

ovfleet::Isa isa(uint32_t number) {
    OPENVINO_ASSERT(number < ovfleet::ISA_COUNT, "a kernel plan has an unknown instruction set: ", number);
    return ovfleet::Isa(number);
}

// src/shim/ffi.rs asserts the same layout for its struct.
static_assert(sizeof(ovfleet_kernel_plan) == 36 && alignof(ovfleet_kernel_plan) == 4);
static_assert(offsetof(ovfleet_kernel_plan, projection_isa) == 0);
static_assert(offsetof(ovfleet_kernel_plan, projection_activations) == 4);
static_assert(offsetof(ovfleet_kernel_plan, attention_isa) == 8);
static_assert(offsetof(ovfleet_kernel_plan, attention_activations) == 12);
static_assert(offsetof(ovfleet_kernel_plan, kv_cache) == 16);
static_assert(offsetof(ovfleet_kernel_plan, attention_mass) == 20);
static_assert(offsetof(ovfleet_kernel_plan, block_scores) == 24);
static_assert(offsetof(ovfleet_kernel_plan, projection_terms) == 28);
static_assert(offsetof(ovfleet_kernel_plan, native_experts) == 32);

static_assert(int(ovfleet::Isa::plugin) == OVFLEET_PLUGIN && int(ovfleet::Isa::portable) == OVFLEET_PORTABLE);
static_assert(int(ovfleet::Isa::avx2) == OVFLEET_AVX2 && int(ovfleet::Isa::avx_vnni) == OVFLEET_AVX_VNNI);
static_assert(int(ovfleet::Isa::avx512) == OVFLEET_AVX512 && int(ovfleet::Isa::avx512_vnni) == OVFLEET_AVX512_VNNI);
static_assert(int(ovfleet::Isa::avx512_bf16) == OVFLEET_AVX512_BF16 && int(ovfleet::Isa::amx) == OVFLEET_AMX);
static_assert(ovfleet::ISA_COUNT == OVFLEET_AMX + 1);

}  // namespace

extern "C" int ovfleet_supports_native_projections(ov_model_t* model, int* supported, int* experts) {
    return ovfleet::guarded([&] {
        const auto support = ovfleet::experts::support(*model->object);
        *experts = support.layers == 0    ? OVFLEET_NO_EXPERTS
                   : support.supports_all ? OVFLEET_NATIVE_EXPERTS
                                          : OVFLEET_PLUGIN_EXPERTS;
        *supported = support.supports_all && ovfleet::projection::supports_all(*model->object, support.routers);
    });
}

extern "C" int ovfleet_replace_encoder_attention(ov_model_t* model, uint32_t attention_isa, size_t* replaced) {
    return ovfleet::guarded([&] { *replaced = ovfleet::replace_encoder_attention(*model->object, isa(attention_isa)); });
}

extern "C" int ovfleet_replace_encoder_projections(ov_model_t* model, uint32_t projection_isa, uint32_t terms,
                                                   size_t* replaced) {
    return ovfleet::guarded([&] {
        auto& graph = *model->object;
        const ovfleet::projection::Target target{isa(projection_isa), ovfleet::projection::Activations::f32, terms};
        *replaced = ovfleet::projection::replace_projections(graph, target);
        ovfleet::fill_constants(graph);
    });
}

extern "C" int ovfleet_apply_kernel_plan(ov_model_t* model, const ovfleet_kernel_plan* plan, size_t* projections) {
    return ovfleet::guarded([&] {
        auto& graph = *model->object;
        const auto attention_isa = isa(plan->attention_isa), projection_isa = isa(plan->projection_isa);
        if (attention_isa != ovfleet::Isa::plugin)
            ovfleet::replace_attention(graph, {attention_isa, precision(plan->kv_cache), is_bf16(plan->attention_activations),
                                               plan->attention_mass, plan->block_scores != 0});
        ovfleet::select_logits(graph);
        if (attention_isa == ovfleet::Isa::plugin) ovfleet::name_heads(graph);
        *projections = 0;
        if (projection_isa != ovfleet::Isa::plugin) {
            const auto activations = is_bf16(plan->projection_activations) ? ovfleet::projection::Activations::bf16
                                                                           : ovfleet::projection::Activations::f32;
            const ovfleet::projection::Target target{projection_isa, activations, plan->projection_terms};
            if (plan->native_experts) ovfleet::experts::replace_experts(graph, target);
            *projections = ovfleet::projection::replace_projections(graph, target);
            ovfleet::projection::fuse_stages(graph);
        }
        ovfleet::fill_constants(graph);
    });
}
