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
// Most stages of an operation, adapters of a stage, and bytes of these: far above any model, and far below what overflows.
constexpr size_t STAGES_MAX = 64, ADAPTERS_MAX = 1 << 16, ADAPTER_BYTES_MAX = size_t(1) << 40;

Numbers numbers(const ov::Tensor& tensor) {
    return {const_cast<void*>(tensor.data()), tensor.get_element_type() == ov::element::bf16};
}

}  // namespace

Projection::Projection(const ov::OutputVector& inputs, std::vector<Stage> stages, bool to_bf16, bool gives_stream)
    : Op(inputs), stages_(std::move(stages)), to_bf16_(to_bf16), gives_stream_(gives_stream) {
    constructor_validate_and_infer_types();
}

void Projection::check_attributes() const {
    const auto check = [](bool holds, const char* fault) {
        OPENVINO_ASSERT(holds, "a projection of ovfleet with bad attributes: ", fault);
    };
    check(!stages_.empty() && stages_.size() <= STAGES_MAX, "the number of stages must be from 1 to 64");
    const Stage* before = nullptr;
    size_t added = 0;
    for (const auto& stage : stages_) {
        const char* fault = unsupported(stage.matrix);
        check(!fault, fault);
        check(!before || results(before->matrix) == stage.matrix.inputs, "a stage does not have the inputs that the one before it gives");
        check(stage.matrix.adapter_count <= ADAPTERS_MAX && (stage.matrix.adapter_count == 0) == (stage.adapter_bytes == 0),
              "the number of adapters is wrong");
        check(stage.adapter_bytes <= ADAPTER_BYTES_MAX && stage.adapter_bytes % 64 == 0, "the size of the adapters is wrong");
        if (stage.matrix.then == Then::added) {
            check(added == 0 || added == results(stage.matrix), "sums of different sizes");
            added = results(stage.matrix);
        }
        before = &stage;
    }
    check(!gives_stream_ || added > 0, "it gives a sum that it does not have");
    check(!to_bf16_ || !is_added(), "sums must be f32");
    check(get_input_size() == MEMORY + 1 + (added > 0) + has_adapters(), "the number of inputs is wrong");
}

void Projection::check_tensors(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    // The kernels read memory as these types: any other (f16, where a plugin computes in it) is refused and not misread.
    const auto check_type = [](const ov::Tensor& tensor, const char* name, const ov::element::Type& expected) {
        OPENVINO_ASSERT(tensor.get_element_type() == expected, "the ", name, " of a projection of ovfleet have type ",
                        tensor.get_element_type(), ", and not ", expected);
    };
    const auto check_size = [](const ov::Tensor& tensor, const char* name, size_t expected) {
        OPENVINO_ASSERT(tensor.get_size() == expected, "a projection of ovfleet has ", tensor.get_size(), " numbers of ", name,
                        ", and not ", expected);
    };
    const bool in_bf16 = inputs.at(ROWS).get_element_type() == ov::element::bf16;
    check_type(inputs[ROWS], "rows", in_bf16 ? ov::element::bf16 : ov::element::f32);
    const auto& shape = inputs[ROWS].get_shape();
    const size_t width = stages_.front().matrix.inputs, rows = inputs[ROWS].get_size() / width;
    OPENVINO_ASSERT(!shape.empty() && shape.back() == width, "rows of a projection of ovfleet do not have ", width, " numbers");
    size_t bytes = 0;
    for (const auto& stage : stages_) bytes += memory_of(stage);
    check_type(inputs.at(MEMORY), "weights", ov::element::u8);
    check_size(inputs[MEMORY], "weights", bytes);
    if (has_stream()) {
        check_type(inputs.at(STREAM), "numbers that are added to", ov::element::f32);
        check_size(inputs[STREAM], "what is added to", rows * stream_size());
    }
    if (has_adapters()) {
        check_type(inputs.back(), "adapters", ov::element::i32);
        check_size(inputs.back(), "adapters", rows);
    }
    check_type(outputs.at(0), "results", to_bf16_ ? ov::element::bf16 : ov::element::f32);
    if (gives_stream_) check_type(outputs.at(1), "sums", ov::element::f32);
}

void Projection::check_adapters(const uint8_t* memory) const {
    const auto check = [](bool holds, const char* fault) {
        OPENVINO_ASSERT(holds, "a projection of ovfleet with bad adapters: ", fault);
    };
    for (const auto& stage : stages_) {
        const auto& matrix = stage.matrix;
        const size_t bytes = stage.adapter_bytes;
        const uint8_t* begin = memory + adapters_at(stage);
        // Whether so many items of a size are within the adapters, and where such items may be.
        const auto is_within = [&](uint64_t at, uint64_t count, uint64_t size, uint64_t aligned) {
            return at % aligned == 0 && at <= bytes && count <= (bytes - at) / size;
        };
        check(is_within(0, matrix.adapter_count, sizeof(Adapter), 1), "there is no room for them");
        for (size_t i = 0; i < matrix.adapter_count; ++i) {
            const auto& adapter = reinterpret_cast<const Adapter*>(begin)[i];
            check(adapter.ranks > 0 && adapter.ranks % RANKS == 0 && adapter.ranks <= bytes, "a rank is wrong");
            check(is_within(adapter.down, adapter.ranks, matrix.inputs * sizeof(float), sizeof(float)), "a matrix is not in memory");
            check(is_within(adapter.halves, panels(matrix) * 2, sizeof(Half), alignof(Half)), "a directory is not in memory");
            const auto* halves = reinterpret_cast<const Half*>(begin + adapter.halves);
            for (size_t half = 0; half < panels(matrix) * 2; ++half) {
                const auto& [first, last, up] = halves[half];
                check(first <= last && last <= adapter.ranks, "ranks are not the adapter's");
                check(is_within(up, last - first, PANEL / 2 * sizeof(float), sizeof(float)), "a matrix is not in memory");
            }
        }
        memory += memory_of(stage);
    }
}

void Projection::validate_and_infer_types() {
    check_attributes();
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
    OPENVINO_ASSERT(all.size() % STAGE_NUMBERS == 0 && all.size() / STAGE_NUMBERS <= STAGES_MAX,
                    "a projection of ovfleet with ", all.size(), " numbers of its stages");
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
    check_tensors(outputs, inputs);
    auto shape = inputs[ROWS].get_shape();
    const size_t rows = ov::shape_size(shape) / stages_.front().matrix.inputs;
    shape.back() = results(stages_.back().matrix);
    outputs[0].set_shape(shape);
    if (gives_stream_) {
        shape.back() = stream_size();
        outputs[1].set_shape(shape);
    }
    const int32_t* adapters = nullptr;
    const auto* memory = static_cast<const uint8_t*>(inputs[MEMORY].data());
    if (has_adapters()) {
        if (checked_.load(std::memory_order_relaxed) != memory) check_adapters(memory);
        checked_.store(memory, std::memory_order_relaxed);
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
