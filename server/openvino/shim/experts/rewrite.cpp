#include "rewrite.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../graph/lora.hpp"
#include "../graph/weights.hpp"
#include "../projection/pack.hpp"
#include "../threads.hpp"
#include "op.hpp"

namespace ovfleet::experts {
namespace {

namespace op = ov::op;
using namespace projection;
using Output = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

// The experts of a layer in the form of the GGUF front end, after ovfleet_fix_experts.
struct Layer {
    Output src;
    // The sum of the experts.
    Output end;
    size_t used;
    NodePtr router;
    GraphWeight gate, up, down;
};

// The operation that multiplies each row by the matrices of its experts. The runtime's headers do not define it.
bool is_gather_matmul(const NodePtr& node) { return std::strcmp(node->get_type_name(), "GatherMatmul") == 0; }

template <typename Op>
std::shared_ptr<Op> as(const Output& value) {
    return ov::as_type_ptr<Op>(value.get_node_shared_ptr());
}

// The value before operations that only change its type or the division of its elements into dimensions.
Output before_reshapes(Output value) {
    while (as<op::v1::Reshape>(value) || as<op::v0::Convert>(value)) value = value.get_node()->input_value(0);
    return value;
}

// The value before a Transpose of the first two of three dimensions, if there is one.
Output before_transpose(const Output& value) {
    const auto transpose = as<op::v1::Transpose>(value);
    const auto order = transpose ? constant_of(transpose->get_input_node_shared_ptr(1)) : nullptr;
    return order && order->cast_vector<int64_t>() == std::vector<int64_t>{1, 0, 2} ? transpose->input_value(0) : value;
}

// The products of the experts that a value contains for each row; null if it is something else.
NodePtr gather_matmul_of(const Output& value) {
    const auto node = before_transpose(before_reshapes(value)).get_node_shared_ptr();
    if (!is_gather_matmul(node)) return nullptr;
    // The last input is the bias.
    for (size_t i = 3; i < node->get_input_size(); ++i)
        if (ov::shape_size(node->get_input_shape(i)) > 0) return nullptr;
    return node;
}

// The parts of swish(gate) * up; nothing if a value is something else.
std::optional<std::pair<Output, Output>> swiglu_of(const Output& value) {
    const auto product = as<op::v1::Multiply>(value);
    for (size_t side : {0, 1}) {
        const auto swish = product ? as<op::v1::Multiply>(product->input_value(side)) : nullptr;
        for (size_t direct : {0, 1}) {
            const auto sigmoid = swish ? as<op::v0::Sigmoid>(swish->input_value(1 - direct)) : nullptr;
            if (sigmoid && sigmoid->input_value(0) == swish->input_value(direct))
                return {{swish->input_value(direct), product->input_value(1 - side)}};
        }
    }
    return {};
}

// Whether the weights of a row's experts are `chosen`, divided by their sum.
bool is_normalized(const Output& weights, const Output& chosen) {
    const auto divided = as<op::v1::Divide>(before_reshapes(weights));
    if (!divided || before_reshapes(divided->input_value(0)) != chosen) return false;
    auto divisor = before_reshapes(divided->input_value(1));
    // Avoids a division by 0, but the largest probabilities do not have such a sum.
    if (as<op::v0::Clamp>(divisor)) divisor = before_reshapes(divisor.get_node()->input_value(0));
    const auto sum = as<op::v1::ReduceSum>(divisor);
    return sum && before_reshapes(sum->input_value(0)) == chosen;
}

// The logits of which a Softmax over the last dimension computes probabilities; nothing if a value is something else.
std::optional<Output> logits_of(const Output& probabilities) {
    const auto softmax = as<op::v8::Softmax>(probabilities);
    const auto rank = probabilities.get_partial_shape().rank();
    if (!softmax || rank.is_dynamic() || (softmax->get_axis() != -1 && softmax->get_axis() != rank.get_length() - 1)) return {};
    const auto scaled = as<op::v1::Multiply>(softmax->input_value(0));
    if (!scaled) return softmax->input_value(0);
    const auto factor = constant_of(scaled->get_input_node_shared_ptr(1));
    const bool is_one = factor && ov::shape_size(factor->get_shape()) == 1 && factor->cast_vector<float>()[0] == 1;
    return is_one ? std::make_optional(scaled->input_value(0)) : std::nullopt;
}

// Whether a weight is the matrix of a router, with a row for each expert. Files do not quantize it.
bool is_router(const NodePtr& weight, size_t count, size_t columns) {
    const auto constant = constant_of(weight);
    return constant && constant->get_element_type().is_real() && constant->get_shape() == ov::Shape{count, columns};
}

// The experts whose results a ReduceSum adds; nothing if it adds something else.
std::optional<Layer> layer_of(const NodePtr& sum) {
    const auto readers = sum->output(0).get_target_inputs();
    const auto end =
        readers.size() == 1 ? ov::as_type_ptr<op::v1::Reshape>(readers.begin()->get_node()->shared_from_this()) : nullptr;
    const auto transpose = as<op::v1::Transpose>(sum->input_value(0));
    const auto weighted = transpose ? as<op::v1::Multiply>(transpose->input_value(0)) : nullptr;
    if (!end || !weighted) return {};
    const size_t side = gather_matmul_of(weighted->input_value(0)) ? 0 : 1;
    const auto down = gather_matmul_of(weighted->input_value(side));
    const auto activated = down ? swiglu_of(before_reshapes(before_transpose(down->input_value(0)))) : std::nullopt;
    if (!activated) return {};
    const auto gate = gather_matmul_of(activated->first), up = gather_matmul_of(activated->second);
    if (!gate || !up) return {};

    Layer layer;
    layer.end = end->output(0);
    layer.src = before_reshapes(gate->input_value(0));
    // The result has the shape of the source.
    const auto shape = as<op::v3::ShapeOf>(end->input_value(1));
    if (before_reshapes(up->input_value(0)) != layer.src || !shape || shape->input_value(0) != layer.src) return {};
    if (layer.src.get_element_type() != ov::element::f32) return {};
    const auto numbers = before_reshapes(down->input_value(2));
    const auto top = as<op::v11::TopK>(numbers);
    const auto used = top ? constant_of(top->get_input_node_shared_ptr(1)) : nullptr;
    if (!used || numbers.get_index() != 1 || top->get_mode() != op::TopKMode::MAX) return {};
    if (before_reshapes(gate->input_value(2)) != numbers || before_reshapes(up->input_value(2)) != numbers) return {};
    const int64_t k = used->cast_vector<int64_t>()[0];
    if (k < 1) return {};
    layer.used = size_t(k);

    const auto probabilities = top->input_value(0);
    NodePtr gathered;
    for (const auto& reader : probabilities.get_target_inputs()) {
        const auto node = reader.get_node()->shared_from_this();
        if (ov::is_type<op::v6::GatherElements>(node) && before_reshapes(node->input_value(1)) == numbers &&
            is_normalized(weighted->input_value(1 - side), node->output(0)))
            gathered = node;
    }
    const auto logits = gathered ? logits_of(probabilities) : std::nullopt;
    const auto router = logits ? as<op::v0::MatMul>(before_reshapes(*logits)) : nullptr;
    if (!router || router->get_transpose_a() || !router->get_transpose_b() || lora_of(*router)) return {};
    if (before_reshapes(router->input_value(0)) != layer.src) return {};
    layer.router = router;

    const auto weight_of_experts = [](const NodePtr& node) { return weight_of(node->get_input_node_shared_ptr(1)); };
    const auto gates = weight_of_experts(gate), ups = weight_of_experts(up), downs = weight_of_experts(down);
    if (!gates || !ups || !downs) return {};
    layer.gate = *gates, layer.up = *ups, layer.down = *downs;
    const auto stack = gate->get_input_shape(1);
    if (stack.size() != 3 || up->get_input_shape(1) != stack) return {};
    if (down->get_input_shape(1) != ov::Shape{stack[0], stack[2], stack[1]}) return {};
    return is_router(router->get_input_node_shared_ptr(1), stack[0], stack[2]) ? std::make_optional(layer) : std::nullopt;
}

Experts experts_of(const Layer& layer, const Target& target) {
    Experts experts{};
    experts.count = layer.down.N / layer.gate.K;
    experts.used = layer.used;
    describe({&layer.gate, &layer.up}, experts.gate_up);
    describe({&layer.down}, experts.down);
    experts.gate_up.N = 2 * layer.down.K;
    experts.gate_up.epilogue = Epilogue::swiglu;
    experts.down.N = layer.gate.K;
    experts.gate_up.terms = experts.down.terms = target.terms;
    return experts;
}

// Writes a row of f32 for each expert, and the padding.
void write_router(const NodePtr& weight, const Experts& experts, float* to) {
    const auto values = constant_of(weight)->cast_vector<float>();
    const auto end = std::copy(values.begin(), values.end(), to);
    std::fill(end, to + router_rows(experts) * experts.gate_up.K, 0.0f);
}

void replace(const Layer& layer, const Target& target) {
    const auto experts = experts_of(layer, target);
    const char* fault = unsupported(experts);
    OPENVINO_ASSERT(!fault, "the experts of a layer are not supported: ", fault);
    ov::Tensor memory(ov::element::u8, {memory_bytes(experts)});
    auto* data = static_cast<uint8_t*>(memory.data());
    write_router(layer.router->get_input_node_shared_ptr(1), experts, reinterpret_cast<float*>(data));
    const WeightReader gate(layer.gate), up(layer.up), down(layer.down);
    const size_t inner = experts.down.K, outer = experts.down.N;
    for (size_t expert = 0; expert < experts.count; ++expert) {
        pack({{&gate, expert * inner, inner}, {&up, expert * inner, inner}}, experts.gate_up,
             data + gate_up_at(experts) + expert * matrix_bytes(experts.gate_up));
        pack({{&down, expert * outer, outer}}, experts.down, data + down_at(experts) + expert * matrix_bytes(experts.down));
    }
    const bool is_bf16 = target.activations == Activations::bf16;
    Output src = layer.src;
    if (is_bf16) src = std::make_shared<op::v0::Convert>(src, ov::element::bf16);
    NodePtr native = std::make_shared<ExpertsOp>(ov::OutputVector{src, std::make_shared<op::v0::Constant>(memory)}, target.isa,
                                                 experts, is_bf16);
    native->set_friendly_name(layer.end.get_node()->get_friendly_name());
    if (is_bf16) native = std::make_shared<op::v0::Convert>(native, ov::element::f32);
    Output end = layer.end;
    end.replace(native->output(0));
}

// The additions that may be those of experts.
std::vector<NodePtr> sums(const ov::Model& model) {
    std::vector<NodePtr> all;
    for (const auto& node : model.get_ordered_ops())
        if (ov::is_type<op::v1::ReduceSum>(node)) all.push_back(node);
    return all;
}

}  // namespace

Support support(const ov::Model& model) {
    Support found;
    size_t products = 0;
    for (const auto& node : model.get_ordered_ops()) products += is_gather_matmul(node) ? 1 : 0;
    if (products == 0) return found;
    size_t supported = 0;
    for (const auto& sum : sums(model)) {
        const auto layer = layer_of(sum);
        if (!layer || unsupported(experts_of(*layer, {Isa::portable, Activations::f32, TERMS_MAX}))) continue;
        found.routers.insert(layer->router.get());
        ++supported;
    }
    // A layer has three products.
    found.layers = div_up(products, 3);
    found.supports_all = 3 * supported == products;
    return found;
}

size_t replace_experts(ov::Model& model, const Target& target) {
    OPENVINO_ASSERT(projection_kernels(target.isa), "this processor does not have native experts for the instruction set ",
                    int64_t(target.isa));
    size_t replaced = 0;
    for (auto& sum : sums(model)) {
        auto layer = layer_of(sum);
        if (!layer) continue;
        // The memory of the weights of a layer is freed before those of the next one are packed.
        sum = nullptr;
        replace(*layer, target);
        ++replaced;
    }
    model.validate_nodes_and_infer_types();
    return replaced;
}

}  // namespace ovfleet::experts
