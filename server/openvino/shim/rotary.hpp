// What rotary embeddings turn.
#pragma once

#include <map>

#include <openvino/core/model.hpp>

namespace ovfleet {

// The projections whose output a rotary embedding of adjacent pairs turns, with the size of the heads. `unknown` counts
// the embeddings whose projection is not found.
std::map<const ov::Node*, size_t> paired_projections(const ov::Model& model, size_t& unknown);

// Rewrites rotary embeddings that turn each half of a head by itself into ones that turn whole heads. Plugins fuse either,
// but what they write of the former, once compiled, lacks the size of its tables.
void rotate_whole_heads(const ov::Model& model);

}  // namespace ovfleet
