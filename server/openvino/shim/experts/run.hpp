// Computes the experts of a layer on several threads: chooses the experts of each row, multiplies the row by their matrices,
// and adds the weighted results.
#pragma once

#include "../projection/kernels/projection.hpp"

namespace ovfleet::experts {

using projection::FloatData;
using projection::Kernels;
using projection::Matmul;

// The experts of a layer, of which the router chooses `used` for each row. An expert multiplies a row by its first matrix,
// whose epilogue is a variant of SwiGLU, and the result by its second matrix.
struct Experts {
    size_t count, used;
    // Whether the router and the matrices have biases.
    bool has_biases;
    // The sizes and formats of the two matrices of each expert. The pointers to weights and biases are not set.
    Matmul gate_up, down;
};

// The maximum supported numbers of experts, experts per row, columns of a matrix, and rows of the source.
constexpr size_t COUNT_MAX = 1 << 12, USED_MAX = 64, COLUMNS_MAX = 1 << 20, ROWS_MAX = 1 << 24;

// Returns the reason why the kernels do not support a layer, or null if they do. The attributes of an operation in a graph are
// checked with this function before any of them is used as a size or a divisor.
const char* unsupported(const Experts& experts);

// The number of rows of the router's matrix, which is in f32: one row for each expert, and padding.
inline size_t router_rows(const Experts& experts) {
    return (experts.count + projection::RANK_BLOCK - 1) / projection::RANK_BLOCK * projection::RANK_BLOCK;
}
inline size_t matrix_bytes(const Matmul& matmul) { return num_n_blocks(matmul) * n_block_bytes(matmul); }

// The number of elements in the packed bias of a matrix, including the padding.
inline size_t bias_size(const Matmul& matmul) { return num_n_blocks(matmul) * projection::N_BLOCK; }

// The memory of a layer contains, in this order:
// - the matrix of the router
// - if the layer has biases: the biases of the router, of the `gate_up` matrices, and of the `down` matrices
// - the `gate_up` matrices of all experts
// - the `down` matrices of all experts
//
// The following functions return, in bytes, the offset of each part after the router's matrix, which is at offset 0, and the
// size of the memory.
inline size_t router_bias_at(const Experts& experts) { return router_rows(experts) * experts.gate_up.K * sizeof(float); }
inline size_t gate_up_bias_at(const Experts& experts) {
    const size_t bytes = experts.has_biases ? router_rows(experts) * sizeof(float) : 0;
    // The kernels read biases and matrices in cache lines, so both begin at multiples of 64 bytes.
    return router_bias_at(experts) + (bytes + 63) / 64 * 64;
}
inline size_t down_bias_at(const Experts& experts) {
    const size_t elements = experts.has_biases ? experts.count * bias_size(experts.gate_up) : 0;
    return gate_up_bias_at(experts) + elements * sizeof(float);
}
inline size_t gate_up_at(const Experts& experts) {
    const size_t elements = experts.has_biases ? experts.count * bias_size(experts.down) : 0;
    return down_bias_at(experts) + elements * sizeof(float);
}
inline size_t down_at(const Experts& experts) { return gate_up_at(experts) + experts.count * matrix_bytes(experts.gate_up); }
inline size_t memory_bytes(const Experts& experts) { return down_at(experts) + experts.count * matrix_bytes(experts.down); }

// Moves the weights that each group of threads reads to the NUMA node of the group.
void place(const Experts& experts, const uint8_t* memory);

// Computes M rows, on the threads of the current arena. The destination has the shape of the source. The result of a
// row does not depend on the other rows.
void run(const Kernels& kernels, const Experts& experts, const uint8_t* memory, size_t M, FloatData src, FloatData dst);

}  // namespace ovfleet::experts
