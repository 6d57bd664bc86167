// Finds and replaces the weights of a GGUF file in the graph.
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "weights.hpp"

// The last node of each weight, after its decompression, by the name of the weight's tensor in the file.
struct ovfleet_weights {
    std::unordered_map<std::string, std::shared_ptr<ov::Node>> nodes;
};

namespace {

using ovfleet::WEIGHT_PREFIX;

ov::element::Type element(uint32_t type) {
    switch (type) {
        case OVFLEET_U4: return ov::element::u4;
        case OVFLEET_U8: return ov::element::u8;
        case OVFLEET_I8: return ov::element::i8;
        case OVFLEET_F16: return ov::element::f16;
        case OVFLEET_BF16: return ov::element::bf16;
        case OVFLEET_F32: return ov::element::f32;
        case OVFLEET_F4E2M1: return ov::element::f4e2m1;
    }
    OPENVINO_THROW("unknown element type ", type);
}

std::shared_ptr<ov::Node> constant(ov::element::Type type, const ov::Shape& shape, const void* data) {
    ov::Tensor tensor(type, shape);
    std::memcpy(tensor.data(), data, tensor.get_byte_size());
    return std::make_shared<ov::op::v0::Constant>(tensor);
}

// Builds the operations Constant, Convert, Subtract, Multiply and Reshape: in this form, plugins keep weights compressed.
// `flat` is the shape of the weight in the graph: a matrix, or a stack of matrices.
std::shared_ptr<ov::Node> decompressed(const ovfleet_weight& weight, const ov::Shape& flat) {
    namespace op = ov::op;
    if (!weight.scales)
        return std::make_shared<op::v0::Convert>(constant(element(weight.type), flat, weight.quants), ov::element::f32);
    OPENVINO_ASSERT(weight.group && weight.columns % weight.group == 0, "the group size does not divide the number of columns");
    ov::Shape grouped(flat.begin(), flat.end() - 1), each;
    grouped.push_back(weight.columns / weight.group);
    each = grouped;
    grouped.push_back(weight.group);
    each.push_back(1);
    std::shared_ptr<ov::Node> value =
        std::make_shared<op::v0::Convert>(constant(element(weight.type), grouped, weight.quants), ov::element::f32);
    if (weight.zeros) {
        auto zeros =
            std::make_shared<op::v0::Convert>(constant(element(weight.zeros_type), each, weight.zeros), ov::element::f32);
        value = std::make_shared<op::v1::Subtract>(value, zeros);
    }
    value = std::make_shared<op::v1::Multiply>(value, constant(ov::element::f32, each, weight.scales));
    const std::vector<int64_t> shape(flat.begin(), flat.end());
    return std::make_shared<op::v1::Reshape>(value, constant(ov::element::i64, {shape.size()}, shape.data()), false);
}

}  // namespace

extern "C" int ovfleet_find_weights(const ov_model_t* model, ovfleet_weights_t** weights) {
    return ovfleet::guarded([&] {
        auto found = std::make_unique<ovfleet_weights>();
        for (const auto& node : model->object->get_ops()) {
            const auto& name = node->get_friendly_name();
            if (name.rfind(WEIGHT_PREFIX, 0) == 0) found->nodes[name.substr(WEIGHT_PREFIX.size())] = node;
        }
        *weights = found.release();
    });
}

extern "C" void ovfleet_free_weights(ovfleet_weights_t* weights) { delete weights; }

extern "C" int ovfleet_set_weight(ovfleet_weights_t* weights, const ovfleet_weight* weight, int* found) {
    return ovfleet::guarded([&] {
        const auto entry = weights->nodes.find(weight->tensor);
        *found = entry != weights->nodes.end();
        if (!*found) return;
        const auto old = entry->second;
        const auto shape = old->get_output_partial_shape(0);
        OPENVINO_ASSERT(shape.is_static() && (shape.size() == 2 || shape.size() == 3) &&
                            shape[shape.size() - 1] == int64_t(weight->columns) &&
                            ov::shape_size(shape.to_shape()) == weight->rows * weight->columns,
                        "tensor ", weight->tensor, " is ", shape, " in the graph");
        OPENVINO_ASSERT(old->get_output_element_type(0) == ov::element::f32, "tensor ", weight->tensor,
                        " is not f32 in the graph");
        auto replacement = decompressed(*weight, shape.to_shape());
        replacement->set_friendly_name(old->get_friendly_name());
        ov::replace_node(old, replacement);
        // The assignment frees the memory of the old weight.
        entry->second = replacement;
    });
}
