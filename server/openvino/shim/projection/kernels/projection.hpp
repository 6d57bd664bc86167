// The interface of the projection kernels: multiplication of a source by a matrix of integer weights.
//
// The source has M rows of K columns, the weights have N rows of K columns, and the destination has M rows of N columns, or of
// N / 2 columns with SwiGLU. Each row of the source belongs to a token.
//
// This header does not use OpenVINO. The kernels are compiled once for each instruction set, so every function in this header
// is `static`: the linker could otherwise keep the body of an `inline` function that was compiled for AVX-512, and a processor
// without AVX-512 would then run it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../isa.hpp"

namespace ovfleet::projection {

// The number of consecutive elements of a row of the source that are quantized with one scale.
constexpr size_t SRC_GROUP = 32;
// With one term, the elements of the source are quantized to 8 bits, except for outliers. With two terms, all elements are
// quantized to 15 bits. Some instruction sets multiply these quants as one number, and others as two 8-bit terms: the quant is
// `(first << TERM_BITS) + second`, and the second term is from -64 to 63.
constexpr int TERM_BITS = 7;
constexpr size_t TERMS_MAX = 2;
// An element of the source is an outlier if its magnitude exceeds the root mean square of its row multiplied by this
// factor. A row of K columns has at most `K / OUTLIER_RATIO^2` outliers.
constexpr size_t OUTLIER_RATIO = 4;
// The number of columns of the destination that are computed together. The weights are packed in blocks of this size.
constexpr size_t N_BLOCK = 32;

// The operation that is fused after a multiplication. Compiled models contain these values.
enum class Epilogue : int64_t {
    none,
    // Adds the residual.
    residual,
    // Multiplies x * sigmoid(x) of the first half of the columns by the second half: the destination has half as many columns.
    swiglu,
    // SwiGLU with clamped elements, as in gpt-oss: x * sigmoid(alpha * x) of the first half, times 1 plus the second half.
    // Before that, the elements of the first half are clamped to at most the limit, and those of the second half to at most
    // the limit in magnitude.
    clamped_swiglu,
    // GELU with erf, GELU with tanh, x * sigmoid(x), and x * sigmoid(QUICK_GELU_ALPHA * x). The destination must be f32,
    // except that AMX kernels also store bf16.
    gelu,
    gelu_tanh,
    silu,
    quick_gelu,
};
constexpr float CLAMPED_SWIGLU_LIMIT = 7.0f, CLAMPED_SWIGLU_ALPHA = 1.702f, QUICK_GELU_ALPHA = 1.702f;

// Whether an epilogue multiplies the first half of the columns by the second half.
static inline bool is_gated(Epilogue epilogue) { return epilogue == Epilogue::swiglu || epilogue == Epilogue::clamped_swiglu; }

// Whether an epilogue applies a function to each element.
static inline bool is_activation(Epilogue epilogue) { return epilogue >= Epilogue::gelu; }

// An adapter, which adds up * (down * src) to the product for the rows of its tokens.
struct LoraAdapter {
    // The number by which tokens refer to the adapter.
    int64_t number;
    // The total rank of the adapter's parts, rounded up to a multiple of `RANK_BLOCK`.
    uint64_t ranks;
    // The positions of the adapter's matrices, in bytes from the first adapter: `down` is `[ranks][K]` of f32, multiplied by
    // the norm; `up_blocks` are two `UpBlock` for each block of columns, which contain the position of `up`.
    uint64_t down, up_blocks;
};

// The ranks that change one half of a block of columns, and the position of their matrix `[last - first][N_BLOCK / 2]` of f32.
struct UpBlock {
    uint64_t first, last, up;
};

// The number of ranks that are computed at a time.
constexpr size_t RANK_BLOCK = 4;

// The number of bits of the quants of MXFP4. A quant is twice the number that it represents, plus 12. In memory, it is a code
// in E2M1, which has 4 bits.
constexpr size_t E2M1_BITS = 5;
constexpr float E2M1_ZERO = 12;
static inline uint8_t quant_of_e2m1(size_t code) {
    constexpr uint8_t quants[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return quants[code & 15];
}

// The number of bits of the quants of Q6_K, Q5_K, Q5_0, Q5_1 and Q3_K.
constexpr size_t SIX_BITS = 6;
// Quants of 6 bits in groups of 16 are those of Q6_K and Q3_K, whose zero point is always `SUPER_ZERO`. The scale of a group
// is the product of its quantized scale, an integer from -128 to 127, and a super-scale in f16, which `SUPER_BLOCK`
// consecutive weights of a row share.
constexpr float SUPER_ZERO = 32;
constexpr size_t SUPER_BLOCK = 256, SUPER_GROUP = 16;
// The size of wide groups of weights. Most weights of 4 and 8 bits that NNCF compresses have groups whose size is a
// multiple of this size, or one scale for each row.
constexpr size_t WIDE_GROUP = 128;

// The number of bits that a quant occupies in memory.
static constexpr size_t stored_bits(size_t bits) { return bits == E2M1_BITS ? 4 : bits; }

// A matrix `[N][K]` of weights (quant - zero) * scale * scale_factor with an epilogue. `group` consecutive weights of a row
// share a zero point and a scale.
//
// In memory, the matrix consists of blocks of 32 columns of the destination, the last of which is padded with zeros. With
// SwiGLU, a block has 16 columns of the first half, and then the columns of the second half by which they are multiplied. For
// each group, a block has 32 scales and 32 zero points in f16, and then the quants: four consecutive weights of each of 16
// columns, then those of the other 16 columns, and so on. Quants of 4 bits share bytes: the first four weights are in the low
// halves, and the next four in the high halves. Quants of 5 bits share bytes in the same way: memory contains their codes in
// E2M1.
//
// Quants of 6 bits are stored as 16 consecutive weights of a column in three groups of four bytes. The low six bits of these
// bytes are the first twelve quants. Their high two bits are the last four quants: the first four bytes contain the lowest two
// bits of each of them, the next four bytes the middle two, and the last four bytes the highest two.
//
// With super-scales, scales are exactly those of the file, and zero points are not stored. A block begins with 32 super-scales
// for each 256 weights. They are followed by two groups at a time, so that the quants of each group begin at a cache line: 32
// quantized scales of each group, and then the quants of each group.
struct Matmul {
    // The numbers of columns and rows. K is a multiple of 32.
    size_t K, N;
    // The number of bits of a quant: 4, 8, `E2M1_BITS`, or `SIX_BITS`.
    size_t bits;
    // The number of weights in a group: 16, 32 or `WIDE_GROUP`.
    size_t group;
    // Whether all groups of a row of the weights have the same scale, and the same zero point, which is an integer in the range
    // of the quants. Kernels may then multiply the differences of quants and zero points, and apply the scales to the sums.
    bool per_channel;
    // The number of terms of the source. Kernels in bf16 ignore it.
    size_t terms;
    // A power of two that moves the scales into the range in which f16 has its full precision; 1 with super-scales.
    float scale_factor;
    Epilogue epilogue;
    // If the norm is not null, the rows of the source are divided by their root mean square and multiplied by these factors.
    const float* norm;
    float epsilon;
    size_t adapter_count;
    // The bias, which is added before the epilogue: `[N_BLOCK]` for each block, in the order of its columns. Null without a
    // bias.
    const float* bias;
    // The blocks of columns.
    const uint8_t* weights;
    const LoraAdapter* adapters;
};

static inline bool has_wide_groups(const Matmul& matmul) { return matmul.group == WIDE_GROUP; }
static inline size_t num_groups(const Matmul& matmul) { return matmul.K / matmul.group; }
// The number of columns of the destination.
static inline size_t dst_columns(const Matmul& matmul) { return is_gated(matmul.epilogue) ? matmul.N / 2 : matmul.N; }
static inline size_t outliers_per_row_max(const Matmul& matmul) {
    return matmul.terms == 1 ? matmul.K / (OUTLIER_RATIO * OUTLIER_RATIO) : 0;
}
static inline size_t num_n_blocks(const Matmul& matmul) { return (matmul.N + N_BLOCK - 1) / N_BLOCK; }
static inline bool has_super_scales(const Matmul& matmul) { return matmul.bits == SIX_BITS && matmul.group == SUPER_GROUP; }
static inline size_t group_bytes(const Matmul& matmul) {
    const size_t scale_bytes = has_super_scales(matmul) ? sizeof(int8_t) : 2 * sizeof(uint16_t);
    return N_BLOCK * scale_bytes + N_BLOCK * matmul.group * stored_bits(matmul.bits) / 8;
}
// The size of the super-scales of a block of columns with K weights each.
static constexpr size_t super_scale_bytes(size_t K) { return K / SUPER_BLOCK * N_BLOCK * sizeof(uint16_t); }
static inline size_t n_block_bytes(const Matmul& matmul) {
    return (has_super_scales(matmul) ? super_scale_bytes(matmul.K) : 0) + num_groups(matmul) * group_bytes(matmul);
}

// The size of a block of columns with 16 quants of 6 bits each.
constexpr size_t SIX_BIT_BYTES = N_BLOCK * 16 * SIX_BITS / 8;
// The positions of the quantized scales and of the quants of a group, relative to the end of the super-scales.
constexpr size_t SUPER_PAIR_BYTES = 2 * (N_BLOCK + SIX_BIT_BYTES);
static constexpr size_t quantized_scales_at(size_t group) { return group / 2 * SUPER_PAIR_BYTES + group % 2 * N_BLOCK; }
static constexpr size_t super_quants_at(size_t group) {
    return group / 2 * SUPER_PAIR_BYTES + 2 * N_BLOCK + group % 2 * SIX_BIT_BYTES;
}

// The largest sizes of a matrix.
constexpr size_t K_MAX = 1 << 24, N_MAX = 1 << 28;

// Returns the reason why the kernels do not support a matrix, or null if they do. The attributes of a graph are checked
// with this function before any of them is used as a size or a divisor.
static inline const char* unsupported(const Matmul& matmul) {
    if (matmul.K == 0 || matmul.K > K_MAX || matmul.K % SRC_GROUP != 0) return "K must be a multiple of 32, up to 2^24";
    if (matmul.N == 0 || matmul.N > N_MAX) return "N must be from 1 to 2^28";
    if (matmul.bits != 4 && matmul.bits != E2M1_BITS && matmul.bits != SIX_BITS && matmul.bits != 8)
        return "weights must have 4, 5, 6 or 8 bits";
    if (matmul.group != 16 && matmul.group != 32 && !has_wide_groups(matmul)) return "groups must have 16, 32 or 128 weights";
    if (matmul.per_channel && ((matmul.bits != 4 && matmul.bits != 8) || matmul.group == 16))
        return "weights with per-channel scales must have 4 or 8 bits, in groups of 32 or 128";
    if (has_wide_groups(matmul) && (matmul.K % WIDE_GROUP != 0 || (matmul.bits != 4 && matmul.bits != 8)))
        return "with wide groups, K must be a multiple of 128, and weights must have 4 or 8 bits";
    if (matmul.bits == E2M1_BITS && matmul.group != 32) return "groups of weights in E2M1 must have 32 weights";
    if (has_super_scales(matmul) && matmul.K % SUPER_BLOCK != 0) return "with super-scales, K must be a multiple of 256";
    if (matmul.terms < 1 || matmul.terms > TERMS_MAX) return "the source must have 1 or 2 terms";
    if (matmul.epilogue < Epilogue::none || matmul.epilogue > Epilogue::quick_gelu) return "the epilogue is unknown";
    if (is_gated(matmul.epilogue) && matmul.N % 2 != 0) return "with SwiGLU, N must be even";
    if (!(matmul.scale_factor > 0) || matmul.scale_factor > 1e38f) return "the scale factor must be a positive, finite number";
    if (!(matmul.epsilon >= 0) || matmul.epsilon > 1e38f) return "the epsilon must be a finite number, at least 0";
    return nullptr;
}

// The object at a position relative to the first adapter.
template <typename T>
static inline const T* behind_adapters(const Matmul& matmul, uint64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(matmul.adapters) + bytes);
}

// The adapter of a row, or null, and the product down * src for the row.
struct LoraDown {
    const LoraAdapter* adapter;
    const float* values;
};

// The source in the format of the kernels that read it: tiles of `m_tile` rows, the last of which is padded.
struct PackedSrc {
    size_t M, m_tile;
    // The packed rows, which take `Kernels::src_bytes` bytes.
    uint8_t* data;
    // The products of adapters for each row, including the padding, or null if no row has an adapter.
    const LoraDown* lora;
};

// The columns of each tile in which one of its rows has an outlier, in ascending order. For each tile: the number of these
// columns, memory for `outliers_per_row_max` columns for each row, and memory for the values of the rows in these
// columns. Each value is multiplied by the scale factor of the weights, and is 0 where the row has no outlier.
struct Outliers {
    uint32_t *counts, *columns;
    float* values;
};

// The source of the integer kernels, in tiles of rows whose sums fit into registers. The last tile is padded with zeros.
// `quants` contains, for each tile and group of 32 columns, the quants of the rows: the first terms of all rows and then their
// second terms, or 16-bit numbers. The quants of outliers are 0. `scales` contains, for each tile and group of 32 columns, the
// scale of each row, multiplied by the scale factor of the weights. `sums` contains, for each tile and group of weights, the
// sum of the quants of each row. For wide groups, each quant is multiplied by its scale before it is added.
struct QuantizedSrc {
    size_t M, m_tile;
    int8_t* quants;
    float *scales, *sums;
    Outliers outliers;
    // The products of adapters for each row, including the padding, or null if no row has an adapter.
    const LoraDown* lora;
};

// The indices of the rows of one adapter, and the memory for `[count][ranks]` results.
struct AdapterRows {
    const LoraAdapter* adapter;
    const uint32_t* rows;
    size_t count;
    float* down;
};

static inline size_t num_tiles(const PackedSrc& src) { return (src.M + src.m_tile - 1) / src.m_tile; }

// Floating-point numbers in memory: f32 or bf16.
struct FloatData {
    void* data;
    bool is_bf16;
};

// A part of the destination: tiles of rows and blocks of columns.
struct DstRange {
    size_t tile_begin, tile_end, block_begin, block_end;
    // The block that the same thread will probably compute next, for prefetching.
    size_t next_block;
};

// The columns of the source from `begin` to `end`, which are multiplied by a block of the weights; and the block by
// which the same thread will probably multiply these columns next, for prefetching.
struct KPart {
    size_t begin, end, block, next_block;
};

// How the work of the kernels is divided.
struct Division {
    // The number of rows of a tile, for M rows.
    size_t (*rows_per_tile)(size_t M);
    // The number of rows that are packed at a time. A tile consists of parts of this size, the last of which may be smaller.
    size_t packed_rows;
    // From this number of rows per thread on, each thread multiplies a part of the rows by all weights. With fewer rows, each
    // thread multiplies all rows by a part of the weights.
    size_t rows_per_owner;
    // The part of the source that remains in the cache of a processor while blocks of weights are read: a number of
    // elements, and a minimum number of tiles.
    size_t cached_elements, cached_tiles_min;
};

// The kernels of one instruction set.
struct Kernels {
    Division division;
    // Returns the size of the packed source in bytes; `rows` includes the padding.
    size_t (*src_bytes)(const Matmul& matmul, size_t rows);
    // Packs a part of a tile.
    void (*pack_src)(const Matmul& matmul, FloatData src, size_t tile, size_t part, const PackedSrc& to);
    // Computes a part of the destination. `residual` has the shape of the destination.
    void (*multiply)(const Matmul& matmul, const PackedSrc& src, const DstRange& range, FloatData residual, FloatData dst);
    // Adds the products of the only row and a part of a block to `N_BLOCK` sums, which are 0 before the first part. Computing
    // all parts in order produces the same bits as computing all columns at once. Null if the kernels can only multiply all
    // columns.
    void (*multiply_k_part)(const Matmul& matmul, const PackedSrc& src, const KPart& part, float* sums);
    // Applies the adapters and the epilogue to the sums of the row and a block, as `multiply` does after it has added the
    // products, and writes the destination.
    void (*finish)(const Matmul& matmul, const PackedSrc& src, size_t block, const float* sums, FloatData residual,
                   FloatData dst);
    // Multiplies rows by the ranks of their adapter from `first` to `last`, which are multiples of `RANK_BLOCK`.
    void (*lora_down)(const Matmul& matmul, FloatData src, const AdapterRows& rows, size_t first, size_t last);
};

// Returns the kernels for an instruction set, or null if they do not exist or this processor lacks the instruction set.
const Kernels* projection_kernels(Isa isa);
// For tests: the AMX kernels on the C++ model of the tiles, whose vector code is compiled for an instruction set. Null if they
// are not compiled for this instruction set, or this processor lacks it.
const Kernels* tile_model_kernels(Isa vectors);
extern const Kernels kernels_portable, kernels_tile_model_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx_vnni, kernels_avx512_vnni, kernels_amx, kernels_tile_model_avx512;
#endif

}  // namespace ovfleet::projection
