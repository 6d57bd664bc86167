// The native paged attention as an operation of a graph.
#pragma once

#include <openvino/core/model.hpp>
#include <openvino/core/op_extension.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// The configuration of the native attention of a model.
struct AttentionPlan {
    Isa isa;
    Precision kv_cache;
    // Whether queries, keys, values and outputs are bf16 instead of f32.
    bool is_bf16;
    float attention_mass;
    bool block_scores;
};

// Whether a model has attention layers, and the native attention supports all of them.
bool supports_native_attention(const ov::Model& model);

// Replaces the paged attention of a model with the native attention. With `block_scores`, the model gets another input: a
// buffer to which decodes add the attention that each block receives. Throws if the native attention does not support the
// model.
void replace_attention(ov::Model& model, const AttentionPlan& plan);

// Throws unless the numbers of KV heads and the head sizes of each attention layer of a model are from 1 to `HEADS_MAX`.
void check_attention_layers(const ov::Model& model);

// The extension with which an `ov::Core` can read graphs that contain this operation.
ov::Extension::Ptr attention_extension();

}  // namespace ovfleet
