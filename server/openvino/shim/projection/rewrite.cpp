// Which multiplications of a graph our own projections are for, and what they take over of what is before and behind them.
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../adapted.hpp"
#include "../model.hpp"
#include "../weights.hpp"
#include "adapters.hpp"
#include "chain.hpp"
#include "op.hpp"
#include "pack.hpp"
#include "projection.hpp"

namespace ovfleet::projection {
namespace {

namespace op = ov::op;
using Output = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

// Whether a node is a constant of this one number.
bool is_number(const NodePtr& node, float number) {
    auto constant = constant_of(node);
    return constant && ov::shape_size(constant->get_shape()) == 1 && constant->cast_vector<float>()[0] == number;
}

// The only reader of a value; null if there are more.
NodePtr only_reader(const Output& value) {
    const auto readers = value.get_target_inputs();
    return readers.size() == 1 ? readers.begin()->get_node()->shared_from_this() : nullptr;
}

// Root mean square normalisation of the last dimension.
struct Norm {
    Output of;
    std::vector<float> weights;
    float epsilon;
};

// 1 / sqrt(mean(of * of) + epsilon), in the forms that exporters write.
bool is_inverse_root(NodePtr node, const Output& of, float& epsilon) {
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
    const auto rank = of.get_partial_shape().rank();
    if (!is_number(mean->get_input_node_shared_ptr(1), -1) &&
        (rank.is_dynamic() || !is_number(mean->get_input_node_shared_ptr(1), float(rank.get_length() - 1))))
        return false;
    auto square = mean->get_input_node_shared_ptr(0);
    if (square->input_value(0) != of) return false;
    return ov::is_type<op::v1::Power>(square)      ? is_number(square->get_input_node_shared_ptr(1), 2)
           : ov::is_type<op::v1::Multiply>(square) ? square->input_value(1) == of
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
            if (!is_inverse_root(scaled->get_input_node_shared_ptr(1 - other), norm.of, norm.epsilon)) continue;
            norm.weights = weights->cast_vector<float>();
            return norm;
        }
    }
    return {};
}

