// Finds and rewrites rotary embeddings.
#pragma once

#include <map>

#include <openvino/core/model.hpp>

namespace ovfleet {

// Returns the projections whose output a rotary embedding rotates in adjacent pairs, with their head sizes. `unknown` receives
// the number of these embeddings whose projection was not found.
std::map<const ov::Node*, size_t> paired_projections(const ov::Model& model, size_t& unknown);

// Rewrites rotary embeddings that compute the two halves of a head separately, so that they compute whole heads. Plugins fuse
// both forms, but an imported compiled model with separate halves computes wrong results: this form needs the size of the cos
// and sin tables, which plugins omit from the exported model.
void rotate_whole_heads(const ov::Model& model);

}  // namespace ovfleet
