// Projections of our own as operations of a graph: which multiplications they are for, and what they take over of what is
// before and behind them.
#include "op.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../threads.hpp"
#include "../weights.hpp"
#include "pack.hpp"
#include "run.hpp"

namespace {

using namespace ovfleet::projection;
namespace op = ov::op;
using Output = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

// Inputs: rows, the memory of the matrices, and the stream. Few, since the plugin takes its time for each: therefore as many
// projections as follow each other are one operation.
enum Input : size_t { ROWS, MEMORY, STREAM };

// One of the projections of an operation. Its rows are what the one before it gives. What is added to is the stream: that of
// the operation's input, and then the sum.
struct Stage {
    Matrix matrix;
    bool has_norm;
};

// Where the panels of a stage begin in its memory, behind its norm; and its end.
size_t panels_at(const Stage& stage) { return stage.has_norm ? (stage.matrix.inputs * sizeof(float) + 63) / 64 * 64 : 0; }
size_t memory_of(const Stage& stage) { return panels_at(stage) + panels(stage.matrix) * panel_bytes(stage.matrix); }

class Projection : public op::Op {
public:
    OPENVINO_OP("Projection", "ovfleet");

    Projection() = default;
    Projection(const ov::OutputVector& inputs, std::vector<Stage> stages, bool to_bf16, bool gives_stream)
        : Op(inputs), stages_(std::move(stages)), to_bf16_(to_bf16), gives_stream_(gives_stream) {
        constructor_validate_and_infer_types();
    }

    const std::vector<Stage>& stages() const { return stages_; }
    bool to_bf16() const { return to_bf16_; }

    void validate_and_infer_types() override {
        const auto shape = [&](size_t size) {
            auto shape = get_input_partial_shape(ROWS);
            if (shape.rank().is_static()) shape[shape.size() - 1] = int64_t(size);
            return shape;
        };
        set_output_size(gives_stream_ ? 2 : 1);
        set_output_type(0, to_bf16_ ? ov::element::bf16 : ov::element::f32, shape(results(stages_.back().matrix)));
        if (gives_stream_) set_output_type(1, ov::element::f32, shape(stream_size()));
    }

    NodePtr clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Projection>(inputs, stages_, to_bf16_, gives_stream_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        // Numbers with a fraction as bits: texts of them lose some.
        std::vector<int64_t> all;
        each_number([&](auto& value) {
            uint32_t bits;
            if constexpr (std::is_same_v<std::decay_t<decltype(value)>, float>)
                std::memcpy(&bits, &value, sizeof(bits)), all.push_back(bits);
            else
                all.push_back(int64_t(value));
        });
        visitor.on_attribute("stages", all);
        visitor.on_attribute("to_bf16", to_bf16_);
        visitor.on_attribute("gives_stream", gives_stream_);
        stages_.resize(all.size() / STAGE_NUMBERS);
        size_t at = 0;
        each_number([&](auto& value) {
            using Value = std::decay_t<decltype(value)>;
            const auto bits = uint32_t(all[at]);
            if constexpr (std::is_same_v<Value, float>) std::memcpy(&value, &bits, sizeof(bits));
            else value = Value(all[at]);
            ++at;
        });
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto* kernels = ovfleet::projection::kernels();
        if (!kernels) return false;
        auto shape = inputs[ROWS].get_shape();
        const size_t rows = ov::shape_size(shape) / stages_.front().matrix.inputs;
        shape.back() = results(stages_.back().matrix);
        outputs[0].set_shape(shape);
        if (gives_stream_) {
            shape.back() = stream_size();
            outputs[1].set_shape(shape);
        }
        const auto numbers = [](const ov::Tensor& tensor) {
            return Numbers{const_cast<void*>(tensor.data()), tensor.get_element_type() == ov::element::bf16};
        };
        // Between stages, as large as the largest needs.
        size_t most = 0;
        for (const auto& stage : stages_) most = std::max(most, rows * results(stage.matrix));
        thread_local ovfleet::Buffer<float> held, held_stream;
        const Numbers between{held.at_least(most), false};
        const Numbers sum = gives_stream_                                     ? numbers(outputs[1])
                            : stages_.back().matrix.then == Then::added ? numbers(outputs[0])
                                                                              : Numbers{held_stream.at_least(most), false};
        Numbers from = numbers(inputs[ROWS]), stream = inputs.size() > STREAM ? numbers(inputs[STREAM]) : Numbers{};
        const auto* memory = static_cast<const uint8_t*>(inputs[MEMORY].data());
        for (const auto& stage : stages_) {
            Matrix matrix = stage.matrix;
            if (stage.has_norm) matrix.norm = reinterpret_cast<const float*>(memory);
            matrix.panels = memory + panels_at(stage);
            memory += memory_of(stage);
            const bool is_added = matrix.then == Then::added, is_last = &stage == &stages_.back();
            const Numbers to = is_added ? sum : is_last ? numbers(outputs[0]) : between;
            run(*kernels, matrix, rows, from, stream, to);
            from = to;
            if (is_added) stream = to;
        }
        return true;
    }

private:
    static constexpr size_t STAGE_NUMBERS = 8;

    template <typename Visit>
    void each_number(Visit visit) {
        for (auto& stage : stages_) {
            auto& matrix = stage.matrix;
            visit(matrix.inputs), visit(matrix.outputs), visit(matrix.bits), visit(matrix.group);
            visit(matrix.factor), visit(matrix.then), visit(matrix.epsilon), visit(stage.has_norm);
        }
    }

