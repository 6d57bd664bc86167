// The interface of the projection kernels, which multiply a source by a matrix of quantized weights.
//
// The source has M rows of K columns, the weights have N rows of K columns, and the destination has M rows of N columns (N / 2
// with a gated epilogue). Each row of the source belongs to a token or, in an image encoder, to a patch.
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
// quantized to 15 bits. Some instruction sets multiply each of these quants as one number, and others as two 8-bit terms: the
// quant is `(first << TERM_BITS) + second`, and the second term is from -64 to 63.
constexpr int TERM_BITS = 7;
constexpr size_t TERMS_MAX = 2;
// An element of the source is an outlier if its magnitude is more than this factor times the root mean square of its row. A row
// of K columns has at most `K / OUTLIER_RATIO^2` outliers.
constexpr size_t OUTLIER_RATIO = 4;
// The number of columns of the destination that are computed together. The weights are packed in blocks of this size.
constexpr size_t N_BLOCK = 32;

// The operation that is fused after a multiplication. Compiled models contain these values.
enum class Epilogue : int64_t {
    none,
    // Adds the residual.
    residual,
    // Applies x * sigmoid(x) to the first half of the columns and multiplies the result by the second half, so the destination
    // has half as many columns.
    swiglu,
    // SwiGLU with clamped elements, as in gpt-oss: applies x * sigmoid(alpha * x) to the first half and multiplies the result
    // by 1 plus the second half. Before that, the elements of the first half are clamped to at most the limit, and those of the
    // second half to the range from -limit to limit.
    clamped_swiglu,
    // GELU with erf, GELU with tanh, x * sigmoid(x), and x * sigmoid(QUICK_GELU_ALPHA * x). The destination must be f32, except
    // that the AMX kernels can also store bf16.
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

// A LoRA adapter, which adds `up * (down * src)` to the product, in the rows of its tokens.
struct LoraAdapter {
    // The number that identifies the adapter.
    int64_t number;
    // The total rank of the adapter's parts, rounded up to a multiple of `RANK_BLOCK`.
    uint64_t ranks;
    // Byte offsets from the first adapter. At `down` is a matrix `[ranks][K]` of f32, whose columns have been multiplied by the
    // factors of the norm, if any. At `up_blocks` are two `UpBlock`s for each block of columns, which contain the offsets of
    // the `up` matrices.
    uint64_t down, up_blocks;
};

// The ranks from `first` to `last`, which apply to one half of a block of columns, and the byte offset of their `up` matrix
// `[last - first][N_BLOCK / 2]` of f32.
struct UpBlock {
    uint64_t first, last, up;
};

// The largest number of ranks that are computed at a time. The ranks of an adapter are padded to a multiple of this number.
constexpr size_t RANK_BLOCK = 4;

// The number of bits in an MXFP4 quant. A quant is twice the number that it represents, plus 12. In memory, it is stored as a
// 4-bit E2M1 code.
constexpr size_t E2M1_BITS = 5;
constexpr float E2M1_ZERO = 12;
static inline uint8_t quant_of_e2m1(size_t code) {
    constexpr uint8_t quants[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return quants[code & 15];
}

// The number of bits in which quants of Q6_K, Q5_K, Q5_0, Q5_1 and Q3_K are stored.
constexpr size_t SIX_BITS = 6;
// Quants of 6 bits in groups of 16 are those of Q6_K and Q3_K, whose zero point is always `SUPER_ZERO`. The scale of a group is
// the product of its quantized scale (an integer from -128 to 127) and an f16 super-scale that `SUPER_BLOCK` consecutive
// weights of a row share.
constexpr float SUPER_ZERO = 32;
constexpr size_t SUPER_BLOCK = 256, SUPER_GROUP = 16;
// The number of weights in a wide group. Most 4-bit and 8-bit weights that NNCF produces have groups whose size is a multiple
// of this number, or one scale for each row.
constexpr size_t WIDE_GROUP = 128;

// The number of bits that a quant occupies in memory.
static constexpr size_t stored_bits(size_t bits) { return bits == E2M1_BITS ? 4 : bits; }

// A matrix `[N][K]` of weights, with an epilogue. Each weight is `(quant - zero) * scale * scale_factor`. `group` consecutive
// weights of a row share a zero point and a scale.
//
// In memory, the matrix consists of blocks, each for 32 columns of the destination. The last block is padded with zeros. With a
// gated epilogue, a block has 16 columns of the first half, and then the columns of the second half by which they are
// multiplied. For each group, a block has 32 scales and 32 zero points in f16, and then the quants: four consecutive weights of
// each of the 32 columns, then the next four of each column, and so on. Quants of 4 bits share bytes: the first four weights
// are in the low halves, and the next four in the high halves. Quants of 5 bits are stored as 4-bit E2M1 codes, which share
// bytes in the same way.
//
// With quants of 6 bits, 16 consecutive weights of a column are stored in three groups of four bytes. The low six bits of these
// bytes are the first twelve quants. The high two bits of the bytes are the last four quants: the first four bytes contain the
// lowest two bits of each of these quants, the next four bytes the middle two, and the last four bytes the highest two.
//
// With super-scales, the scales are exactly those in the model's file, and zero points are not stored. A block begins with 32
// super-scales for every 256 weights of a row. The groups follow in pairs: 32 quantized scales for each of the two groups, and
// then the quants of each group. This order makes the quants of each group begin at a cache line.
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
    // The number of terms of the source. Kernels that compute in bf16 ignore it.
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
// The size in bytes of the super-scales of a block of columns with K weights each.
static constexpr size_t super_scale_bytes(size_t K) { return K / SUPER_BLOCK * N_BLOCK * sizeof(uint16_t); }
static inline size_t n_block_bytes(const Matmul& matmul) {
    return (has_super_scales(matmul) ? super_scale_bytes(matmul.K) : 0) + num_groups(matmul) * group_bytes(matmul);
}

// The size in bytes of 16 quants of 6 bits for each column of a block.
constexpr size_t SIX_BIT_BYTES = N_BLOCK * 16 * SIX_BITS / 8;
// The byte offsets of a group's quantized scales and of its quants from the end of the super-scales.
constexpr size_t SUPER_PAIR_BYTES = 2 * (N_BLOCK + SIX_BIT_BYTES);
static constexpr size_t quantized_scales_at(size_t group) { return group / 2 * SUPER_PAIR_BYTES + group % 2 * N_BLOCK; }
static constexpr size_t super_quants_at(size_t group) {
    return group / 2 * SUPER_PAIR_BYTES + 2 * N_BLOCK + group % 2 * SIX_BIT_BYTES;
}

// The largest supported numbers of columns and rows of a matrix.
constexpr size_t K_MAX = 1 << 24, N_MAX = 1 << 28;

// Returns the reason why the kernels do not support a matrix, or null if they do. The attributes of an operation in a graph are
// checked with this function before any of them is used as a size or a divisor.
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

// Returns the object at a byte offset from the first adapter.
template <typename T>
static inline const T* behind_adapters(const Matmul& matmul, uint64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(matmul.adapters) + bytes);
}

// The adapter of a row, or null if the row has none, and the product `down * src` of the row.
struct LoraDown {
    const LoraAdapter* adapter;
    const float* values;
};

// The source in the format of the kernels that read it: tiles of `m_tile` rows. The last tile is padded.
struct PackedSrc {
    size_t M, m_tile;
    // The packed rows, which take `Kernels::src_bytes` bytes.
    uint8_t* data;
    // A `LoraDown` for each row, including the padding rows, or null if no row has an adapter.
    const LoraDown* lora;
};

// The outliers of each tile. `columns` contains, in ascending order, the columns in which at least one row of the tile has an
// outlier. `counts` contains the number of these columns, and `values` the values of all rows of the tile in these columns. A
// tile has memory for `outliers_per_row_max` columns for each of its rows. Each value is multiplied by the scale factor of the
// weights, and is 0 where the row has no outlier.
struct Outliers {
    uint32_t *counts, *columns;
    float* values;
};

// The source of the integer kernels, in tiles of rows whose sums fit into registers. The last tile is padded with zeros.
// `quants` contains, for each tile and group of 32 columns, the quants of the rows, either as 8-bit terms (the first terms of
// all rows, then their second terms) or as 16-bit numbers. The quants of outliers are 0. `scales` contains, for each tile and
// group of 32 columns, the scale of each row, multiplied by the scale factor of the weights. `sums` contains, for each tile and
// group of weights, the sum of the quants of each row. For wide groups, each quant in this sum is multiplied by the scale of
// its group of 32 columns.
struct QuantizedSrc {
    size_t M, m_tile;
    int8_t* quants;
    float *scales, *sums;
    Outliers outliers;
    // A `LoraDown` for each row, including the padding rows, or null if no row has an adapter.
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

// The columns of the source from `begin` to `end`, the block of weights by which they are multiplied, and, for prefetching, the
// block by which the same thread will probably multiply them next.
struct KPart {
    size_t begin, end, block, next_block;
};

// How the work of the kernels is divided.
struct Division {
    // Returns the number of rows per tile for a source with M rows.
    size_t (*rows_per_tile)(size_t M);
    // The number of rows that are packed at a time. A tile consists of parts of this size, the last of which may be smaller.
    size_t packed_rows;
    // With at least this number of rows per thread, each thread multiplies a part of the rows by all weights of its group of
    // threads. With fewer rows, each thread multiplies all rows by a part of these weights.
    size_t rows_per_owner;
    // The part of the source that remains in the cache of a processor while blocks of weights are read: as many tiles as fit
    // into `cached_elements` elements, but at least `cached_tiles_min` tiles.
    size_t cached_elements, cached_tiles_min;
};

// The kernels of one instruction set.
struct Kernels {
    Division division;
    // Returns the size of the packed source in bytes; `rows` includes the padding.
    size_t (*src_bytes)(const Matmul& matmul, size_t rows);
    // Packs a part of a tile.
    void (*pack_src)(const Matmul& matmul, FloatData src, size_t tile, size_t part, const PackedSrc& to);
    // Computes a part of the destination. `residual` has the shape and the type of the destination.
    void (*multiply)(const Matmul& matmul, const PackedSrc& src, const DstRange& range, FloatData residual, FloatData dst);
    // For a source with a single row: multiplies a part of its columns by a block of the weights, and adds the products to
    // `N_BLOCK` sums, which are 0 before the first part. Computing all parts in order produces the same bits as computing all
    // columns at once. Null if the kernels can only multiply all columns at once.
    void (*multiply_k_part)(const Matmul& matmul, const PackedSrc& src, const KPart& part, float* sums);
    // Applies the adapters and the epilogue to the row's sums for a block, as `multiply` does after it has added the products,
    // and writes the destination.
    void (*finish)(const Matmul& matmul, const PackedSrc& src, size_t block, const float* sums, FloatData residual,
                   FloatData dst);
    // Multiplies the rows of the source that use an adapter by the adapter's ranks from `first` to `last`. Both limits are
    // multiples of `RANK_BLOCK`.
    void (*lora_down)(const Matmul& matmul, FloatData src, const AdapterRows& rows, size_t first, size_t last);
};

// Returns the kernels for an instruction set, or null if they do not exist or this processor lacks the instruction set.
const Kernels* projection_kernels(Isa isa);
// For tests: returns AMX kernels in which a C++ model replaces the tile registers, with the vector code of an instruction set.
// Returns null if they are not compiled for this instruction set or this processor lacks it.
const Kernels* tile_model_kernels(Isa vectors);
extern const Kernels kernels_portable, kernels_tile_model_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx_vnni, kernels_avx512_vnni, kernels_amx, kernels_tile_model_avx512;
#endif

}  // namespace ovfleet::projection
