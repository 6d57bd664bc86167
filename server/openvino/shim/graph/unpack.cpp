// Converts weights to f32, for processors on which multiplying by compressed weights costs more than reading larger ones.
#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "weights.hpp"

namespace {

namespace op = ov::op;

// Whether a weight has integers of at most 8 bits. The constant shapes of reshapes have 64 bits.
bool is_compressed(const std::shared_ptr<ov::Node>& weight) {
    if (ov::is_type<op::v0::Constant>(weight)) {
        const auto type = weight->get_output_element_type(0);
        return type.is_integral_number() && type.bitwidth() <= 8;
    }
    for (size_t i = 0; i < weight->get_input_size(); ++i)
        if (is_compressed(weight->get_input_node_shared_ptr(i))) return true;
    return false;
}

// The projections with compressed weights, except for the vocabulary projection, which computes only a few rows of a step.
std::vector<std::shared_ptr<op::v0::MatMul>> projections(const ov::Model& model) {
    const auto vocabulary = *model.output(0).get_partial_shape().rbegin();
    std::vector<std::shared_ptr<op::v0::MatMul>> found;
    for (const auto& node : model.get_ops()) {
        auto matmul = ov::as_type_ptr<op::v0::MatMul>(node);
        if (!matmul || *matmul->get_output_partial_shape(0).rbegin() == vocabulary) continue;
        const auto weight = matmul->get_input_node_shared_ptr(1);
        if (ovfleet::is_weight(weight) && is_compressed(weight)) found.push_back(matmul);
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
            // Other readers of the weight keep the compressed one.
            matmul->input(1).replace_source_output(std::make_shared<op::v0::Constant>(values[0]));
        }
    });
}
