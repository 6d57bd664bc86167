// The native projections as an operation of a graph.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "kernels/projection.hpp"

namespace ovfleet::projection {

// The inputs are the source, the memory of the matrices, the residual if a stage adds one, and, if a stage has adapters, the
// adapter number of each row. The plugin has an overhead for each custom operation and for each of its inputs, so consecutive
// projections are fused into one operation.
enum Input : size_t { SRC, MEMORY, RESIDUAL };

// One of the projections of an operation. Its source is the destination of the previous stage; the source of the first stage is
// the source of the operation. A stage that adds a residual adds the destination of the nearest earlier stage that also adds
// one or, if there is none, the input `RESIDUAL`.
struct Stage {
    Matmul matmul;
    bool has_norm, has_bias;
    size_t adapter_bytes;
};

// The memory of a stage contains its norm, its bias, its weights and its adapters, in this order. These functions return the
// byte offsets of the bias, the weights and the adapters, and the size of the memory in bytes.
inline size_t bias_at(const Stage& stage) { return stage.has_norm ? (stage.matmul.K * sizeof(float) + 63) / 64 * 64 : 0; }
inline size_t weights_at(const Stage& stage) {
    return bias_at(stage) + (stage.has_bias ? num_n_blocks(stage.matmul) * N_BLOCK * sizeof(float) : 0);
}
inline size_t adapters_at(const Stage& stage) {
    return weights_at(stage) + num_n_blocks(stage.matmul) * n_block_bytes(stage.matmul);
}
inline size_t memory_bytes(const Stage& stage) { return adapters_at(stage) + stage.adapter_bytes; }

// Whether the destination of the last stage is bf16 instead of f32, and whether the residual is an output.
struct Outputs {
    bool to_bf16 = false, gives_residual = false;
};

// The operation. Its outputs are the destination of the last stage and, with `gives_residual`, the residual.
class Projection : public ov::op::Op {
public:
    OPENVINO_OP("Projection", "ovfleet");

    Projection() = default;
    Projection(const ov::OutputVector& inputs, Isa isa, std::vector<Stage> stages, Outputs outputs);

    Isa isa() const { return isa_; }
    const std::vector<Stage>& stages() const { return stages_; }
    // Whether the destination of the last stage is also the residual.
    bool ends_with_residual() const { return stages_.back().matmul.epilogue == Epilogue::residual; }
    bool to_bf16() const { return to_bf16_; }
    bool has_adapters() const;
    bool has_residual() const { return get_input_size() > RESIDUAL + (has_adapters() ? 1 : 0); }

    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor& visitor) override;
    bool has_evaluate() const override { return true; }
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;

private:
    // These functions throw unless the kernels support the attributes, the tensors and the adapters in memory, because a
    // compiled model in a file may contain any values.
    void check_attributes() const;
    void check_tensors(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const;
    void check_adapters(const uint8_t* memory) const;
    // Calls `visit` with each numeric attribute of each stage.
    template <typename Visit>
    void each_number(Visit visit);
    // Returns the number of columns of the residual, or 0 if no stage adds a residual.
    size_t residual_columns() const;

    Isa isa_ = Isa::plugin;
    std::vector<Stage> stages_;
    bool to_bf16_ = false, gives_residual_ = false;
    // The address of the memory whose adapters have been checked, and whose weights have been placed on their NUMA nodes. This
    // memory is a constant of the graph, so preparing it once is enough.
    mutable std::atomic<const uint8_t*> prepared_{nullptr};
};

// The extension that lets an `ov::Core` read graphs with this operation.
ov::Extension::Ptr extension();

}  // namespace ovfleet::projection
