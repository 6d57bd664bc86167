#include "rewrite.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../graph/deferred.hpp"
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

using ConstantPtr = std::shared_ptr<op::v0::Constant>;

// A stack of matrices, one for each expert, and their biases, which are null if the matrices have none.
struct Matrix {
    GraphWeight weight;
    ConstantPtr bias;
};

// The experts of a layer as the GGUF front end builds them, after `ovfleet_fix_experts` has run.
struct Layer {
    Output src;
    // The sum of the experts' weighted results.
    Output end;
    size_t used;
    Epilogue epilogue;
    NodePtr router;
    // Null if the router has no bias.
    ConstantPtr router_bias;
    Matrix gate, up, down;
};

// Whether a node multiplies each row by the matrices of the row's experts. The headers of the runtime do not define the type of
// this operation, so its name is compared.
bool is_gather_matmul(const NodePtr& node) { return std::strcmp(node->get_type_name(), "GatherMatmul") == 0; }

template <typename Op>
std::shared_ptr<Op> as(const Output& value) {
    return ov::as_type_ptr<Op>(value.get_node_shared_ptr());
}

// The value before operations that change only its type or its shape.
Output before_reshapes(Output value) {
    while (as<op::v1::Reshape>(value) || as<op::v0::Convert>(value)) value = value.get_node()->input_value(0);
    return value;
}

// Returns the value before a Transpose of the first two of three dimensions, or the value itself if no such Transpose
// computes it.
Output before_transpose(const Output& value) {
    const auto transpose = as<op::v1::Transpose>(value);
    const auto order = transpose ? constant_of(transpose->get_input_node_shared_ptr(1)) : nullptr;
    return order && order->cast_vector<int64_t>() == std::vector<int64_t>{1, 0, 2} ? transpose->input_value(0) : value;
}

// The GatherMatmul that multiplies each row by a matrix of each of its experts, the indices of these experts, and the bias that
// is added to the products (null if there is none).
struct Products {
    NodePtr matmul;
    Output numbers;
    ConstantPtr bias;
};

// Returns the GatherMatmul that computes a value, or nullopt if there is none or it has a bias.
std::optional<Products> plain_products_of(const Output& value) {
    const auto node = before_transpose(before_reshapes(value)).get_node_shared_ptr();
    if (!is_gather_matmul(node)) return {};
    // The inputs after the indices, such as a bias, must be empty.
    for (size_t i = 3; i < node->get_input_size(); ++i)
        if (ov::shape_size(node->get_input_shape(i)) > 0) return {};
    return Products{node, before_reshapes(node->input_value(2)), nullptr};
}

// Returns the GatherMatmul that computes a value, with its bias if it has one, or nullopt if no GatherMatmul computes the
// value.
std::optional<Products> products_of(const Output& value) {
    const auto sum = as<op::v1::Add>(before_reshapes(value));
    if (!sum) return plain_products_of(value);
    for (size_t side : {0, 1}) {
        auto products = plain_products_of(sum->input_value(side));
        // For each expert of a source row, this value contains the expert's row of the bias.
        const auto rows = before_reshapes(sum->input_value(1 - side)).get_node_shared_ptr();
        if (!products || !ov::is_type<ov::op::util::GatherBase>(rows)) continue;
        products->bias = constant_of(rows->get_input_node_shared_ptr(0));
        const auto axis = constant_of(rows->get_input_node_shared_ptr(2));
        const bool is_of_experts = axis && axis->cast_vector<int64_t>() == std::vector<int64_t>{0} &&
                                   before_reshapes(rows->input_value(1)) == products->numbers;
        const auto stack = products->matmul->get_input_partial_shape(1);
        if (!is_of_experts || !products->bias || !products->bias->get_element_type().is_real() || stack.is_dynamic() ||
            stack.size() != 3 || products->bias->get_shape() != ov::Shape{stack.to_shape()[0], stack.to_shape()[1]})
            return {};
        return products;
    }
    return {};
}

