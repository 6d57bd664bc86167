// Helpers that match and create parts of graphs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <openvino/core/node.hpp>
#include <openvino/op/constant.hpp>

namespace ovfleet {

// The operation that computes a value; null if the operation has another type.
template <typename Op>
std::shared_ptr<Op> as(const ov::Output<ov::Node>& value) {
    return ov::as_type_ptr<Op>(value.get_node_shared_ptr());
}

// A constant vector, for example of the sizes of a shape.
inline std::shared_ptr<ov::op::v0::Constant> integer_constant(const std::vector<int64_t>& values) {
    return ov::op::v0::Constant::create(ov::element::i64, {values.size()}, values);
}

}  // namespace ovfleet
