// Helpers that match parts of graphs.
#pragma once

#include <memory>

#include <openvino/core/node.hpp>

namespace ovfleet {

// The operation that computes a value; null if the operation has another type.
template <typename Op>
std::shared_ptr<Op> as(const ov::Output<ov::Node>& value) {
    return ov::as_type_ptr<Op>(value.get_node_shared_ptr());
}

}  // namespace ovfleet