    size_t stream_size() const {
        size_t size = 0;
        for (const auto& stage : stages_)
            if (stage.matrix.then == Then::added) size = results(stage.matrix);
        return size;
    }

    std::vector<Stage> stages_;
    bool to_bf16_ = false, gives_stream_ = false;
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
    const Stage stage{matrix, norm.has_value()};
    ov::Tensor memory(ov::element::u8, {memory_of(stage)});
    auto* data = static_cast<uint8_t*>(memory.data());
    if (norm) std::memcpy(data, norm->weights.data(), norm->weights.size() * sizeof(float));
    pack(*weight, matrix, data + panels_at(stage));

    // What goes from one of ours to the next along the layers stays f32; all else is as what is around it.
    if (in_bf16 && !std::dynamic_pointer_cast<Projection>(rows.get_node_shared_ptr())) rows = as_bf16(rows);
    const bool to_bf16 = in_bf16 && matrix.then != Then::added && !is_result(end);
    ov::OutputVector inputs{rows, std::make_shared<op::v0::Constant>(memory)};
    if (matrix.then == Then::added) inputs.push_back(base);
    NodePtr own = std::make_shared<Projection>(inputs, std::vector<Stage>{stage}, to_bf16, false);
    own->set_friendly_name(matmul->get_friendly_name());
    if (to_bf16) own = std::make_shared<op::v0::Convert>(own, ov::element::f32);
    end.replace(own->output(0));
    return true;
}

using Chain = std::vector<std::shared_ptr<Projection>>;

// What the last sum of a chain gives; nothing if it has none.
Output stream_of(const Chain& chain) {
    for (auto one = chain.rbegin(); one != chain.rend(); ++one)
        if ((*one)->stages().back().matrix.then == Then::added) return (*one)->output(0);
    return {};
}

// Whether everybody who reads a value is of a chain.
bool is_within(const Output& value, const Chain& chain) {
    for (const auto& reader : value.get_target_inputs())
        if (std::none_of(chain.begin(), chain.end(), [&](const auto& one) { return one.get() == reader.get_node(); })) return false;
    return true;
}

// The projection that goes on from a chain, whose results are its rows; null if there is none, or it would need what the chain
// does not keep.
std::shared_ptr<Projection> next_of(const Chain& chain) {
    const Output last = chain.back()->output(0), stream = stream_of(chain);
    for (const auto& reader : last.get_target_inputs()) {
        auto next = std::dynamic_pointer_cast<Projection>(reader.get_node()->shared_from_this());
        if (!next || reader.get_index() != ROWS || chain.back()->to_bf16()) continue;
        Chain longer = chain;
        longer.push_back(next);
        const bool is_added = next->stages().back().matrix.then == Then::added;
        if (is_added && stream.get_node() && next->input_value(STREAM) != stream) return nullptr;
        // The stream so far may be read by others only as long as it is the chain's.
        const bool is_kept = last == stream && !is_added;
        if (!is_kept && !is_within(last, longer)) return nullptr;
        if (is_added && stream.get_node() && !is_within(stream, longer)) return nullptr;
        return next;
    }
    return nullptr;
}

// Makes a chain one operation.
void join(const Chain& chain) {
    ov::OutputVector inputs{chain.front()->input_value(ROWS), {}};
    std::vector<Stage> stages;
    size_t bytes = 0;
    for (const auto& one : chain) {
        stages.push_back(one->stages().front());
        bytes += memory_of(stages.back());
        if (one->get_input_size() > STREAM && inputs.size() == STREAM) inputs.push_back(one->input_value(STREAM));
    }
    ov::Tensor memory(ov::element::u8, {bytes});
    auto* to = static_cast<uint8_t*>(memory.data());
    for (const auto& one : chain) {
        auto part = ov::as_type_ptr<op::v0::Constant>(one->get_input_node_shared_ptr(MEMORY));
        std::memcpy(to, part->get_data_ptr(), part->get_byte_size());
        to += part->get_byte_size();
    }
    inputs[MEMORY] = std::make_shared<op::v0::Constant>(memory);
    Output last = chain.back()->output(0), stream = stream_of(chain);
    const bool gives_stream = stream.get_node() && stream != last && !is_within(stream, chain);
    auto whole = std::make_shared<Projection>(inputs, stages, chain.back()->to_bf16(), gives_stream);
    whole->set_friendly_name(chain.front()->get_friendly_name());
    if (gives_stream) {
        for (auto reader : stream.get_target_inputs()) {
            const bool is_own = std::any_of(chain.begin(), chain.end(), [&](const auto& one) { return one.get() == reader.get_node(); });
            if (!is_own) reader.replace_source_output(whole->output(1));
        }
    }
    last.replace(whole->output(0));
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
    std::set<ov::Node*> joined;
    for (const auto& node : model.get_ordered_ops()) {
        auto first = std::dynamic_pointer_cast<Projection>(node);
        if (!first || joined.count(node.get())) continue;
        Chain chain{first};
        while (auto next = next_of(chain)) chain.push_back(next);
        for (const auto& one : chain) joined.insert(one.get());
        if (chain.size() > 1) join(chain);
    }
    model.validate_nodes_and_infer_types();
    return replaced;
}

ov::Extension::Ptr ovfleet::projection_extension() {
    return std::make_shared<ov::OpExtension<Projection>>();
}
