#include "op.hpp"

#include <algorithm>

#include "../attributes.hpp"
#include "../threads.hpp"
#include "run.hpp"

namespace ovfleet::projection {
namespace {

// The number of attributes of a stage.
constexpr size_t STAGE_NUMBERS = 13;
// The largest number of stages in an operation, the largest number of adapters in a stage, and the largest size of these
// adapters in bytes. These limits are far above the numbers in any model, and far too small to cause overflows.
constexpr size_t STAGES_MAX = 64, ADAPTERS_MAX = 1 << 16, ADAPTER_BYTES_MAX = size_t(1) << 40;

FloatData floats(const ov::Tensor& tensor) {
    return {const_cast<void*>(tensor.data()), tensor.get_element_type() == ov::element::bf16};
}

}  // namespace

Projection::Projection(const ov::OutputVector& inputs, Isa isa, std::vector<Stage> stages, Outputs outputs)
    : Op(inputs), isa_(isa), stages_(std::move(stages)), to_bf16_(outputs.to_bf16), gives_residual_(outputs.gives_residual) {
    constructor_validate_and_infer_types();
}

void Projection::check_attributes() const {
    const auto check = [](bool holds, const char* fault) {
        OPENVINO_ASSERT(holds, "a native projection has invalid attributes: ", fault);
    };
    check(isa_ > Isa::plugin && int64_t(isa_) < ISA_COUNT, "the instruction set is unknown");
    check(!stages_.empty() && stages_.size() <= STAGES_MAX, "the number of stages must be from 1 to 64");
    const Stage* before = nullptr;
    size_t residual = 0;
    for (const auto& stage : stages_) {
        const char* fault = unsupported(stage.matmul);
        check(!fault, fault);
        check(!before || dst_columns(before->matmul) == stage.matmul.K,
              "the source of a stage and the destination of the stage before it have different numbers of columns");
        check(stage.matmul.adapter_count <= ADAPTERS_MAX && (stage.matmul.adapter_count == 0) == (stage.adapter_bytes == 0),
              "a stage must have at most 65536 adapters, and memory for adapters if and only if it has any");
        check(stage.adapter_bytes <= ADAPTER_BYTES_MAX && stage.adapter_bytes % 64 == 0,
              "the size of the adapters in bytes must be a multiple of 64, up to 2^40");
        if (stage.matmul.epilogue == Epilogue::residual) {
            check(residual == 0 || residual == dst_columns(stage.matmul), "its stages add residuals of different sizes");
            residual = dst_columns(stage.matmul);
        }
        before = &stage;
    }
    check(!gives_residual_ || residual > 0, "no stage adds the residual that is an output");
    check(!to_bf16_ || !ends_with_residual(), "the residual must be f32");
    check(!to_bf16_ || isa_ == Isa::amx || !is_activation(stages_.back().matmul.epilogue),
          "the destination of an activation must be f32");
    check(get_input_size() == MEMORY + 1 + (residual > 0) + has_adapters(), "the number of inputs does not match the stages");
}

void Projection::check_tensors(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    // The kernels access the memory of the tensors as the expected types. A plugin that computes in f16 would pass f16 tensors.
    const auto check_type = [](const ov::Tensor& tensor, const char* name, const ov::element::Type& expected) {
        OPENVINO_ASSERT(tensor.get_element_type() == expected, "the ", name, " of a native projection has the type ",
                        tensor.get_element_type(), " instead of ", expected);
    };
    const auto check_size = [](const ov::Tensor& tensor, const char* name, size_t expected) {
        OPENVINO_ASSERT(tensor.get_size() == expected, "the ", name, " of a native projection has ", tensor.get_size(),
                        " elements instead of ", expected);
    };
    const bool is_bf16 = inputs.at(SRC).get_element_type() == ov::element::bf16;
    check_type(inputs[SRC], "source", is_bf16 ? ov::element::bf16 : ov::element::f32);
    const auto& shape = inputs[SRC].get_shape();
    const size_t K = stages_.front().matmul.K, M = inputs[SRC].get_size() / K;
    OPENVINO_ASSERT(!shape.empty() && shape.back() == K, "the source of a native projection has the shape ", shape,
                    "; its last dimension must be ", K);
    size_t bytes = 0;
    for (const auto& stage : stages_) bytes += memory_bytes(stage);
    check_type(inputs.at(MEMORY), "memory", ov::element::u8);
    check_size(inputs[MEMORY], "memory", bytes);
    if (has_residual()) {
        check_type(inputs.at(RESIDUAL), "residual", ov::element::f32);
        check_size(inputs[RESIDUAL], "residual", M * residual_columns());
    }
    if (has_adapters()) {
        check_type(inputs.back(), "list of adapters", ov::element::i32);
        check_size(inputs.back(), "list of adapters", M);
    }
    check_type(outputs.at(0), "destination", to_bf16_ ? ov::element::bf16 : ov::element::f32);
    if (gives_residual_) check_type(outputs.at(1), "new residual", ov::element::f32);
}

void Projection::check_adapters(const uint8_t* memory) const {
    const auto check = [](bool holds, const char* fault) {
        OPENVINO_ASSERT(holds, "a native projection has invalid adapters: ", fault);
    };
    for (const auto& stage : stages_) {
        const auto& matmul = stage.matmul;
        const size_t bytes = stage.adapter_bytes;
        const uint8_t* begin = memory + adapters_at(stage);
        // Whether `count` items of `size` bytes at the position `at` are within the memory of the adapters, and aligned.
        const auto is_within = [&](uint64_t at, uint64_t count, uint64_t size, uint64_t aligned) {
            return at % aligned == 0 && at <= bytes && count <= (bytes - at) / size;
        };
        check(is_within(0, matmul.adapter_count, sizeof(LoraAdapter), 1), "their memory is too small");
        for (size_t i = 0; i < matmul.adapter_count; ++i) {
            const auto& adapter = reinterpret_cast<const LoraAdapter*>(begin)[i];
            check(i == 0 || adapter.number > reinterpret_cast<const LoraAdapter*>(begin)[i - 1].number,
                  "their numbers do not ascend");
            check(adapter.ranks > 0 && adapter.ranks % RANK_BLOCK == 0 && adapter.ranks <= bytes,
                  "a rank must be a positive multiple of 4 that fits into their memory");
            check(is_within(adapter.down, adapter.ranks, matmul.K * sizeof(float), sizeof(float)),
                  "a matrix is outside of their memory");
            check(is_within(adapter.up_blocks, num_n_blocks(matmul) * 2, sizeof(UpBlock), alignof(UpBlock)),
                  "a list of matrices is outside of their memory");
            const auto* up_blocks = reinterpret_cast<const UpBlock*>(begin + adapter.up_blocks);
            for (size_t half = 0; half < num_n_blocks(matmul) * 2; ++half) {
                const auto& [first, last, up] = up_blocks[half];
                check(first <= last && last <= adapter.ranks, "a range of ranks must be within the ranks of its adapter");
                check(is_within(up, last - first, N_BLOCK / 2 * sizeof(float), sizeof(float)),
                      "a matrix is outside of their memory");
            }
        }
        memory += memory_bytes(stage);
    }
}

void Projection::validate_and_infer_types() {
    check_attributes();
    const auto shape = [&](size_t size) {
        auto shape = get_input_partial_shape(SRC);
        if (shape.rank().is_static()) shape[shape.size() - 1] = int64_t(size);
        return shape;
    };
    set_output_size(gives_residual_ ? 2 : 1);
    set_output_type(0, to_bf16_ ? ov::element::bf16 : ov::element::f32, shape(dst_columns(stages_.back().matmul)));
    if (gives_residual_) set_output_type(1, ov::element::f32, shape(residual_columns()));
}

std::shared_ptr<ov::Node> Projection::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    return std::make_shared<Projection>(inputs, isa_, stages_, Outputs{to_bf16_, gives_residual_});
}