// Returns the scalar constant that `Op` combines with `other` to compute a value, or nullopt if the value is computed
// in another way.
template <typename Op>
std::optional<float> number_beside(const Output& value, const Output& other) {
    const auto node = as<Op>(value);
    for (size_t side : {0, 1}) {
        const ConstantPtr constant = node ? constant_of(node->get_input_node_shared_ptr(side)) : nullptr;
        if (constant && node->input_value(1 - side) == other && ov::shape_size(constant->get_shape()) == 1)
            return constant->cast_vector<float>()[0];
    }
    return {};
}

// The gates and the up projection from which an activation is computed.
struct Activation {
    Output gate, up;
    Epilogue epilogue;
};

// Returns the gate and up projections of a clamped SwiGLU, which is gate * sigmoid(scaled) * shifted: `gate` is the clamped
// gate projection, `scaled` is a multiple of `gate`, and `shifted` is the clamped up projection plus 1. Returns nullopt if the
// values have another form, or if their constants differ from those that the kernels use.
std::optional<Activation> clamped_swiglu_of(const Output& gate, const Output& scaled, const Output& shifted) {
    constexpr double infinity = std::numeric_limits<float>::max(), limit = CLAMPED_SWIGLU_LIMIT;
    const auto gates = as<op::v0::Clamp>(gate);
    if (!gates || gates->get_min() > -infinity || gates->get_max() != limit) return {};
    if (number_beside<op::v1::Multiply>(scaled, gate) != CLAMPED_SWIGLU_ALPHA) return {};
    for (const auto& input : shifted.get_node()->input_values()) {
        const auto ups = as<op::v0::Clamp>(input);
        if (ups && ups->get_min() == -limit && ups->get_max() == limit && number_beside<op::v1::Add>(shifted, input) == 1.0f)
            return Activation{gates->input_value(0), ups->input_value(0), Epilogue::clamped_swiglu};
    }
    return {};
}

// Returns the inputs of swish(gate) * up, or of its clamped form, or nullopt if the value is computed in another way.
std::optional<Activation> activation_of(const Output& value) {
    const auto product = as<op::v1::Multiply>(value);
    for (size_t side : {0, 1}) {
        const auto swish = product ? as<op::v1::Multiply>(product->input_value(side)) : nullptr;
        for (size_t direct : {0, 1}) {
            const auto sigmoid = swish ? as<op::v0::Sigmoid>(swish->input_value(1 - direct)) : nullptr;
            if (!sigmoid) continue;
            const auto gate = swish->input_value(direct), up = product->input_value(1 - side);
            if (sigmoid->input_value(0) == gate) return Activation{gate, up, Epilogue::swiglu};
            if (auto clamped = clamped_swiglu_of(gate, sigmoid->input_value(0), up)) return clamped;
        }
    }
    return {};
}

// Whether the weights of a row's experts are the values `chosen`, divided by the sum of these values.
bool is_normalized(const Output& weights, const Output& chosen) {
    const auto divided = as<op::v1::Divide>(before_reshapes(weights));
    if (!divided || before_reshapes(divided->input_value(0)) != chosen) return false;
    auto divisor = before_reshapes(divided->input_value(1));
    // Ignore the clamp: it prevents a division by 0, but the sum of the largest probabilities is never close to 0.
    if (as<op::v0::Clamp>(divisor)) divisor = before_reshapes(divisor.get_node()->input_value(0));
    const auto sum = as<op::v1::ReduceSum>(divisor);
    return sum && before_reshapes(sum->input_value(0)) == chosen;
}

// Returns the value before a multiplication by 1, the value itself if it is not a product, or nullopt if the factor is
// another number.
std::optional<Output> unscaled(const Output& value) {
    const auto scaled = as<op::v1::Multiply>(value);
    if (!scaled) return value;
    const auto factor = constant_of(scaled->get_input_node_shared_ptr(1));
    const bool is_one = factor && ov::shape_size(factor->get_shape()) == 1 && factor->cast_vector<float>()[0] == 1;
    return is_one ? std::make_optional(scaled->input_value(0)) : std::nullopt;
}

