// Projections of our own as operations of a graph: which multiplications they are for, and what they take over of what is
// before and behind them.
#include "op.hpp"

#include <cstring>
#include <memory>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../weights.hpp"
#include "pack.hpp"
#include "run.hpp"

namespace {

using namespace ovfleet::projection;
namespace op = ov::op;
using Output = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

// Inputs: rows, the memory of the matrix, and what is added to. Few, since the plugin takes its time for each.
enum Input : size_t { ROWS, MATRIX, BASE };

// Where the panels begin in the memory of a matrix, behind its norm.
size_t panels_at(const Matrix& matrix, bool has_norm) { return has_norm ? (matrix.inputs * sizeof(float) + 63) / 64 * 64 : 0; }

class Projection : public op::Op {
public:
    OPENVINO_OP("Projection", "ovfleet");

    Projection() = default;
    Projection(const ov::OutputVector& inputs, const Matrix& matrix, bool has_norm, bool to_bf16)
        : Op(inputs), matrix_(matrix), has_norm_(has_norm), to_bf16_(to_bf16) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        auto shape = get_input_partial_shape(ROWS);
        if (shape.rank().is_static()) shape[shape.size() - 1] = int64_t(results(matrix_));
        set_output_type(0, to_bf16_ ? ov::element::bf16 : ov::element::f32, shape);
    }

    NodePtr clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Projection>(inputs, matrix_, has_norm_, to_bf16_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        const auto visit = [&](const char* name, auto& value) {
            auto number = int64_t(value);
            visitor.on_attribute(name, number);
            value = std::decay_t<decltype(value)>(number);
        };
        // As bits: texts of numbers lose some.
        const auto visit_bits = [&](const char* name, float& value) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof(bits));
            visit(name, bits);
            std::memcpy(&value, &bits, sizeof(bits));
        };
        visit("inputs", matrix_.inputs);
        visit("outputs", matrix_.outputs);
        visit("bits", matrix_.bits);
        visit("group", matrix_.group);
        visit("then", matrix_.then);
        visit("has_norm", has_norm_);
        visit("to_bf16", to_bf16_);
        visit_bits("factor_bits", matrix_.factor);
        visit_bits("epsilon_bits", matrix_.epsilon);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto* kernels = ovfleet::projection::kernels();
        if (!kernels) return false;
        auto shape = inputs[ROWS].get_shape();
        const size_t rows = ov::shape_size(shape) / matrix_.inputs;
        shape.back() = results(matrix_);
        outputs[0].set_shape(shape);
        Matrix matrix = matrix_;
        const auto* memory = static_cast<const uint8_t*>(inputs[MATRIX].data());
        if (has_norm_) matrix.norm = reinterpret_cast<const float*>(memory);
        matrix.panels = memory + panels_at(matrix_, has_norm_);
        const auto numbers = [](const ov::Tensor& tensor) {
            return Numbers{const_cast<void*>(tensor.data()), tensor.get_element_type() == ov::element::bf16};
        };
        const Numbers base = matrix.then == Then::added ? numbers(inputs[BASE]) : Numbers{};
        run(*kernels, matrix, rows, numbers(inputs[ROWS]), base, numbers(outputs[0]));
        return true;
    }

private:
    Matrix matrix_{};
    bool has_norm_ = false, to_bf16_ = false;
};

std::shared_ptr<op::v0::Constant> constant_of(NodePtr node) {
    if (ov::is_type<op::v0::Convert>(node)) node = node->get_input_node_shared_ptr(0);
    return ov::as_type_ptr<op::v0::Constant>(node);
}

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
    for (size_t half : {0, 1})
        if (split->get_output_partial_shape(half).rbegin()->get_max_length() != int64_t(outputs / 2)) return nullptr;
    const Output first = split->output(0), second = split->output(1);
    auto gated = ov::as_type_ptr<op::v1::Multiply>(only_reader(second));
    if (!gated) return nullptr;
    auto swish = gated->get_input_node_shared_ptr(gated->input_value(0) == second ? 1 : 0);
    if (ov::is_type<op::v4::Swish>(swish))
        return swish->get_input_size() == 1 && swish->input_value(0) == first && only_reader(first) && only_reader(swish->output(0))
                   ? gated
                   : nullptr;
    if (!ov::is_type<op::v1::Multiply>(swish) || first.get_target_inputs().size() != 2 || !only_reader(swish->output(0)))
        return nullptr;
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

// Replaces a projection; false if its weight is none of ours.
bool replace(const std::shared_ptr<op::v0::MatMul>& matmul, bool in_bf16) {
    const auto weight = weight_of(matmul->get_input_node_shared_ptr(1));
    if (!weight) return false;
    Matrix matrix{};
    measure(*weight, matrix);
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
    ov::Tensor memory(ov::element::u8, {panels_at(matrix, norm.has_value()) + panels(matrix) * panel_bytes(matrix)});
    auto* data = static_cast<uint8_t*>(memory.data());
    if (norm) std::memcpy(data, norm->weights.data(), norm->weights.size() * sizeof(float));
    pack(*weight, matrix, data + panels_at(matrix, norm.has_value()));

    // What goes from one of ours to the next along the layers stays f32; all else is as what is around it.
    if (in_bf16 && !ov::is_type<Projection>(rows.get_node_shared_ptr())) rows = as_bf16(rows);
    const bool to_bf16 = in_bf16 && matrix.then != Then::added && !is_result(end);
    ov::OutputVector inputs{rows, std::make_shared<op::v0::Constant>(memory)};
    if (matrix.then == Then::added) inputs.push_back(base);
    NodePtr own = std::make_shared<Projection>(inputs, matrix, norm.has_value(), to_bf16);
    own->set_friendly_name(matmul->get_friendly_name());
    if (to_bf16) own = std::make_shared<op::v0::Convert>(own, ov::element::f32);
    end.replace(own->output(0));
    return true;
}

}  // namespace

bool ovfleet::can_own_projections(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops()) {
        auto matmul = ov::as_type_ptr<op::v0::MatMul>(node);
        if (!matmul || !ovfleet::is_weight(matmul->get_input_node_shared_ptr(1))) continue;
        if (!ovfleet::is_projection(matmul) || !weight_of(matmul->get_input_node_shared_ptr(1))) return false;
    }
    return true;
}

size_t ovfleet::put_own_projections(ov::Model& model, bool in_bf16) {
    std::vector<std::shared_ptr<op::v0::MatMul>> found;
    for (const auto& node : model.get_ordered_ops())
        if (auto matmul = ov::as_type_ptr<op::v0::MatMul>(node))
            if (ovfleet::is_projection(matmul)) found.push_back(matmul);
    size_t replaced = 0;
    for (auto& matmul : found) {
        replaced += replace(matmul, in_bf16);
        // With it goes the memory of its weight.
        matmul = nullptr;
    }
    model.validate_nodes_and_infer_types();
    return replaced;
}

ov::Extension::Ptr ovfleet::projection_extension() {
    return std::make_shared<ov::OpExtension<Projection>>();
}
