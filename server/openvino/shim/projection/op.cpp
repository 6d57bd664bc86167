// Projections of our own as an operation of a graph.
#include "op.hpp"

#include <algorithm>
#include <cstring>

#include "../threads.hpp"
#include "run.hpp"

namespace ovfleet::projection {
namespace {

// How many numbers a stage is written as.
constexpr size_t STAGE_NUMBERS = 10;

Numbers numbers(const ov::Tensor& tensor) {
    return {const_cast<void*>(tensor.data()), tensor.get_element_type() == ov::element::bf16};
}

}  // namespace

Projection::Projection(const ov::OutputVector& inputs, std::vector<Stage> stages, bool to_bf16, bool gives_stream)
    : Op(inputs), stages_(std::move(stages)), to_bf16_(to_bf16), gives_stream_(gives_stream) {
    constructor_validate_and_infer_types();
}

void Projection::validate_and_infer_types() {
    const auto shape = [&](size_t size) {
        auto shape = get_input_partial_shape(ROWS);
        if (shape.rank().is_static()) shape[shape.size() - 1] = int64_t(size);
        return shape;
    };
    set_output_size(gives_stream_ ? 2 : 1);
    set_output_type(0, to_bf16_ ? ov::element::bf16 : ov::element::f32, shape(results(stages_.back().matrix)));
    if (gives_stream_) set_output_type(1, ov::element::f32, shape(stream_size()));
}

std::shared_ptr<ov::Node> Projection::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    return std::make_shared<Projection>(inputs, stages_, to_bf16_, gives_stream_);
}

template <typename Visit>
void Projection::each_number(Visit visit) {
    for (auto& [matrix, has_norm, adapter_bytes] : stages_) {
        visit(matrix.inputs), visit(matrix.outputs), visit(matrix.bits), visit(matrix.group);
        visit(matrix.factor), visit(matrix.then), visit(matrix.epsilon), visit(has_norm);
        visit(matrix.adapter_count), visit(adapter_bytes);
    }
}

bool Projection::visit_attributes(ov::AttributeVisitor& visitor) {
    // Numbers with a fraction as bits: texts of them lose some.
    std::vector<int64_t> all;
    each_number([&](auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, float>) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof(bits));
            all.push_back(bits);
        } else {
            all.push_back(int64_t(value));
        }
    });
    visitor.on_attribute("stages", all);
    visitor.on_attribute("to_bf16", to_bf16_);
    visitor.on_attribute("gives_stream", gives_stream_);
    stages_.resize(all.size() / STAGE_NUMBERS);
    auto next = all.begin();
    each_number([&](auto& value) {
        using Value = std::decay_t<decltype(value)>;
        const auto number = *next++;
        if constexpr (std::is_same_v<Value, float>) {
            const auto bits = uint32_t(number);
            std::memcpy(&value, &bits, sizeof(bits));
        } else {
            value = Value(number);
        }
    });
    return true;
}

bool Projection::has_adapters() const {
    return std::any_of(stages_.begin(), stages_.end(), [](const Stage& stage) { return stage.matrix.adapter_count > 0; });
}

size_t Projection::stream_size() const {
    size_t size = 0;
    for (const auto& stage : stages_)
        if (stage.matrix.then == Then::added) size = results(stage.matrix);
    return size;
}

bool Projection::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    const auto* found = kernels();
    if (!found) return false;
    auto shape = inputs[ROWS].get_shape();
    const size_t rows = ov::shape_size(shape) / stages_.front().matrix.inputs;
    shape.back() = results(stages_.back().matrix);
    outputs[0].set_shape(shape);
    if (gives_stream_) {
        shape.back() = stream_size();
        outputs[1].set_shape(shape);
    }
    const int32_t* adapters = nullptr;
    if (has_adapters()) {
        if (inputs.back().get_size() != rows) return false;
        adapters = static_cast<const int32_t*>(inputs.back().data());
        if (std::all_of(adapters, adapters + rows, [](int32_t number) { return number == 0; })) adapters = nullptr;
    }
    // What stages but the last give, and the stream if nobody else wants it.
    size_t most = 0;
    for (auto stage = stages_.begin(); stage + 1 < stages_.end(); ++stage) most = std::max(most, rows * results(stage->matrix));
    thread_local Buffer<float> own_between, own_stream;
    const Numbers last = numbers(outputs[0]), between{own_between.at_least(most), false};
    const Numbers sum = gives_stream_ ? numbers(outputs[1])
                        : is_added()  ? last
                                      : Numbers{own_stream.at_least(rows * stream_size()), false};
    Numbers from = numbers(inputs[ROWS]), stream = has_stream() ? numbers(inputs[STREAM]) : Numbers{};
    const auto* memory = static_cast<const uint8_t*>(inputs[MEMORY].data());
    for (const auto& stage : stages_) {
        Matrix matrix = stage.matrix;
        if (stage.has_norm) matrix.norm = reinterpret_cast<const float*>(memory);
        matrix.panels = memory + panels_at(stage);
        if (stage.adapter_bytes > 0) matrix.adapters = reinterpret_cast<const Adapter*>(memory + adapters_at(stage));
        memory += memory_of(stage);
        const bool adds = matrix.then == Then::added;
        const Numbers to = adds ? sum : &stage == &stages_.back() ? last : between;
        run(*found, matrix, rows, adapters, from, stream, to);
        from = to;
        if (adds) stream = to;
    }
    return true;
}

ov::Extension::Ptr extension() {
    return std::make_shared<ov::OpExtension<Projection>>();
}

}  // namespace ovfleet::projection