// Returns the logits from which a Softmax over the last dimension computes the probabilities, or nullopt if no Softmax
// computes them.
std::optional<Output> logits_of(const Output& probabilities) {
    const auto softmax = as<op::v8::Softmax>(probabilities);
    const auto rank = probabilities.get_partial_shape().rank();
    if (!softmax || rank.is_dynamic() || (softmax->get_axis() != -1 && softmax->get_axis() != rank.get_length() - 1)) return {};
    return unscaled(softmax->input_value(0));
}

// Whether the weights of a row's experts are the softmax of the logits `chosen`.
bool is_softmax(const Output& weights, const Output& chosen) {
    const auto softmax = as<op::v8::Softmax>(weights);
    const auto& shape = weights.get_partial_shape();
    // The shape of the weights is [1, tokens, experts, 1], so axis 2 is that of the experts.
    if (!softmax || shape.rank().is_dynamic() || shape.size() != 4 || shape[3] != 1 || softmax->get_axis() != 2) return false;
    const auto logits = unscaled(softmax->input_value(0));
    return logits && before_reshapes(*logits) == chosen;
}

// Whether a weight is the matrix of a router, with a row for each expert. GGUF files do not quantize this matrix.
bool is_router(const NodePtr& weight, size_t count, size_t columns) {
    const auto constant = constant_of(weight);
    return constant && constant->get_element_type().is_real() && constant->get_shape() == ov::Shape{count, columns};
}

// Returns the experts whose results a ReduceSum adds, or nullopt if it adds other values or the experts have an unknown form.
std::optional<Layer> layer_of(const NodePtr& sum) {
    const auto readers = sum->output(0).get_target_inputs();
    const auto end =
        readers.size() == 1 ? ov::as_type_ptr<op::v1::Reshape>(readers.begin()->get_node()->shared_from_this()) : nullptr;
    const auto transpose = as<op::v1::Transpose>(sum->input_value(0));
    const auto weighted = transpose ? as<op::v1::Multiply>(transpose->input_value(0)) : nullptr;
    if (!end || !weighted) return {};
    const size_t side = products_of(weighted->input_value(0)) ? 0 : 1;
    const auto downs = products_of(weighted->input_value(side));
    const auto activated =
        downs ? activation_of(before_reshapes(before_transpose(downs->matmul->input_value(0)))) : std::nullopt;
    if (!activated) return {};
    const auto gates = products_of(activated->gate), ups = products_of(activated->up);
    if (!gates || !ups) return {};
    const auto &gate = gates->matmul, &up = ups->matmul, &down = downs->matmul;

    Layer layer;
    layer.end = end->output(0);
    layer.epilogue = activated->epilogue;
    layer.src = before_reshapes(gate->input_value(0));
    // The result has the shape of the source.
    const auto shape = as<op::v3::ShapeOf>(end->input_value(1));
    if (before_reshapes(up->input_value(0)) != layer.src || !shape || shape->input_value(0) != layer.src) return {};
    if (layer.src.get_element_type() != ov::element::f32) return {};
    const auto& numbers = downs->numbers;
    const auto top = as<op::v11::TopK>(numbers);
    const auto used = top ? constant_of(top->get_input_node_shared_ptr(1)) : nullptr;
    if (!used || numbers.get_index() != 1 || top->get_mode() != op::TopKMode::MAX) return {};
    if (gates->numbers != numbers || ups->numbers != numbers) return {};
    const int64_t k = used->cast_vector<int64_t>()[0];
    if (k < 1) return {};
    layer.used = size_t(k);

    // A graph chooses experts either by their probabilities, which it then divides by their sum, or by their logits, to which
    // it then applies softmax.
    const auto ranked = top->input_value(0), weights = weighted->input_value(1 - side);
    std::optional<Output> logits;
    for (const auto& reader : ranked.get_target_inputs()) {
        const auto node = reader.get_node()->shared_from_this();
        if (!ov::is_type<op::v6::GatherElements>(node) || before_reshapes(node->input_value(1)) != numbers) continue;
        if (is_normalized(weights, node->output(0))) logits = logits_of(ranked);
        else if (is_softmax(weights, node->output(0))) logits = ranked;
    }
    if (!logits) return {};
    auto products = before_reshapes(*logits);
    if (const auto sum = as<op::v1::Add>(products)) {
        layer.router_bias = constant_of(sum->get_input_node_shared_ptr(1));
        if (!layer.router_bias || !layer.router_bias->get_element_type().is_real()) return {};
        products = before_reshapes(sum->input_value(0));
    }
    const auto router = as<op::v0::MatMul>(products);
    if (!router || router->get_transpose_a() || !router->get_transpose_b() || lora_of(*router)) return {};
    if (before_reshapes(router->input_value(0)) != layer.src) return {};
    layer.router = router;

    const auto weight_of_experts = [](const NodePtr& node) { return weight_of(node->get_input_node_shared_ptr(1)); };
    const auto gate_weight = weight_of_experts(gate), up_weight = weight_of_experts(up), down_weight = weight_of_experts(down);
    if (!gate_weight || !up_weight || !down_weight) return {};
    layer.gate = {*gate_weight, gates->bias}, layer.up = {*up_weight, ups->bias}, layer.down = {*down_weight, downs->bias};
    const auto stack = gate->get_input_shape(1);
    if (stack.size() != 3 || up->get_input_shape(1) != stack) return {};
    if (down->get_input_shape(1) != ov::Shape{stack[0], stack[2], stack[1]}) return {};
    if (layer.router_bias && ov::shape_size(layer.router_bias->get_shape()) != stack[0]) return {};
    return is_router(router->get_input_node_shared_ptr(1), stack[0], stack[2]) ? std::make_optional(layer) : std::nullopt;
}

