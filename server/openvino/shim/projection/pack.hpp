// Weights of a graph, and their conversion to the format of the kernels.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <openvino/op/constant.hpp>

#include "../graph/deferred.hpp"
#include "kernels/projection.hpp"

namespace ovfleet::projection {

// A weight `[N][K]` of integers with scales and, optionally, zero points, or of numbers in E2M1 with scales. For a stack of
// matrices, N is the number of rows of all matrices.
struct GraphWeight {
    std::shared_ptr<ov::op::v0::Constant> quants, zeros, scales;
    size_t N, K;
    // The number of weights that share a zero point and a scale.
    size_t group;
};

// Returns the weight that a node and its inputs represent, or no value if their structure is not supported.
std::optional<GraphWeight> weight_of(const std::shared_ptr<ov::Node>& node);

// Returns the row of the weights at a position in a block of columns, or no value for the padding of the last block.
inline std::optional<size_t> weight_row(const Matmul& matmul, size_t block, size_t in_block) {
    const size_t block_columns = is_gated(matmul.epilogue) ? N_BLOCK / 2 : N_BLOCK;
    const size_t column = block * block_columns + in_block % block_columns;
    if (column >= dst_columns(matmul)) return {};
    return column + in_block / block_columns * dst_columns(matmul);
}

// Sets the members of `matmul` that are determined by its weight.
void describe(const GraphWeight& weight, Matmul& matmul);
// Sets the members that `describe` sets, except N, for a matrix that consists of the rows of one or more weights with the same
// number of columns. The scale factor is set to 1.
void describe_form(const std::vector<const GraphWeight*>& weights, Matmul& matmul);
// Sets the scale factor of a matrix that `describe_form` has described, unless it has super-scales, which need none.
void set_scale_factor(const std::vector<const GraphWeight*>& weights, Matmul& matmul);
// Writes the blocks of columns of a matrix.
void pack(const GraphWeight& weight, const Matmul& matmul, uint8_t* to);

// Rows of a weight in memory.
class WeightRows {
public:
    // Returns the quants `4 * four` to `4 * four + 3` of a row as unsigned bytes, the first one in the lowest byte. `bits` is
    // the matrix's `Matmul::bits`. With `E2M1_BITS`, the bytes are E2M1 codes; with `SIX_BITS`, they are integers below 64.
    uint32_t four_quants(size_t row, size_t four, size_t bits) const;
    float scale(size_t row, size_t group) const {
        return scales_[row * scales_per_row_ + (scales_per_row_ ? group : 0)] * step_;
    }
    float zero(size_t row, size_t group, size_t bits) const {
        // The offset is added regardless of the type of the zero points.
        const float offset = bits == SIX_BITS && flipped_ ? 32 : offset_;
        return (zeros_ ? zeros_[row * zeros_per_row_ + (zeros_per_row_ ? group : 0)] : 0) + offset;
    }

private:
    friend class WeightReader;

    const uint8_t* quants_ = nullptr;
    const float *scales_ = nullptr, *zeros_ = nullptr;
    size_t bits_ = 0, quant_bytes_per_row_ = 0, scales_per_row_ = 0, zeros_per_row_ = 0;
    // The offset that is added to zero points: half the number of possible values for signed quants, the quant of 0 for E2M1,
    // and 0 for unsigned quants. `flipped_` is the mask of the bits that adding the offset flips in four signed quants.
    float offset_ = 0;
    uint32_t flipped_ = 0;
    // The difference between the weights of two consecutive quants, in units of the scale: 0.5 in E2M1, otherwise 1.
    float step_ = 1;
    bool is_e2m1_ = false;
    // The rows that were read from a file.
    std::vector<uint8_t> quants_read_, zeros_read_;
    std::vector<float> scales_read_, zeros_converted_;
};

// Reads the rows of a weight, from memory or from the model's files. Several threads may use a reader at the same time.
class WeightReader {
public:
    explicit WeightReader(const GraphWeight& weight);

    size_t N() const { return weight_.N; }
    // The number of weights that share a zero point and a scale.
    size_t group() const { return weight_.group; }
    // Reads `count` rows of the weight into `rows`, starting at the row `first`.
    void read(size_t first, size_t count, WeightRows& rows) const;

private:
    void read_file(size_t first, size_t count, WeightRows& rows) const;

    GraphWeight weight_;
    size_t groups_, bits_;
    // The rows in the files of the model, or an empty list if the weight is in memory.
    std::vector<TensorRows> file_rows_;
    // The zero points and the scales of a weight in memory: one for each group, or a single one for all groups.
    std::vector<float> zeros_, scales_;
};

// Consecutive rows of a weight.
struct WeightPart {
    const WeightReader* weight;
    size_t first, count;
};

// Writes a bias in the order in which the kernels add it. The bias has one element for each row of the weights.
void pack_bias(const Matmul& matmul, const float* bias, float* to);
// Writes the blocks of columns of a matrix that consists of `parts`.
void pack(const std::vector<WeightPart>& parts, const Matmul& matmul, uint8_t* to);

}  // namespace ovfleet::projection
