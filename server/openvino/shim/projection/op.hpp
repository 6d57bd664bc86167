// Projections of our own as an operation of a graph.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "projection.hpp"

namespace ovfleet::projection {

// Inputs: rows, the memory of the matrices, the stream if there is any, and then, if any stage has adapters, the number of that
// of each row. Few, since the plugin takes its time for each: therefore as many
// projections as follow each other are one operation.
enum Input : size_t { ROWS, MEMORY, STREAM };

// One of the projections of an operation. Its rows are what the one before it gives. What is added to is the stream: that of
// the operation's input, and then the sum.
struct Stage {
    Matrix matrix;
    bool has_norm;
    size_t adapter_bytes;
};

// Where the panels of a stage begin in its memory, behind its norm, and behind them its adapters; and its end.
inline size_t panels_at(const Stage& stage) {
    return stage.has_norm ? (stage.matrix.inputs * sizeof(float) + 63) / 64 * 64 : 0;
}
inline size_t adapters_at(const Stage& stage) {
    return panels_at(stage) + panels(stage.matrix) * panel_bytes(stage.matrix);
}
inline size_t memory_of(const Stage& stage) { return adapters_at(stage) + stage.adapter_bytes; }

// Outputs: what the last stage gives, and the stream with `gives_stream`.
class Projection : public ov::op::Op {
public:
    OPENVINO_OP("Projection", "ovfleet");

    Projection() = default;
    Projection(const ov::OutputVector& inputs, std::vector<Stage> stages, bool to_bf16, bool gives_stream);

    const std::vector<Stage>& stages() const { return stages_; }
    bool is_added() const { return stages_.back().matrix.then == Then::added; }
    bool to_bf16() const { return to_bf16_; }
    bool has_adapters() const;
    bool has_stream() const { return get_input_size() > STREAM + (has_adapters() ? 1 : 0); }

    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor& visitor) override;
    bool has_evaluate() const override { return true; }
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;

private:
    // Throw unless the kernels can compute what the attributes, the tensors and the adapters in memory say: any of these may
    // come from a file.
    void check_attributes() const;
    void check_tensors(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const;
    void check_adapters(const uint8_t* memory) const;
    // Calls `visit` with each number of each stage.
    template <typename Visit>
    void each_number(Visit visit);
    // Numbers of a row of the stream that is given.
    size_t stream_size() const;

    std::vector<Stage> stages_;
    bool to_bf16_ = false, gives_stream_ = false;
    // The memory whose adapters have been checked: it is a constant of the graph, so once is enough.
    mutable std::atomic<const uint8_t*> checked_{nullptr};
};

// How graphs with it are read.
ov::Extension::Ptr extension();

}  // namespace ovfleet::projection
