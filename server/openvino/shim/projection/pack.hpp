// Weights of a graph, and their conversion to the format of the kernels.
#pragma once

#include <memory>
#include <optional>

#include <openvino/op/constant.hpp>

#include "kernels/projection.hpp"

namespace ovfleet::projection {

// A weight `[N][K]` of integers with zero points and scales.
struct GraphWeight {
    std::shared_ptr<ov::op::v0::Constant> quants, zeros, scales;
    size_t N, K;
    // The number of weights that share a zero point and a scale.
    size_t group;
};

// The weight that a node and its inputs represent; no value if they have another form.
std::optional<GraphWeight> weight_of(const std::shared_ptr<ov::Node>& node);

// The row of the weights at a position in a block of columns; no value for the padding of the last block.
inline std::optional<size_t> weight_row(const Matmul& matmul, size_t block, size_t in_block) {
    const size_t block_columns = matmul.epilogue == Epilogue::swiglu ? N_BLOCK / 2 : N_BLOCK;
    const size_t column = block * block_columns + in_block % block_columns;
    if (column >= dst_columns(matmul)) return {};
    return column + in_block / block_columns * dst_columns(matmul);
}

// Sets the members of a matrix that are determined by its weight.
void describe(const GraphWeight& weight, Matmul& matmul);
// Writes the blocks of columns of a matrix.
void pack(const GraphWeight& weight, const Matmul& matmul, uint8_t* to);

}  // namespace ovfleet::projection
