// The native attention of image encoders as an operation of a graph.
#pragma once

#include <openvino/core/model.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// Replaces the attention operations that the native attention supports, which are neither masked nor causal. The native
// attention multiplies in bf16 with the instruction sets `avx512_bf16` and `amx`, and in f32 with all others. Adds a
// fourth dimension to the inputs of any other attention operation that is neither masked nor causal and has three-dimensional
// inputs, so that the plugin computes its attention in blocks of queries. Precondition: if the queries and keys of an operation
// have equal shapes, they belong to the same tokens. Returns the number of replaced operations: 0 if `isa` is `plugin`.
size_t replace_encoder_attention(ov::Model& model, Isa isa);

}  // namespace ovfleet
