// Weights as a graph has them, and as the kernels want them.
#pragma once

#include <memory>
#include <optional>

#include <openvino/op/constant.hpp>

#include "projection.hpp"

namespace ovfleet::projection {

// A weight `[outputs][inputs]` of integers with zeros and scales.
struct Weight {
    std::shared_ptr<ov::op::v0::Constant> quants, zeros, scales;
    size_t outputs, inputs;
    // Inputs that share a zero and a scale.
    size_t group;
};

// What the constants and operations are that a node stands for; none if that is no such weight.
std::optional<Weight> weight_of(const std::shared_ptr<ov::Node>& node);

// The output that is at a place of a panel; none if the last panel has no more.
inline std::optional<size_t> output_at(const Matrix& matrix, size_t panel, size_t in_panel) {
    const size_t most = matrix.then == Then::gated ? PANEL / 2 : PANEL;
    const size_t result = panel * most + in_panel % most;
    if (result >= results(matrix)) return {};
    return result + in_panel / most * results(matrix);
}

// Fills in what of a matrix follows from its weight, and writes its panels.
void measure(const Weight& weight, Matrix& matrix);
void pack(const Weight& weight, const Matrix& matrix, uint8_t* to);

}  // namespace ovfleet::projection