// The attributes of the operation, except for the scale factors, which depend on the content of the weights.
Experts form_of(const Layer& layer, const Target& target) {
    Experts experts{};
    const auto &gate = layer.gate.weight, &up = layer.up.weight, &down = layer.down.weight;
    experts.count = down.N / gate.K;
    experts.used = layer.used;
    experts.has_biases = layer.router_bias || layer.gate.bias || layer.up.bias || layer.down.bias;
    describe_form({&gate, &up}, experts.gate_up);
    describe_form({&down}, experts.down);
    experts.gate_up.N = 2 * down.K;
    experts.gate_up.epilogue = layer.epilogue;
    experts.down.N = gate.K;
    experts.gate_up.terms = experts.down.terms = target.terms;
    return experts;
}

// Writes the matrix of the router: a row of f32 for each expert, and the padding.
void write_router(const NodePtr& weight, const Experts& experts, float* to) {
    const auto constant = constant_of(weight);
    fill(*constant);
    const auto values = constant->cast_vector<float>();
    const auto end = std::copy(values.begin(), values.end(), to);
    std::fill(end, to + router_rows(experts) * experts.gate_up.K, 0.0f);
}

// Returns the elements of a bias, or `count` zeros if it is null.
std::vector<float> numbers_of(const ConstantPtr& bias, size_t count) {
    if (bias) fill(*bias);
    return bias ? bias->cast_vector<float>() : std::vector<float>(count);
}

// The biases of a layer, each of which may be null.
struct Biases {
    ConstantPtr router, gate, up, down;
};

