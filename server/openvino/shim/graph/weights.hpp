// Recognizes weights in a graph.
#pragma once

#include <memory>
#include <string_view>

#include <openvino/op/ops.hpp>

namespace ovfleet {

// If a node is a constant or converts a constant, returns this constant. Otherwise, returns null.
inline std::shared_ptr<ov::op::v0::Constant> constant_of(std::shared_ptr<ov::Node> node) {
    if (ov::is_type<ov::op::v0::Convert>(node)) node = node->get_input_node_shared_ptr(0);
    return ov::as_type_ptr<ov::op::v0::Constant>(node);
}

// The maximum number of nodes of a weight that the recursion visits, including repeated visits. A compressed weight has about
// ten nodes. Without the limit, the check would take exponential time for a chain of operations that read their input twice.
constexpr size_t WEIGHT_NODES_MAX = 64;

inline bool is_weight(const std::shared_ptr<ov::Node>& node, size_t& nodes_left) {
    namespace op = ov::op;
    if (nodes_left == 0) return false;
    --nodes_left;
    if (ov::is_type<op::v0::Constant>(node)) return true;
    if (!ov::is_type<op::v0::Convert>(node) && !ov::is_type<op::v1::Subtract>(node) && !ov::is_type<op::v1::Multiply>(node) &&
        !ov::is_type<op::v1::Reshape>(node))
        return false;
    for (size_t i = 0; i < node->get_input_size(); ++i)
        if (!is_weight(node->get_input_node_shared_ptr(i), nodes_left)) return false;
    return true;
}

// Whether a node is computed only from constants, with operations that plugins fold into a compressed weight.
inline bool is_weight(const std::shared_ptr<ov::Node>& node) {
    size_t nodes_left = WEIGHT_NODES_MAX;
    return is_weight(node, nodes_left);
}

// Whether a MatMul multiplies its input by the rows of a weight matrix.
inline bool is_projection(const std::shared_ptr<ov::op::v0::MatMul>& matmul) {
    auto weight = matmul->get_input_node_shared_ptr(1);
    return !matmul->get_transpose_a() && matmul->get_transpose_b() && is_weight(weight) &&
           weight->get_output_partial_shape(0).is_static() && weight->get_output_shape(0).size() == 2;
}

// The prefix that the GGUF front end adds to the name of a tensor.
constexpr std::string_view WEIGHT_PREFIX = "weight.weight_";

}  // namespace ovfleet