template <typename Visit>
void Projection::each_number(Visit visit) {
    for (auto& [matmul, has_norm, has_bias, adapter_bytes] : stages_) {
        visit(matmul.K), visit(matmul.N), visit(matmul.bits), visit(matmul.group), visit(matmul.per_channel);
        visit(matmul.terms), visit(matmul.scale_factor), visit(matmul.epilogue), visit(matmul.epsilon), visit(has_norm);
        visit(has_bias), visit(matmul.adapter_count), visit(adapter_bytes);
    }
}

bool Projection::visit_attributes(ov::AttributeVisitor& visitor) {
    std::vector<int64_t> all;
    each_number([&](auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, float>) all.push_back(bits_of(value));
        else all.push_back(int64_t(value));
    });
    visit_isa(visitor, isa_);
    visitor.on_attribute("stages", all);
    visitor.on_attribute("to_bf16", to_bf16_);
    visitor.on_attribute("gives_residual", gives_residual_);
    OPENVINO_ASSERT(all.size() % STAGE_NUMBERS == 0 && all.size() / STAGE_NUMBERS <= STAGES_MAX,
                    "the stages of a native projection have an unexpected number of attributes: ", all.size());
    stages_.resize(all.size() / STAGE_NUMBERS);
    auto next = all.begin();
    each_number([&](auto& value) {
        using Value = std::decay_t<decltype(value)>;
        const auto number = *next++;
        if constexpr (std::is_same_v<Value, float>) value = float_of(number);
        else value = Value(number);
    });
    return true;
}

