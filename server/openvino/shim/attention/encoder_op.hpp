// The native attention of image encoders as an operation of a graph.
#pragma once

#include <openvino/core/model.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// Replaces the attention operations that the native attention supports, which are neither masked nor causal. The native
// attention multiplies in bf16 with the instruction sets `avx512_bf16` and `amx`, and in f32 with all others. If any other
// attention operation is not causal, has no mask, and has inputs with three dimensions, a fourth dimension is added to the
// inputs, so that the plugin computes it in blocks of queries. Precondition: queries and keys of equal shapes belong to the
// same tokens. Returns the number of replaced operations: 0 if `isa` is `plugin`.
size_t replace_encoder_attention(ov::Model& model, Isa isa);

}  // namespace ovfleet