void write_biases(const Biases& biases, const Experts& experts, uint8_t* memory) {
    const auto floats_at = [&](size_t at) { return reinterpret_cast<float*>(memory + at); };
    const size_t inner = experts.down.K, outer = experts.down.N;
    const auto router = numbers_of(biases.router, experts.count);
    std::memset(memory + router_bias_at(experts), 0, gate_up_bias_at(experts) - router_bias_at(experts));
    std::copy(router.begin(), router.end(), floats_at(router_bias_at(experts)));
    const auto gate = numbers_of(biases.gate, experts.count * inner), up = numbers_of(biases.up, experts.count * inner),
               down = numbers_of(biases.down, experts.count * outer);
    std::vector<float> both(2 * inner);
    for (size_t expert = 0; expert < experts.count; ++expert) {
        const auto second = std::copy_n(gate.begin() + ptrdiff_t(expert * inner), inner, both.begin());
        std::copy_n(up.begin() + ptrdiff_t(expert * inner), inner, second);
        pack_bias(experts.gate_up, both.data(), floats_at(gate_up_bias_at(experts)) + expert * bias_size(experts.gate_up));
        pack_bias(experts.down, down.data() + expert * outer,
                  floats_at(down_bias_at(experts)) + expert * bias_size(experts.down));
    }
}

void replace(const Layer& layer, const Target& target) {
    auto experts = form_of(layer, target);
    set_scale_factor({&layer.gate.weight, &layer.up.weight}, experts.gate_up);
    set_scale_factor({&layer.down.weight}, experts.down);
    const char* fault = unsupported(experts);
    OPENVINO_ASSERT(!fault, "the experts of a layer are not supported: ", fault);
    // Do not capture nodes that read `layer.src`: the closure keeps its captures alive, so they would remain readers of this
    // value.
    const auto router = layer.router->get_input_node_shared_ptr(1);
    const auto fill = [experts, router, router_bias = layer.router_bias, gates = layer.gate, ups = layer.up,
                       downs = layer.down](uint8_t* to) {
        write_router(router, experts, reinterpret_cast<float*>(to));
        if (experts.has_biases) write_biases({router_bias, gates.bias, ups.bias, downs.bias}, experts, to);
        const WeightReader gate(gates.weight), up(ups.weight), down(downs.weight);
        const size_t inner = experts.down.K, outer = experts.down.N;
        for (size_t expert = 0; expert < experts.count; ++expert) {
            pack({{&gate, expert * inner, inner}, {&up, expert * inner, inner}}, experts.gate_up,
                 to + gate_up_at(experts) + expert * matrix_bytes(experts.gate_up));
            pack({{&down, expert * outer, outer}}, experts.down, to + down_at(experts) + expert * matrix_bytes(experts.down));
        }
    };
    const size_t bytes = memory_bytes(experts);
    const auto memory = deferred_constant(ov::element::u8, {bytes}, {{bytes, fill, {}}});
    const bool is_bf16 = target.activations == Activations::bf16;
    Output src = layer.src;
    if (is_bf16) src = std::make_shared<op::v0::Convert>(src, ov::element::bf16);
    NodePtr native = std::make_shared<ExpertsOp>(ov::OutputVector{src, memory}, target.isa, experts, is_bf16);
    native->set_friendly_name(layer.end.get_node()->get_friendly_name());
    if (is_bf16) native = std::make_shared<op::v0::Convert>(native, ov::element::f32);
    Output end = layer.end;
    end.replace(native->output(0));
}

// The additions that may combine the results of experts.
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
        if (!layer || unsupported(form_of(*layer, {Isa::portable, Activations::f32, TERMS_MAX}))) continue;
        found.routers.insert(layer->router.get());
        ++supported;
    }
    // Each layer has three products: gate, up and down.
    found.layers = div_up(products, 3);
    found.supports_all = 3 * supported == products;
    return found;
}

size_t replace_experts(ov::Model& model, const Target& target) {
    OPENVINO_ASSERT(projection_kernels(target.isa),
                    "this processor does not support the instruction set of native experts: ", int64_t(target.isa));
    size_t replaced = 0;
    for (const auto& sum : sums(model)) {
        const auto layer = layer_of(sum);
        if (!layer) continue;
        replace(*layer, target);
        ++replaced;
    }
    model.validate_nodes_and_infer_types();
    return replaced;
}

}  // namespace ovfleet::experts
