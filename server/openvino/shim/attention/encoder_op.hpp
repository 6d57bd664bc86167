// The native attention of image encoders as an operation of a graph.
#pragma once

#include <openvino/core/model.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// Replaces each attention operation without a mask, in which all tokens attend to each other, with the native attention, which
// multiplies in bf16 with the instruction sets `avx512_bf16` and `amx`, and in f32 with all others. Any other attention
// operation without a mask whose inputs have three dimensions gets a fourth one, so that the plugin computes it in blocks of
// queries. Precondition: queries and keys of equal shapes belong to the same tokens. Returns the number of replaced operations:
// 0 if `isa` is `plugin`.
size_t replace_encoder_attention(ov::Model& model, Isa isa);

}  // namespace ovfleet
