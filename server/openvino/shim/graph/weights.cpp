// Finds the weights of a GGUF model in the graph, and replaces them with compressed constants, which are read from the file
// when they are needed.
#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>

#include "../threads.hpp"
#include "deferred.hpp"
#include "model.hpp"
#include "nodes.hpp"
#include "weights.hpp"

// The node that outputs each decompressed weight, keyed by the name of the weight's tensor in the file.
struct ovfleet_weights {
    std::shared_ptr<const ovfleet::TensorSource> source;
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

// What a constant of a weight contains.
enum class Content { quants, scales, zeros };

// The number of rows of a tensor that are read at once. It is even, so that each read of u4 elements begins at a byte boundary.
constexpr size_t ROWS_AT_ONCE = 64;

// Returns a constant of a weight, which is read from the file when it is needed.
std::shared_ptr<ov::Node> constant(const ovfleet::TensorRows& rows, Content content, ov::element::Type type,
                                   const ov::Shape& shape) {
    const size_t bits = ov::shape_size(shape) * type.bitwidth(), row_bits = rows.count ? bits / rows.count : 0;
    const auto fill = [rows, content, row_bits](uint8_t* to) {
        ovfleet::parallel_for_unbound(ovfleet::div_up(rows.count, ROWS_AT_ONCE), 1, [&](size_t part) {
            const size_t first = part * ROWS_AT_ONCE, count = std::min(ROWS_AT_ONCE, rows.count - first);
            void* at = to + first * row_bits / 8;
            rows.source->read(rows.tensor, rows.first + first, count, content == Content::quants ? at : nullptr,
                              content == Content::scales ? static_cast<float*>(at) : nullptr,
                              content == Content::zeros ? at : nullptr);
        });
    };
    return ovfleet::deferred_constant(type, shape, {{(bits + 7) / 8, fill, rows}});
}

// Builds a weight in the form in which plugins keep it compressed: a Constant and a Convert. If the weight has groups, Subtract
// (only with zero points), Multiply and Reshape follow. `flat` is the shape of the weight in the graph: a matrix, or a stack of
// matrices.
std::shared_ptr<ov::Node> decompressed(const std::shared_ptr<const ovfleet::TensorSource>& source, const ovfleet_weight& weight,
                                       const ov::Shape& flat) {
    namespace op = ov::op;
    const ovfleet::TensorRows rows{
        source, weight.number, 0, weight.rows, weight.fits_six_bits != 0, weight.has_super_scales != 0};
    const auto quants = [&](const ov::Shape& shape) { return constant(rows, Content::quants, element(weight.type), shape); };
    if (weight.group == 0) return std::make_shared<op::v0::Convert>(quants(flat), ov::element::f32);
    OPENVINO_ASSERT(weight.columns % weight.group == 0, "tensor ", weight.tensor, " has ", weight.columns,
                    " columns, which is not a multiple of its group size ", weight.group);
    ov::Shape grouped(flat.begin(), flat.end() - 1), each;
    grouped.push_back(weight.columns / weight.group);
    each = grouped;
    grouped.push_back(weight.group);
    each.push_back(1);
    std::shared_ptr<ov::Node> value = std::make_shared<op::v0::Convert>(quants(grouped), ov::element::f32);
    if (weight.has_zeros) {
        auto zeros = std::make_shared<op::v0::Convert>(constant(rows, Content::zeros, element(weight.zeros_type), each),
                                                       ov::element::f32);
        value = std::make_shared<op::v1::Subtract>(value, zeros);
    }
    value = std::make_shared<op::v1::Multiply>(value, constant(rows, Content::scales, ov::element::f32, each));
    return std::make_shared<op::v1::Reshape>(value, ovfleet::integer_constant({flat.begin(), flat.end()}), false);
}

}  // namespace

extern "C" int ovfleet_find_weights(const ov_model_t* model, const ovfleet_tensor_source* source, ovfleet_weights_t** weights) {
    return ovfleet::guarded([&] {
        auto owned = std::make_shared<const ovfleet::TensorSource>(*source);
        auto found = std::make_unique<ovfleet_weights>();
        found->source = std::move(owned);
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
                        "tensor ", weight->tensor, " has the unexpected shape ", shape, " in the graph");
        OPENVINO_ASSERT(old->get_output_element_type(0) == ov::element::f32, "tensor ", weight->tensor,
                        " is not f32 in the graph");
        auto replacement = decompressed(weights->source, *weight, shape.to_shape());
        replacement->set_friendly_name(old->get_friendly_name());
        ov::replace_node(old, replacement);
        entry->second = replacement;
    });
}
