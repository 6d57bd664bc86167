// Multiplication of rows by a matrix of integer weights: what is asked, and the kernels that compute it.
//
// Nothing here knows OpenVINO. `kernels.cpp` is compiled once for each instruction set, so every function in this header is
// `static`: were it merely `inline`, the linker could keep the body that was compiled for AVX-512 and call it on a processor
// without AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ovfleet::projection {

// Numbers of a row that are rounded to 8 bits by one scale.
constexpr size_t ROUNDED = 32;
// Outputs of a panel.
constexpr size_t PANEL = 32;

// What becomes of a product.
enum class Then : int64_t {
    nothing,
    // An output is added to what is there.
    added,
    // The first half of the outputs, through x * sigmoid(x), multiplies the second: half as many outputs.
    gated,
};

// What an adapter adds to a product: up * (down * row), for the rows of its tokens.
struct Adapter {
    // By which tokens name it.
    int64_t number;
    // A multiple of `RANKS`.
    uint64_t ranks;
    // Where its matrices are, in bytes behind the first adapter: `down`, `[ranks][inputs]` of f32, in which the norm is, and for
    // each panel two of `Half`, which say where `up` is.
    uint64_t down, halves;
};

// The ranks that half of a panel's outputs are changed by, and where: `[last - first][PANEL / 2]` of f32.
struct Half {
    uint64_t first, last, up;
};

// Ranks that are computed at a time.
constexpr size_t RANKS = 4;

// A matrix `[outputs][inputs]` of weights (quant - zero) * scale * factor, where `group` inputs share a zero and a scale.
//
// In memory it is panels of 32 outputs, the last of them filled up with zeros. A panel of a gated matrix has 16 outputs of the
// first half and then those of the second that they multiply. For each group a panel has 32 scales and 32 zeros in f16,
// and then the quants: by fours of inputs, 16 outputs at a time, the four numbers of each output after each other. Where
// quants have 4 bits, two fours share their bytes, the first in the low halves.
struct Matrix {
    // Multiples of 32, and of nothing.
    size_t inputs, outputs;
    // 4 or 8.
    size_t bits;
    // 16 or 32.
    size_t group;
    // A power of two, by which the scales are where f16 is exact.
    float factor;
    Then then;
    // If it has any: rows are divided by their root mean square, and multiplied by these.
    const float* norm;
    float epsilon;
    // How many change it, and where they are.
    size_t adapter_count;
    const uint8_t* panels;
    const Adapter* adapters;
};

static inline size_t groups(const Matrix& matrix) { return matrix.inputs / matrix.group; }
static inline size_t results(const Matrix& matrix) { return matrix.then == Then::gated ? matrix.outputs / 2 : matrix.outputs; }
static inline size_t panels(const Matrix& matrix) { return (matrix.outputs + PANEL - 1) / PANEL; }
static inline size_t group_bytes(const Matrix& matrix) {
    return PANEL * 2 * sizeof(uint16_t) + PANEL * matrix.group * matrix.bits / 8;
}
static inline size_t panel_bytes(const Matrix& matrix) { return groups(matrix) * group_bytes(matrix); }

// Most inputs and most outputs of a matrix.
constexpr size_t INPUTS_MAX = 1 << 24, OUTPUTS_MAX = 1 << 28;

// What makes a matrix one that the kernels cannot multiply by; null if they can. Attributes of a graph are checked with this
// before any of them sizes memory or divides.
static inline const char* unsupported(const Matrix& matrix) {
    if (matrix.inputs == 0 || matrix.inputs > INPUTS_MAX || matrix.inputs % ROUNDED != 0)
        return "the number of inputs must be a multiple of 32, up to 2^24";
    if (matrix.outputs == 0 || matrix.outputs > OUTPUTS_MAX) return "the number of outputs must be from 1 to 2^28";
    if (matrix.bits != 4 && matrix.bits != 8) return "weights must have 4 or 8 bits";
    if (matrix.group != 16 && matrix.group != 32) return "groups must have 16 or 32 weights";
    if (matrix.then < Then::nothing || matrix.then > Then::gated) return "the epilogue is unknown";
    if (matrix.then == Then::gated && matrix.outputs % 2 != 0) return "a gated matrix must have an even number of outputs";
    if (!(matrix.factor > 0) || matrix.factor > 1e38f) return "the factor must be a positive, finite number";
    if (!(matrix.epsilon >= 0) || matrix.epsilon > 1e38f) return "the epsilon must be a finite number, at least 0";
    return nullptr;
}

// What is in memory so many bytes behind a matrix's adapters.
template <typename T>
static inline const T* behind_adapters(const Matrix& matrix, uint64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(matrix.adapters) + bytes);
}

// The adapter of a row, if it has any, and what `down` makes of the row.
struct Lowered {
    const Adapter* adapter;
    const float* low;
};

// Rows as they are multiplied, in tiles of `per_tile` that registers hold the sums of; what the last has too many is zeros. For
// each tile, by 32 inputs: the rows' integers, and what each is to be multiplied by (the matrix's factor is in it). And by
// groups the sums of the rows' integers.
struct Rows {
    size_t count, per_tile;
    int8_t* quants;
    float *scales, *sums;
    // Of each row, also of those that are not there; null if no row has an adapter.
    const Lowered* lowered;
};

// Rows of one adapter, by their numbers, and where its ranks of each go: `[count][ranks]`.
struct Owned {
    const Adapter* adapter;
    const uint32_t* rows;
    size_t count;
    float* low;
};

// Most rows of a tile.
constexpr size_t TILE_ROWS = 6;

static inline size_t tiles(const Rows& rows) { return (rows.count + rows.per_tile - 1) / rows.per_tile; }

// Numbers in memory, f32 or bf16.
struct Numbers {
    void* data;
    bool is_bf16;
};

struct Kernels {
    // Rounds the rows of a tile to 8 bits.
    void (*round)(const Matrix& matrix, Numbers from, size_t tile, const Rows& to);
    // Multiplies tiles `begin` to `end` by panels `first` to `last`, and writes their outputs: `[row][result]`. `base` is what
    // is added to, of the same shape; `after` is the panel that the same thread is likely to need next.
    void (*multiply)(const Matrix& matrix, const Rows& rows, size_t begin, size_t end, size_t first, size_t last,
                     size_t after, Numbers base, Numbers to);
    // Multiplies rows by the ranks `first` to `last`, multiples of `RANKS`, of their adapter.
    void (*lower)(const Matrix& matrix, Numbers from, const Owned& owned, size_t first, size_t last);
};

// The best for the processor this runs on; null if it has none of these instruction sets.
const Kernels* kernels();
// Those for an instruction set, from the plainest to the best; null if this processor does not have it.
constexpr size_t KERNEL_SETS = 4;
const Kernels* kernels_of(size_t set);
extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx_vnni, kernels_avx512_vnni;
#endif

}  // namespace ovfleet::projection
