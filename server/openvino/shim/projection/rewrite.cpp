#include "rewrite.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../graph/deferred.hpp"
#include "../graph/lora.hpp"
#include "../graph/model.hpp"
#include "../graph/nodes.hpp"
#include "../graph/weights.hpp"
#include "adapters.hpp"
#include "op.hpp"
#include "pack.hpp"

namespace ovfleet::projection {
namespace {

namespace op = ov::op;
using Output = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

// Whether a node is a constant whose only element is `number`.
bool is_number(const NodePtr& node, float number) {
    auto constant = constant_of(node);
    return constant && ov::shape_size(constant->get_shape()) == 1 && constant->cast_vector<float>()[0] == number;
}

// Returns the only reader of a value, or null if the value does not have exactly one reader.
NodePtr only_reader(const Output& value) {
    const auto readers = value.get_target_inputs();
    return readers.size() == 1 ? readers.begin()->get_node()->shared_from_this() : nullptr;
}

// A root mean square normalization of the last dimension.
struct Norm {
    Output input;
    std::vector<float> weights;
    float epsilon;
};

// Matches 1 / sqrt(mean(input * input) + epsilon), in the forms that exporters write.
bool is_inverse_rms(NodePtr node, const Output& input, float& epsilon) {
    if (auto divided = ov::as_type_ptr<op::v1::Divide>(node)) {
        if (!is_number(divided->get_input_node_shared_ptr(0), 1)) return false;
        node = divided->get_input_node_shared_ptr(1);
    } else if (auto power = ov::as_type_ptr<op::v1::Power>(node)) {
        if (!is_number(power->get_input_node_shared_ptr(1), -1)) return false;
        node = power->get_input_node_shared_ptr(0);
    } else {
        return false;
    }
    auto root = ov::as_type_ptr<op::v0::Sqrt>(node);
    auto sum = root ? ov::as_type_ptr<op::v1::Add>(root->get_input_node_shared_ptr(0)) : nullptr;
    auto mean = sum ? ov::as_type_ptr<op::v1::ReduceMean>(sum->get_input_node_shared_ptr(0)) : nullptr;
    if (!mean || !mean->get_keep_dims()) return false;
    auto term = constant_of(sum->get_input_node_shared_ptr(1));
    if (!term || ov::shape_size(term->get_shape()) != 1) return false;
    epsilon = term->cast_vector<float>()[0];
    const auto rank = input.get_partial_shape().rank();
    if (!is_number(mean->get_input_node_shared_ptr(1), -1) &&
        (rank.is_dynamic() || !is_number(mean->get_input_node_shared_ptr(1), float(rank.get_length() - 1))))
        return false;
    auto square = mean->get_input_node_shared_ptr(0);
    if (square->input_value(0) != input) return false;
    return ov::is_type<op::v1::Power>(square)      ? is_number(square->get_input_node_shared_ptr(1), 2)
           : ov::is_type<op::v1::Multiply>(square) ? square->input_value(1) == input
                                                   : false;
}

std::optional<Norm> norm_of(const Output& value, size_t size) {
    auto weighted = ov::as_type_ptr<op::v1::Multiply>(value.get_node_shared_ptr());
    if (!weighted) return {};
    for (size_t side : {0, 1}) {
        auto weights = constant_of(weighted->get_input_node_shared_ptr(side));
        auto scaled = ov::as_type_ptr<op::v1::Multiply>(weighted->get_input_node_shared_ptr(1 - side));
        if (!weights || !scaled || ov::shape_size(weights->get_shape()) != size || weights->get_shape().back() != size)
            continue;
        for (size_t other : {0, 1}) {
            Norm norm{scaled->input_value(other), {}, 0};
            if (!is_inverse_rms(scaled->get_input_node_shared_ptr(1 - other), norm.input, norm.epsilon)) continue;
            norm.weights = weights->cast_vector<float>();
            return norm;
        }
    }
    return {};
}

// Returns the node that computes `swish(first half) * second half` from the two halves of a product. Returns null if no node
// does, or if other nodes read the product or an intermediate value.
NodePtr swiglu_of(const Output& product, size_t N) {
    auto split = ov::as_type_ptr<op::v1::VariadicSplit>(only_reader(product));
    if (!split || split->get_output_size() != 2 || N % 2 != 0) return nullptr;
    for (size_t half : {0, 1}) {
        const auto shape = split->get_output_partial_shape(half);
        if (shape.rank().is_dynamic() || *shape.rbegin() != int64_t(N / 2)) return nullptr;
    }
    const Output first = split->output(0), second = split->output(1);
    auto gated = ov::as_type_ptr<op::v1::Multiply>(only_reader(second));
    if (!gated) return nullptr;
    auto swish = gated->get_input_node_shared_ptr(gated->input_value(0) == second ? 1 : 0);
    if (!only_reader(swish->output(0))) return nullptr;
    if (ov::is_type<op::v4::Swish>(swish))
        return swish->get_input_size() == 1 && swish->input_value(0) == first && only_reader(first) ? gated : nullptr;
    if (!ov::is_type<op::v1::Multiply>(swish) || first.get_target_inputs().size() != 2) return nullptr;
    const size_t direct = swish->input_value(0) == first ? 0 : 1;
    auto sigmoid = ov::as_type_ptr<op::v0::Sigmoid>(swish->get_input_node_shared_ptr(1 - direct));
    return swish->input_value(direct) == first && sigmoid && sigmoid->input_value(0) == first ? gated : nullptr;
}

// The node that adds a constant to each row of a product, and this constant. `sum` is null if no node does so.
struct Bias {
    NodePtr sum;
    std::vector<float> numbers;
};

Bias bias_of(const Output& product, size_t N) {
    auto sum = ov::as_type_ptr<op::v1::Add>(only_reader(product));
    if (!sum || !sum->get_output_partial_shape(0).same_scheme(product.get_partial_shape())) return {};
    auto bias = constant_of(sum->get_input_node_shared_ptr(sum->input_value(0) == product ? 1 : 0));
    if (!bias || ov::shape_size(bias->get_shape()) != N || bias->get_shape().back() != N) return {};
    return {sum, bias->cast_vector<float>()};
}

// Returns the activation that a node computes, or `none` if it computes something else.
Epilogue activation_of(const NodePtr& node) {
    if (auto gelu = ov::as_type_ptr<op::v7::Gelu>(node))
        return gelu->get_approximation_mode() == op::GeluApproximationMode::ERF ? Epilogue::gelu : Epilogue::gelu_tanh;
    if (!ov::is_type<op::v4::Swish>(node)) return Epilogue::none;
    if (node->get_input_size() == 1 || is_number(node->get_input_node_shared_ptr(1), 1)) return Epilogue::silu;
    return is_number(node->get_input_node_shared_ptr(1), QUICK_GELU_ALPHA) ? Epilogue::quick_gelu : Epilogue::none;
}

// Whether a value is an output of the model, perhaps reshaped or converted.
bool is_result(const Output& value) {
    auto reader = only_reader(value);
    while (reader && (ov::is_type<op::v1::Reshape>(reader) || ov::is_type<op::v0::Convert>(reader)))
        reader = only_reader(reader->output(0));
    return reader && ov::is_type<op::v0::Result>(reader);
}

// Returns a value in bf16. If the value was converted from bf16, returns the value before this conversion.
Output as_bf16(const Output& value) {
    auto convert = ov::as_type_ptr<op::v0::Convert>(value.get_node_shared_ptr());
    if (convert && convert->get_input_element_type(0) == ov::element::bf16) return convert->input_value(0);
    return std::make_shared<op::v0::Convert>(value, ov::element::bf16)->output(0);
}

// Returns the weight of a multiplication, or no value if no native projection can replace the multiplication.
std::optional<GraphWeight> native_weight(const std::shared_ptr<op::v0::MatMul>& matmul) {
    if (!ovfleet::is_projection(matmul) || matmul->get_output_element_type(0) != ov::element::f32) return {};
    return weight_of(matmul->get_input_node_shared_ptr(1));
}

// A multiplication, and whether its input has only the rows of the tokens whose logits are computed.
struct Candidate {
    std::shared_ptr<op::v0::MatMul> matmul;
    bool is_behind_selection;
};

// All multiplications of a model in the order of the graph.
std::vector<Candidate> candidates(const ov::Model& model) {
    std::vector<Candidate> found;
    std::set<ov::Node*> behind_selection;
    for (const auto& node : model.get_ordered_ops()) {
        bool is_behind = ov::is_type<op::v0::Parameter>(node) && node->get_friendly_name() == LOGITS_INDICES;
        for (const auto& input : node->input_values()) is_behind |= behind_selection.count(input.get_node()) > 0;
        if (is_behind) behind_selection.insert(node.get());
        if (auto matmul = ov::as_type_ptr<op::v0::MatMul>(node)) found.push_back({matmul, is_behind});
    }
    return found;
}

// The input with the adapter number of each token in a step. Only models with adapters have it.
class AdapterNumbers {
public:
    explicit AdapterNumbers(ov::Model& model) : model_(model) {}

