// Weights of a graph, and their conversion to the format of the kernels.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <openvino/op/constant.hpp>

#include "kernels/projection.hpp"

namespace ovfleet::projection {

// A weight `[N][K]` of integers with zero points and scales, or of numbers in E2M1 with scales. The rows of a stack of matrices
// follow each other.
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
    const size_t block_columns = is_gated(matmul.epilogue) ? N_BLOCK / 2 : N_BLOCK;
    const size_t column = block * block_columns + in_block % block_columns;
    if (column >= dst_columns(matmul)) return {};
    return column + in_block / block_columns * dst_columns(matmul);
}

// Sets the members of a matrix that are determined by its weight.
void describe(const GraphWeight& weight, Matmul& matmul);
// Sets the members but N of a matrix whose rows are of several weights with the same number of columns.
void describe(const std::vector<const GraphWeight*>& weights, Matmul& matmul);
// Writes the blocks of columns of a matrix.
void pack(const GraphWeight& weight, const Matmul& matmul, uint8_t* to);

// Reads the rows of a weight.
class WeightReader {
public:
    explicit WeightReader(const GraphWeight& weight);

    size_t N() const { return N_; }
    // The bits of a quant in the graph.
    uint32_t stored(size_t row, size_t column) const {
        const size_t index = row * K_ + column;
        return bits_ == 8 ? quants_[index] : quants_[index / 2] >> index % 2 * 4 & 15;
    }
    // A quant as a number that is not negative, its zero point, and its scale.
    uint32_t quant(size_t row, size_t column) const {
        const auto bits = stored(row, column);
        return is_e2m1_ ? quant_of_e2m1(bits) : bits ^ offset_;
    }
    float zero(size_t row, size_t column) const;
    float scale(size_t row, size_t column) const;

private:
    size_t group_at(size_t row, size_t column) const { return row * (K_ / group_) + column / group_; }

    std::shared_ptr<ov::op::v0::Constant> constant_;
    const uint8_t* quants_;
    size_t bits_;
    bool is_e2m1_;
    size_t N_, K_, group_;
    // Half of the range of signed quants, which is added to them and to their zero points.
    uint32_t offset_;
    // One for each group, or one for all.
    std::vector<float> zeros_, scales_;
};

// Consecutive rows of a weight.
struct WeightRows {
    const WeightReader* weight;
    size_t first, count;
};

// Writes the bias of a matrix, which has a number for each row of the weights, in the order in which the kernels add it.
void pack_bias(const Matmul& matmul, const float* bias, float* to);
// Writes the blocks of columns of a matrix that consists of `parts`.
void pack(const std::vector<WeightRows>& parts, const Matmul& matmul, uint8_t* to);

}  // namespace ovfleet::projection
