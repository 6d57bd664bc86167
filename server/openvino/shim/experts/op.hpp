// The experts of a layer as an operation of a graph.
#pragma once

#include <atomic>

#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "run.hpp"

namespace ovfleet::experts {

// The inputs: the activations, and the memory of the layer, which run.hpp describes.
enum Input : size_t { SRC, MEMORY };

// The output has the shape of the activations.
class ExpertsOp : public ov::op::Op {
public:
    OPENVINO_OP("Experts", "ovfleet");

    ExpertsOp() = default;
    ExpertsOp(const ov::OutputVector& inputs, Isa isa, const Experts& experts, bool to_bf16);

    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor& visitor) override;
    bool has_evaluate() const override { return true; }
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;

private:
    // These functions throw unless the kernels support the attributes and the tensors, because a file may contain any values.
    void check_attributes() const;
    void check_tensors(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const;

    Isa isa_ = Isa::plugin;
    Experts experts_{};
    // Whether the output is bf16 instead of f32.
    bool to_bf16_ = false;
    // The memory whose weights were placed most recently on the NUMA nodes of the groups of threads.
    mutable std::atomic<const uint8_t*> placed_{nullptr};
};

// The extension with which an `ov::Core` can read graphs that contain this operation.
ov::Extension::Ptr extension();

}  // namespace ovfleet::experts
