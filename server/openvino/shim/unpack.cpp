// Weights in f32: for processors on which multiplying by compressed ones costs more than reading larger ones.
#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>

#include "model.hpp"

namespace {

namespace op = ov::op;

// Whether a node is made of constants by what compressed weights are made by; `integer` becomes true if one of
// the constants holds integers of at most 8 bits.
bool is_weight(const std::shared_ptr<ov::Node>& node, bool& integer) {
    if (ov::is_type<op::v0::Constant>(node)) {
        const auto type = node->get_output_element_type(0);
        integer |= type.is_integral_number() && type.bitwidth() <= 8;
        return true;
    }
    if (!ov::is_type<op::v0::Convert>(node) && !ov::is_type<op::v1::Subtract>(node) &&
        !ov::is_type<op::v1::Multiply>(node) && !ov::is_type<op::v1::Reshape>(node))
        return false;
    for (size_t i = 0; i < node->get_input_size(); ++i)
        if (!is_weight(node->get_input_node_shared_ptr(i), integer)) return false;
    return true;
}

// The projections with compressed weights, but for that to the vocabulary: few rows of a step go through it.
std::vector<std::shared_ptr<op::v0::MatMul>> projections(const ov::Model& model) {
    const auto vocabulary = *model.output(0).get_partial_shape().rbegin();
    std::vector<std::shared_ptr<op::v0::MatMul>> found;
    for (const auto& node : model.get_ops()) {
        auto matmul = ov::as_type_ptr<op::v0::MatMul>(node);
        bool integer = false;
        if (matmul && is_weight(matmul->get_input_node_shared_ptr(1), integer) && integer &&
            *matmul->get_output_partial_shape(0).rbegin() != vocabulary)
            found.push_back(matmul);
    }
    return found;
}

}  // namespace

extern "C" int ovfleet_unpacked_bytes(const ov_model_t* model, uint64_t* bytes) {
    return ovfleet::guarded([&] {
        *bytes = 0;
        for (const auto& matmul : projections(*model->object))
            *bytes += sizeof(float) * ov::shape_size(matmul->get_input_shape(1));
    });
}

extern "C" int ovfleet_unpack_weights(ov_model_t* model) {
    return ovfleet::guarded([&] {
        for (const auto& matmul : projections(*model->object)) {
            const auto weight = matmul->input_value(1);
            ov::Model constant(ov::OutputVector{weight}, ov::ParameterVector{});
            ov::TensorVector values{ov::Tensor(weight.get_element_type(), weight.get_shape())};
            OPENVINO_ASSERT(constant.evaluate(values, {}), "cannot compute ", weight.get_node()->get_friendly_name());
            // Only the projection takes them: whatever else reads the tensor goes on with the compressed one.
            matmul->input(1).replace_source_output(std::make_shared<op::v0::Constant>(values[0]));
        }
    });
}