bool Projection::has_adapters() const {
    return std::any_of(stages_.begin(), stages_.end(), [](const Stage& stage) { return stage.matmul.adapter_count > 0; });
}

size_t Projection::residual_columns() const {
    size_t size = 0;
    for (const auto& stage : stages_)
        if (stage.matmul.epilogue == Epilogue::residual) size = dst_columns(stage.matmul);
    return size;
}

bool Projection::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    const auto* kernels = projection_kernels(isa_);
    OPENVINO_ASSERT(kernels, "this processor does not support the instruction set of a native projection: ", int64_t(isa_));
    check_tensors(outputs, inputs);
    auto shape = inputs[SRC].get_shape();
    const size_t M = ov::shape_size(shape) / stages_.front().matmul.K;
    shape.back() = dst_columns(stages_.back().matmul);
    outputs[0].set_shape(shape);
    if (gives_residual_) {
        shape.back() = residual_columns();
        outputs[1].set_shape(shape);
    }
    const int32_t* adapters = nullptr;
    const auto* const begin = static_cast<const uint8_t*>(inputs[MEMORY].data());
    const auto* memory = begin;
    const bool is_new = prepared_.load(std::memory_order_relaxed) != begin;
    if (has_adapters()) {
        if (is_new) check_adapters(memory);
        adapters = static_cast<const int32_t*>(inputs.back().data());
        if (std::all_of(adapters, adapters + M, [](int32_t number) { return number == 0; })) adapters = nullptr;
    }
    // The memory of intermediate destinations, and of the residual if it is not an output.
    size_t most = 0;
    for (auto stage = stages_.begin(); stage + 1 < stages_.end(); ++stage)
        most = std::max(most, M * dst_columns(stage->matmul));
    thread_local Buffer<float> intermediate_buffer, residual_buffer;
    const FloatData last = floats(outputs[0]), intermediate{intermediate_buffer.at_least(most), false};
    const FloatData sum = gives_residual_        ? floats(outputs[1])
                          : ends_with_residual() ? last
                                                 : FloatData{residual_buffer.at_least(M * residual_columns()), false};
    FloatData src = floats(inputs[SRC]), residual = has_residual() ? floats(inputs[RESIDUAL]) : FloatData{};
    for (const auto& stage : stages_) {
        Matmul matmul = stage.matmul;
        if (stage.has_norm) matmul.norm = reinterpret_cast<const float*>(memory);
        if (stage.has_bias) matmul.bias = reinterpret_cast<const float*>(memory + bias_at(stage));
        matmul.weights = memory + weights_at(stage);
        if (is_new && num_thread_groups() > 1) place(matmul);
        if (stage.adapter_bytes > 0) matmul.adapters = reinterpret_cast<const LoraAdapter*>(memory + adapters_at(stage));
        memory += memory_bytes(stage);
        const bool adds = matmul.epilogue == Epilogue::residual;
        const FloatData dst = adds ? sum : &stage == &stages_.back() ? last : intermediate;
        run(*kernels, matmul, M, adapters, src, residual, dst);
        src = dst;
        if (adds) residual = dst;
    }
    prepared_.store(begin, std::memory_order_relaxed);
    return true;
}

ov::Extension::Ptr extension() { return std::make_shared<ov::OpExtension<Projection>>(); }

}  // namespace ovfleet::projection
