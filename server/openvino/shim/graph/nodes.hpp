// Helpers that match and create parts of graphs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <openvino/core/node.hpp>
#include <openvino/op/constant.hpp>
#include <openvino/op/parameter.hpp>

namespace ovfleet {

// Returns the operation that computes a value, or null if the operation has another type.
template <typename Op>
std::shared_ptr<Op> as(const ov::Output<ov::Node>& value) {
    return ov::as_type_ptr<Op>(value.get_node_shared_ptr());
}

// Returns a constant vector, for example the sizes of a shape.
inline std::shared_ptr<ov::op::v0::Constant> integer_constant(const std::vector<int64_t>& values) {
    return ov::op::v0::Constant::create(ov::element::i64, {values.size()}, values);
}

// Returns a new input for a model. The node and the tensor of the input have the name `name`.
inline std::shared_ptr<ov::op::v0::Parameter> named_parameter(const char* name, const ov::element::Type& type,
                                                              const ov::PartialShape& shape) {
    auto parameter = std::make_shared<ov::op::v0::Parameter>(type, shape);
    parameter->set_friendly_name(name);
    parameter->output(0).get_tensor().set_names({name});
    return parameter;
}

}  // namespace ovfleet
