// Finds the operations before an attention layer that the native attention can perform itself: the split of the merged
// projection, and the rotary embeddings.
#pragma once

#include <optional>

#include <openvino/core/node.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// The inputs of an attention layer that applies the rotary embedding: the output of a merged projection, in which the queries,
// keys and values of a token follow each other, and the tables of the embedding.
struct RopeInputs {
    ov::Output<ov::Node> qkv, cos, sin;
};

// Returns the inputs of an attention layer that applies the rotary embedding, or no value if the graph before the layer does
// not split a merged projection and apply rotary embeddings.
std::optional<RopeInputs> find_rope(const ov::Output<ov::Node>& queries, const ov::Output<ov::Node>& keys,
                                    const ov::Output<ov::Node>& values, const Layer& layer);

}  // namespace ovfleet