    Output of(const Candidate& candidate) {
        if (!all_.get_node()) {
            auto input = named_parameter(ADAPTERS_INPUT, ov::element::i32, {-1});
            model_.add_parameters({input});
            all_ = input;
        }
        if (!candidate.is_behind_selection) return all_;
        if (!selected_.get_node()) {
            auto axis = op::v0::Constant::create(ov::element::i64, {}, {0});
            selected_ = std::make_shared<op::v8::Gather>(all_, model_.input(LOGITS_INDICES), axis)->output(0);
        }
        return selected_;
    }

private:
    ov::Model& model_;
    Output all_, selected_;
};

void replace(const Candidate& candidate, const GraphWeight& weight, const Target& target, AdapterNumbers& numbers) {
    const auto& node = candidate.matmul;
    Matmul matmul{};
    describe(weight, matmul);
    matmul.terms = target.terms;
    Output src = node->input_value(0), end = node->output(0), residual;
    // A norm with other readers must remain in the graph.
    const auto norm = only_reader(src) ? norm_of(src, matmul.K) : std::nullopt;
    if (norm) {
        src = norm->input;
        matmul.epsilon = norm->epsilon;
    }
    const auto bias = bias_of(end, matmul.N);
    if (bias.sum) end = bias.sum->output(0);
    const bool is_bf16 = target.activations == Activations::bf16;
    const auto activation = only_reader(end);
    if (auto swiglu = swiglu_of(end, matmul.N)) {
        matmul.epilogue = Epilogue::swiglu;
        end = swiglu->output(0);
    } else if (!is_bf16 && activation && activation_of(activation) != Epilogue::none) {
        matmul.epilogue = activation_of(activation);
        end = activation->output(0);
    } else if (auto sum = ov::as_type_ptr<op::v1::Add>(only_reader(end))) {
        const Output other = sum->input_value(sum->input_value(0) == end ? 1 : 0);
        const bool is_same = other.get_partial_shape().same_scheme(end.get_partial_shape()) && other != end;
        if (is_same && !ov::is_type<op::v0::Constant>(other.get_node_shared_ptr())) {
            matmul.epilogue = Epilogue::residual;
            residual = other;
            end = sum->output(0);
        }
    }
    std::vector<uint8_t> adapters;
    const auto lora = lora_of(*node);
    if (lora) adapters = pack_adapters(lora->parts, norm ? norm->weights.data() : nullptr, matmul);
    const Stage stage{matmul, norm.has_value(), bias.sum != nullptr, adapters.size()};
    const auto factors = norm ? norm->weights : std::vector<float>();
    const auto fill = [weight, stage, factors, bias = bias.numbers, adapters = std::move(adapters)](uint8_t* to) {
        std::copy(factors.begin(), factors.end(), reinterpret_cast<float*>(to));
        if (stage.has_bias) pack_bias(stage.matmul, bias.data(), reinterpret_cast<float*>(to + bias_at(stage)));
        pack(weight, stage.matmul, to + weights_at(stage));
        std::copy(adapters.begin(), adapters.end(), to + adapters_at(stage));
    };
    const size_t bytes = memory_bytes(stage);
    const auto memory = ovfleet::deferred_constant(ov::element::u8, {bytes}, {{bytes, fill, {}}});

    // With bf16 activations, a projection reads and writes bf16, except for the residuals that native projections compute and
    // for the results of the model. These remain f32.
    if (is_bf16 && !std::dynamic_pointer_cast<Projection>(src.get_node_shared_ptr())) src = as_bf16(src);
    const bool to_bf16 = is_bf16 && matmul.epilogue != Epilogue::residual && !is_result(end);
    ov::OutputVector inputs{src, memory};
    if (matmul.epilogue == Epilogue::residual) inputs.push_back(residual);
    if (lora) inputs.push_back(numbers.of(candidate));
    NodePtr native = std::make_shared<Projection>(inputs, target.isa, std::vector<Stage>{stage}, Outputs{to_bf16, false});
    native->set_friendly_name(node->get_friendly_name());
    if (to_bf16) native = std::make_shared<op::v0::Convert>(native, ov::element::f32);
    end.replace(native->output(0));
}

// Lets each AMX projection whose epilogue is an activation store its destination in bf16 if only AMX projections read the
// destination. They would round an f32 destination in the same way, but would have to read twice as many bytes.
void store_activations_in_bf16(ov::Model& model) {
    const auto is_on_amx = [](const ov::Node* node) {
        const auto* projection = dynamic_cast<const Projection*>(node);
        return projection && projection->isa() == Isa::amx;
    };
    for (const auto& node : model.get_ordered_ops()) {
        if (!is_on_amx(node.get())) continue;
        const auto& stages = static_cast<const Projection&>(*node).stages();
        const auto readers = node->output(0).get_target_inputs();
        const bool are_on_amx = std::all_of(readers.begin(), readers.end(), [&](const ov::Input<ov::Node>& reader) {
            return reader.get_index() == SRC && is_on_amx(reader.get_node());
        });
        if (!is_activation(stages.back().matmul.epilogue) || !are_on_amx) continue;
        const auto stored = std::make_shared<Projection>(node->input_values(), Isa::amx, stages, Outputs{true, false});
        stored->set_friendly_name(node->get_friendly_name());
        node->output(0).replace(stored->output(0));
    }
}

}  // namespace

bool supports_all(const ov::Model& model, const std::set<const ov::Node*>& others) {
    for (const auto& node : model.get_ordered_ops()) {
        auto matmul = others.count(node.get()) == 0 ? ov::as_type_ptr<op::v0::MatMul>(node) : nullptr;
        if (matmul && ovfleet::is_weight(matmul->get_input_node_shared_ptr(1)) && !native_weight(matmul)) return false;
    }
    return true;
}

size_t replace_projections(ov::Model& model, const Target& target) {
    OPENVINO_ASSERT(projection_kernels(target.isa),
                    "this processor does not support the instruction set of native projections: ", int64_t(target.isa));
    auto all = candidates(model);
    AdapterNumbers numbers(model);
    size_t replaced = 0, parts = 0;
    for (auto& candidate : all) {
        const auto lora = lora_of(*candidate.matmul);
        if (const auto weight = native_weight(candidate.matmul)) {
            replace(candidate, *weight, target, numbers);
            ++replaced;
            if (lora) parts += lora->parts.size();
        }
        // Frees the adapters.
        candidate.matmul = nullptr;
    }
    const auto expected = lora_parts(model);
    store_activations_in_bf16(model);
    OPENVINO_ASSERT(parts == expected, "only ", parts, " of ", expected, " parts of adapters are in the native projections");
    model.validate_nodes_and_infer_types();
    return replaced;
}

}  // namespace ovfleet::projection
