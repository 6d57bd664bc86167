// What stands before an attention in a graph and is part of ours.
#pragma once

#include <optional>

#include <openvino/core/node.hpp>

#include "attention.hpp"

namespace ovfleet {

// The rows of one projection, of which each is a token's queries, keys and values after each other; and the tables by which
// rotary embeddings turn queries and keys before they are used.
struct Before {
    ov::Output<ov::Node> rows, cos, sin;
};

// Nothing if something else stands there.
std::optional<Before> before(const ov::Output<ov::Node>& queries, const ov::Output<ov::Node>& keys,
                             const ov::Output<ov::Node>& values, const Layer& layer);

}  // namespace ovfleet