// Where the two halves of a projection's outputs become one: swish(first) * second. Null if they do not.
NodePtr gate_of(const Output& product, size_t outputs) {
    auto split = ov::as_type_ptr<op::v1::VariadicSplit>(only_reader(product));
    if (!split || split->get_output_size() != 2 || outputs % 2 != 0) return nullptr;
    for (size_t half : {0, 1}) {
        const auto shape = split->get_output_partial_shape(half);
        if (shape.rank().is_dynamic() || *shape.rbegin() != int64_t(outputs / 2)) return nullptr;
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

// Whether a value is the model's output, in whatever shape.
bool is_result(const Output& value) {
    auto reader = only_reader(value);
    while (reader && (ov::is_type<op::v1::Reshape>(reader) || ov::is_type<op::v0::Convert>(reader)))
        reader = only_reader(reader->output(0));
    return reader && ov::is_type<op::v0::Result>(reader);
}

// A value as bf16. One that is made of bf16 is taken as it was.
Output as_bf16(const Output& value) {
    auto convert = ov::as_type_ptr<op::v0::Convert>(value.get_node_shared_ptr());
    if (convert && convert->get_input_element_type(0) == ov::element::bf16) return convert->input_value(0);
    return std::make_shared<op::v0::Convert>(value, ov::element::bf16)->output(0);
}

// The weight of a projection that ours can replace.
std::optional<Weight> own_weight(const std::shared_ptr<op::v0::MatMul>& matmul) {
    if (!ovfleet::is_projection(matmul) || matmul->get_output_element_type(0) != ov::element::f32) return {};
    return weight_of(matmul->get_input_node_shared_ptr(1));
}

// A multiplication, and whether its rows are of wanted tokens only.
struct Found {
    std::shared_ptr<op::v0::MatMul> matmul;
    bool is_wanted;
};

// All of a model, in its order.
std::vector<Found> matmuls(const ov::Model& model) {
    std::vector<Found> found;
    std::set<ov::Node*> behind_wanted;
    for (const auto& node : model.get_ordered_ops()) {
        bool is_wanted = ov::is_type<op::v0::Parameter>(node) && node->get_friendly_name() == WANTED_INPUT;
        for (const auto& input : node->input_values()) is_wanted |= behind_wanted.count(input.get_node()) > 0;
        if (is_wanted) behind_wanted.insert(node.get());
        if (auto matmul = ov::as_type_ptr<op::v0::MatMul>(node)) found.push_back({matmul, is_wanted});
    }
    return found;
}

// The numbers of the adapters of a step's tokens: an input of the model, if anything of it is adapted.
class AdapterNumbers {
public:
    explicit AdapterNumbers(ov::Model& model) : model_(model) {}

    Output of(const Found& found) {
        if (!all_.get_node()) {
            auto input = std::make_shared<op::v0::Parameter>(ov::element::i32, ov::PartialShape{-1});
            input->set_friendly_name(ADAPTERS_INPUT);
            input->output(0).get_tensor().set_names({ADAPTERS_INPUT});
            model_.add_parameters({input});
            all_ = input;
        }
        if (!found.is_wanted) return all_;
        if (!wanted_.get_node()) {
            auto axis = op::v0::Constant::create(ov::element::i64, {}, {0});
            wanted_ = std::make_shared<op::v8::Gather>(all_, model_.input(WANTED_INPUT), axis)->output(0);
        }
        return wanted_;
    }

private:
    ov::Model& model_;
    Output all_, wanted_;
};

void replace(const Found& found, const Weight& weight, bool in_bf16, AdapterNumbers& numbers) {
    const auto& matmul = found.matmul;
    Matrix matrix{};
    measure(weight, matrix);
    Output rows = matmul->input_value(0), end = matmul->output(0), base;
    // Nobody else may want what is not computed any more.
    const auto norm = only_reader(rows) ? norm_of(rows, matrix.inputs) : std::nullopt;
    if (norm) {
        rows = norm->of;
        matrix.epsilon = norm->epsilon;
    }
    if (auto gate = gate_of(end, matrix.outputs)) {
        matrix.then = Then::gated;
        end = gate->output(0);
    } else if (auto sum = ov::as_type_ptr<op::v1::Add>(only_reader(end))) {
        const Output other = sum->input_value(sum->input_value(0) == end ? 1 : 0);
        const bool is_same = other.get_partial_shape().same_scheme(end.get_partial_shape()) && other != end;
        if (is_same && !ov::is_type<op::v0::Constant>(other.get_node_shared_ptr())) {
            matrix.then = Then::added;
            base = other;
            end = sum->output(0);
        }
    }
    std::vector<uint8_t> adapters;
    const auto adapted = adapted_of(*matmul);
    if (adapted) adapters = pack_adapters(adapted->parts, norm ? norm->weights.data() : nullptr, matrix);
    const Stage stage{matrix, norm.has_value(), adapters.size()};
    ov::Tensor memory(ov::element::u8, {memory_of(stage)});
    auto* data = static_cast<uint8_t*>(memory.data());
    if (norm) std::memcpy(data, norm->weights.data(), norm->weights.size() * sizeof(float));
    pack(weight, matrix, data + panels_at(stage));
    if (adapted) std::memcpy(data + adapters_at(stage), adapters.data(), adapters.size());

    // What goes from one of ours to the next along the layers stays f32; all else is as what is around it.
    if (in_bf16 && !std::dynamic_pointer_cast<Projection>(rows.get_node_shared_ptr())) rows = as_bf16(rows);
    const bool to_bf16 = in_bf16 && matrix.then != Then::added && !is_result(end);
    ov::OutputVector inputs{rows, std::make_shared<op::v0::Constant>(memory)};
    if (matrix.then == Then::added) inputs.push_back(base);
    if (adapted) inputs.push_back(numbers.of(found));
    NodePtr own = std::make_shared<Projection>(inputs, std::vector<Stage>{stage}, to_bf16, false);
    own->set_friendly_name(matmul->get_friendly_name());
    if (to_bf16) own = std::make_shared<op::v0::Convert>(own, ov::element::f32);
    end.replace(own->output(0));
}

// Whether there is no multiplication by weights in a model that could not be replaced.
bool can_replace_all(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops()) {
        auto matmul = ov::as_type_ptr<op::v0::MatMul>(node);
        if (matmul && ovfleet::is_weight(matmul->get_input_node_shared_ptr(1)) && !own_weight(matmul)) return false;
    }
    return true;
}

// Replaces them; `in_bf16`, as what is around them is computed in bf16. Answers how many. Others stay the plugin's.
size_t replace_all(ov::Model& model, bool in_bf16) {
    auto all = matmuls(model);
    AdapterNumbers numbers(model);
    size_t replaced = 0, adapted = 0;
    for (auto& found : all) {
        const auto parts = adapted_of(*found.matmul);
        if (const auto weight = own_weight(found.matmul)) {
            replace(found, *weight, in_bf16, numbers);
            ++replaced;
            if (parts) adapted += parts->parts.size();
        }
        // With it goes the memory of its weight, and of what adapters add to it.
        found.matmul = nullptr;
    }
    const auto expected = adapted_parts(model);
    OPENVINO_ASSERT(adapted == expected, "of ", expected, " parts of adapters ", adapted, " are in the graph");
    join_chains(model);
    model.validate_nodes_and_infer_types();
    return replaced;
}

}  // namespace
}  // namespace ovfleet::projection

extern "C" int ovfleet_own_projections(ov_model_t* model, int in_bf16, size_t* replaced) {
    return ovfleet::guarded([&] { *replaced = ovfleet::projection::replace_all(*model->object, in_bf16 != 0); });
}

extern "C" int ovfleet_can_own_projections(ov_model_t* model, int* all) {
    return ovfleet::guarded([&] { *all = ovfleet::projection::can_replace_all(*model->object); });
}

extern "C" int ovfleet_has_own_projections(void) {
    return ovfleet::projection::kernels() != nullptr;
}
