// What a weight is in a graph.
#pragma once

#include <memory>

#include <openvino/op/ops.hpp>

namespace ovfleet {

// Whether a node is constants and what plugins fold into a compressed weight, and nothing else.
inline bool is_weight(const std::shared_ptr<ov::Node>& node) {
    namespace op = ov::op;
    if (ov::is_type<op::v0::Constant>(node)) return true;
    if (!ov::is_type<op::v0::Convert>(node) && !ov::is_type<op::v1::Subtract>(node) &&
        !ov::is_type<op::v1::Multiply>(node) && !ov::is_type<op::v1::Reshape>(node))
        return false;
    for (size_t i = 0; i < node->get_input_size(); ++i)
        if (!is_weight(node->get_input_node_shared_ptr(i))) return false;
    return true;
}

}  // namespace ovfleet
