// The projection kernels for instruction sets other than AMX. This file is compiled once for each of these instruction sets,
// and `OVFLEET_KERNELS` is the name of the table of functions.
//
// Products of integers are summed exactly over 16 or 32 weights. These sums are then scaled and added in f32, in the order of
// the columns, so the result of a row does not depend on the other rows of the step. Each group of 32 numbers of a row is
// quantized with a scale that is derived from the largest magnitude in the group. The quants have 8 bits, as in llama.cpp's
// Q8_0, or 15 bits, which are multiplied as one number or as two 8-bit terms. With 8 bits, outliers are multiplied in f32, so
// that they do not determine the scale of the other numbers. LLM.int8() (Dettmers et al., 2022,
// https://arxiv.org/abs/2208.07339) also multiplies outliers separately, but in f16.
//
// This file uses no functions of the standard library except memcpy and memset. Otherwise, the linker could keep the copies of
// inline functions that are compiled here, and a processor without this instruction set would then run them.
#include "../../vectors.hpp"
#include "dot.hpp"
#include "e2m1.hpp"
#include "epilogue.hpp"
#include "lora.hpp"
#include "norm.hpp"
#include "prefetch.hpp"
#include "projection.hpp"
#include "six_bits.hpp"

namespace {

using namespace ovfleet::projection;

// The size in bytes of four weights that occupy 8 bits each, or of eight weights that occupy 4 bits each, in each of 16
// columns.
constexpr size_t FOUR_BYTES = 64;
template <size_t BITS>
constexpr size_t FOURS_PER_LOAD = 8 / stored_bits(BITS);
template <size_t BITS, size_t GROUP>
constexpr size_t GROUP_BYTES = N_BLOCK * 2 * sizeof(f16) + N_BLOCK * GROUP * stored_bits(BITS) / 8;

// The size in bytes of a quant of the source or, if quants are divided into terms, of one term.
constexpr size_t quant_bytes(size_t bits, size_t terms) { return has_pairs(bits, terms) ? sizeof(int16_t) : sizeof(int8_t); }
// The size in bytes of the quants of one row in a group of `SRC_GROUP` columns, including all terms.
constexpr size_t row_bytes(size_t bits, size_t terms) {
    return has_pairs(bits, terms) ? SRC_GROUP * sizeof(int16_t) : SRC_GROUP * terms;
}
inline size_t row_bytes(const Matmul& matmul) { return row_bytes(matmul.bits, matmul.terms); }

// The outliers of a tile.
struct TileOutliers {
    size_t count;
    const uint32_t* columns;
    const float* values;
};

// A tile of the source.
struct SrcTile {
    const int8_t* quants;
    const float *scales, *sums;
    TileOutliers outliers;
};

inline SrcTile tile_of(const Matmul& matmul, const QuantizedSrc& src, size_t tile) {
    const size_t rows = tile * src.m_tile, outliers = rows * outliers_per_row_max(matmul);
    return {src.quants + rows * (matmul.K / SRC_GROUP) * row_bytes(matmul),
            src.scales + rows * (matmul.K / SRC_GROUP),
            src.sums + rows * num_groups(matmul),
            {src.outliers.counts[tile], src.outliers.columns + outliers, src.outliers.values + outliers * src.m_tile}};
}

// The scales, the zero points and the quants of one group of weights, for a pair of vectors of columns: vector 0 covers `LANES`
// of the first 16 columns of a block, and vector 1 covers `LANES` of the last 16.
template <size_t BITS, size_t GROUP>
struct GroupWeights {
    const f16* halves;
    const uint8_t* quants;
    GroupWeights(const Matmul&, const uint8_t* block, size_t group, size_t pair)
        : halves((const f16*)(block + group * GROUP_BYTES<BITS, GROUP>)+pair * LANES),
          quants((const uint8_t*)(halves + 2 * N_BLOCK) + pair * LANES * 2) {}
    inline Floats scale(size_t v) const { return load(halves + v * (N_BLOCK / 2)); }
    inline Floats zero(size_t v) const { return load(halves + N_BLOCK + v * (N_BLOCK / 2)); }
};

template <>
struct GroupWeights<SIX_BITS, SUPER_GROUP> {
    const uint8_t *super_scales, *scales, *quants;
    __attribute__((always_inline)) GroupWeights(const Matmul& matmul, const uint8_t* block, size_t group, size_t pair)
        : super_scales(block + super_scale_bytes(group * SUPER_GROUP) + pair * LANES * sizeof(f16)) {
        const uint8_t* groups = block + super_scale_bytes(matmul.K);
        scales = groups + quantized_scales_at(group) + pair * LANES;
        quants = groups + super_quants_at(group) + pair * LANES * 4;
    }
    inline Floats scale(size_t v) const {
        return super_scaled(super_scales + v * (N_BLOCK / 2) * sizeof(f16), scales + v * (N_BLOCK / 2));
    }
    inline Floats zero(size_t) const { return broadcast(SUPER_ZERO); }
};

inline Floats as_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Returns the quants `4 * i` to `4 * i + 3` of a group for each column of a vector, as the four bytes of a lane. `quants`
// points to the first four quants of the vector's columns.
template <size_t BITS>
__attribute__((always_inline)) inline Words four_at(const uint8_t* quants, size_t i) {
    if constexpr (BITS == SIX_BITS) {
        return six_bit_four(quants + i / 4 * SIX_BIT_BYTES, i % 4);
    } else if constexpr (BITS == 8) {
        return read<Words>(quants + i * 2 * FOUR_BYTES);
    } else {
        const Words codes = read<Words>(quants + i / 2 * 2 * FOUR_BYTES) >> uint32_t(i % 2 * 4) & 0x0f0f0f0f;
        return BITS == E2M1_BITS ? (Words)quants_of_e2m1((Fours)codes) : codes;
    }
}

// Returns the first and the third (or, if `odd` is 1, the second and the fourth) of the four quants that `four_at` returns, as
// two 16-bit numbers in each lane.
template <size_t BITS>
__attribute__((always_inline)) inline Words pair_at(const uint8_t* quants, size_t i, size_t odd) {
    // Shifting a 16-bit number to the right discards its lowest bits, so quants in its highest bits need no mask.
    typedef uint16_t Pairs __attribute__((vector_size(LANES * 4)));
    if constexpr (BITS == 4) {
        const size_t shift = i % 2 * 4 + odd * 8;
        const Words nibbles = (Words)(read<Pairs>(quants + i / 2 * 2 * FOUR_BYTES) >> uint16_t(shift));
        return shift == 12 ? nibbles : nibbles & 0x000f000f;
    } else {
        const Words four = four_at<BITS>(quants, i);
        return odd ? (Words)((Pairs)four >> uint16_t(8)) : four & 0x00ff00ff;
    }
}

// Adds the products of a group of weights and one term of `R` rows.
template <size_t R, size_t BITS, size_t GROUP>
inline void add_term(const uint8_t* weights, const int8_t* quants, DotSum<BITS> (&sum)[R][2]) {
    constexpr size_t loads = GROUP / 4 / FOURS_PER_LOAD<BITS>;
    for (size_t at = 0; at < loads; ++at) {
        Fours fours[2];
        for (size_t v = 0; v < 2; ++v) fours[v] = read<Fours>(weights + (2 * at + v) * FOUR_BYTES);
        const int8_t* tile_quants = quants + at * FOURS_PER_LOAD<BITS> * 4;
        if (BITS == 8) {
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(fours[v], read<int32_t>(tile_quants + r * SRC_GROUP));
        } else {
            Fours low[2], high[2];
            for (size_t v = 0; v < 2; ++v) {
                low[v] = fours[v] & 15;
                high[v] = (Fours)((Words)fours[v] >> 4) & 15;
                if (BITS == E2M1_BITS) low[v] = quants_of_e2m1(low[v]), high[v] = quants_of_e2m1(high[v]);
            }
            for (size_t r = 0; r < R; ++r) {
                const int8_t* row_quants = tile_quants + r * SRC_GROUP;
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(low[v], read<int32_t>(row_quants));
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(high[v], read<int32_t>(row_quants + 4));
            }
        }
    }
}

// Like `add_term`, but for 6-bit weights and with all terms together, so that the weights are unpacked only once.
template <size_t R, size_t TERMS, size_t GROUP>
inline void add_six_bits(const uint8_t* weights, const int8_t* quants, DotSum<SIX_BITS> (&sum)[R][2]) {
#pragma GCC unroll 2
    for (size_t v = 0; v < 2; ++v) {
        Words fours[GROUP / 4];
        for (size_t i = 0; i < GROUP / 4; ++i) fours[i] = four_at<SIX_BITS>(weights + v * FOUR_BYTES, i);
        for (size_t r = 0; r < R; ++r)
            for (size_t term = 0; term < TERMS; ++term) {
                const int8_t* row = quants + (term * R + r) * SRC_GROUP;
                if constexpr (TERMS == 2)
                    if (term > 0) sum[r][v].begin_term();
                for (size_t i = 0; i < GROUP / 4; i += 2)
                    sum[r][v].add_two((Fours)fours[i], read<int32_t>(row + 4 * i), (Fours)fours[i + 1],
                                      read<int32_t>(row + 4 * i + 4));
            }
    }
}

// Like `add_term`, but for 16-bit quants of the source.
template <size_t R, size_t BITS, size_t GROUP>
inline void add_pairs(const uint8_t* weights, const int8_t* quants, PairSum (&sum)[R][2]) {
    // Without unrolling, the sums would be stored after each iteration.
#pragma GCC unroll 8
    for (size_t i = 0; i < GROUP / 4; ++i)
        for (size_t odd = 0; odd < 2; ++odd) {
            Words pairs[2];
            for (size_t v = 0; v < 2; ++v) pairs[v] = pair_at<BITS>(weights + v * FOUR_BYTES, i, odd);
            const int8_t* row = quants + (i * 2 + odd) * 2 * sizeof(int16_t);
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(pairs[v], read<int32_t>(row + r * SRC_GROUP * sizeof(int16_t)));
        }
}

// Computes the sums of the products of a group of weights and `R` rows.
template <size_t R, size_t TERMS, size_t BITS, size_t GROUP>
inline void multiply_group(const uint8_t* weights, const int8_t* quants, Ints (&total)[R][2]) {
    if constexpr (has_pairs(BITS, TERMS)) {
        PairSum sum[R][2];
        add_pairs<R, BITS, GROUP>(weights, quants, sum);
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v) total[r][v] = sum[r][v].total;
    } else {
        DotSum<BITS> sum[R][2];
        if constexpr (BITS == SIX_BITS) {
            add_six_bits<R, TERMS, GROUP>(weights, quants, sum);
        } else {
            add_term<R, BITS, GROUP>(weights, quants, sum);
            if constexpr (TERMS == 2) {
                for (size_t r = 0; r < R; ++r)
                    for (size_t v = 0; v < 2; ++v) sum[r][v].begin_term();
                // Force the compiler to read the weights again, because the sums need the registers.
                asm("" : "+r"(weights));
                add_term<R, BITS, GROUP>(weights, quants + R * SRC_GROUP, sum);
            }
        }
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v) total[r][v] = sum[r][v].total();
    }
}

// Multiplies the outliers of a tile by their weights, and adds the products to the totals. The products are added after those
// of the quants, in the order of the columns, so that the result of a row does not depend on the other rows.
template <size_t R, size_t BITS, size_t GROUP>
inline void add_outliers(const Matmul& matmul, const uint8_t* block, size_t pair, const TileOutliers& outliers,
                         Floats (&total)[R][2]) {
    for (size_t i = 0; i < outliers.count; ++i) {
        const size_t column = outliers.columns[i];
        const GroupWeights<BITS, GROUP> weights(matmul, block, column / GROUP, pair);
        for (size_t v = 0; v < 2; ++v) {
            const size_t at = column % GROUP;
            const Words quants = four_at<BITS>(weights.quants + v * FOUR_BYTES, at / 4) >> uint32_t(at % 4 * 8) & 255;
            const Floats weight = (as_floats((Ints)quants) - weights.zero(v)) * weights.scale(v);
            for (size_t r = 0; r < R; ++r)
                total[r][v] = fused_multiply_add(weight, Floats{} + outliers.values[i * R + r], total[r][v]);
        }
    }
}

// The number of columns of the source between two prefetches.
template <size_t GROUP>
constexpr size_t PREFETCH_COLUMNS = GROUP < SRC_GROUP ? GROUP : SRC_GROUP;

// The groups within a range of K.
struct GroupRange {
    size_t begin, end;
};

// Computes the products of a wide group of weights and `R` rows, multiplied by the scales of the source.
template <size_t R, size_t TERMS, size_t BITS>
inline void multiply_wide_group(const uint8_t* weights, const int8_t* quants, const float* scales, Prefetch<3>& prefetch,
                                Floats (&total)[R][2]) {
    for (size_t r = 0; r < R; ++r) total[r][0] = total[r][1] = Floats{};
    for (size_t at = 0; at < WIDE_GROUP; at += SRC_GROUP) {
        prefetch.next();
        Ints sum[R][2];
        multiply_group<R, TERMS, BITS, SRC_GROUP>(weights, quants, sum);
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v)
                total[r][v] = fused_multiply_add(as_floats(sum[r][v]), broadcast(scales[r]), total[r][v]);
        weights += N_BLOCK * SRC_GROUP * stored_bits(BITS) / 8;
        quants += R * row_bytes(BITS, TERMS);
        scales += R;
    }
}

// Computes the sums for a tile of `R` rows and a pair of vectors of a block of columns. With `IS_PART`, the function adds the
// products of a part of K to the sums in `total`, and `src` begins at the first column of the part. Outliers are added after
// the last group.
template <size_t R, size_t TERMS, size_t BITS, size_t GROUP, bool IS_PART = false>
inline void multiply_tile(const Matmul& matmul, const uint8_t* block, size_t pair, const SrcTile& src, Prefetch<3>& prefetch,
                          Floats (&total)[R][2], GroupRange part = {}) {
    const int8_t* quants = src.quants;
    const float *scales = src.scales, *sums = src.sums;
    if constexpr (!IS_PART)
        for (size_t r = 0; r < R; ++r) total[r][0] = total[r][1] = Floats{};
    const size_t begin = IS_PART ? part.begin : 0, end = IS_PART ? part.end : num_groups(matmul);
    for (size_t group = begin; group < end; ++group, sums += R) {
        const GroupWeights<BITS, GROUP> weights(matmul, block, group, pair);
        if constexpr (GROUP == WIDE_GROUP) {
            Floats wide[R][2];
            multiply_wide_group<R, TERMS, BITS>(weights.quants, quants, scales, prefetch, wide);
            const Floats scale[2] = {weights.scale(0), weights.scale(1)}, zero[2] = {weights.zero(0), weights.zero(1)};
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < 2; ++v) total[r][v] += (wide[r][v] - zero[v] * sums[r]) * scale[v];
            quants += R * row_bytes(BITS, TERMS) * (WIDE_GROUP / SRC_GROUP);
            scales += R * (WIDE_GROUP / SRC_GROUP);
            continue;
        }
        prefetch.next();
        Ints sum[R][2];
        multiply_group<R, TERMS, BITS, GROUP>(weights.quants, quants, sum);
        const Floats scale[2] = {weights.scale(0), weights.scale(1)}, zero[2] = {weights.zero(0), weights.zero(1)};
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v) total[r][v] += (as_floats(sum[r][v]) - zero[v] * sums[r]) * (scale[v] * scales[r]);
        // Two groups of 16 weights share a scale of the source.
        const bool is_half = GROUP < SRC_GROUP && group % 2 == 0;
        const size_t half = (SRC_GROUP - GROUP) * quant_bytes(BITS, TERMS);
        quants += is_half ? half : R * row_bytes(BITS, TERMS) - half;
        scales += is_half ? 0 : R;
    }
    if (TERMS == 1 && (!IS_PART || end == num_groups(matmul)))
        add_outliers<R, BITS, GROUP>(matmul, block, pair, src.outliers, total);
}

template <size_t R, size_t TERMS, size_t BITS, size_t GROUP>
void multiply_as(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    const size_t bytes = n_block_bytes(matmul);
    const size_t times = (range.tile_end - range.tile_begin) * PAIRS * (matmul.K / PREFETCH_COLUMNS<GROUP>);
    for (size_t block = range.block_begin; block < range.block_end; ++block) {
        const uint8_t* next = matmul.weights + (block + 1 < range.block_end ? block + 1 : range.next_block) * bytes;
        Prefetch<3> prefetch(next, next + bytes, times);
        for (size_t tile = range.tile_begin; tile < range.tile_end; ++tile)
            for (size_t pair = 0; pair < PAIRS; ++pair) {
                Floats total[R][2];
                multiply_tile<R, TERMS, BITS, GROUP>(matmul, matmul.weights + block * bytes, pair, tile_of(matmul, src, tile),
                                                     prefetch, total);
                if (src.lora) {
                    // Use a copy, so that the sums remain in registers if no row has an adapter.
                    Floats adapted[R][2];
                    std::memcpy(adapted, total, sizeof(total));
                    add_adapters<R>(matmul, block, pair, src.lora + tile * R, adapted);
                    std::memcpy(total, adapted, sizeof(total));
                }
                for (size_t r = 0; r < R && tile * R + r < src.M; ++r)
                    store_dst(matmul, total[r], block, pair, tile * R + r, residual, dst);
            }
    }
}

template <size_t R, size_t TERMS>
void multiply_terms(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    const bool is_16 = matmul.group == 16;
    auto* multiply = matmul.bits == E2M1_BITS ? multiply_as<R, TERMS, E2M1_BITS, 32>
                     : matmul.bits == SIX_BITS
                         ? is_16 ? multiply_as<R, TERMS, SIX_BITS, SUPER_GROUP> : multiply_as<R, TERMS, SIX_BITS, 32>
                     : has_wide_groups(matmul)
                         ? matmul.bits == 4 ? multiply_as<R, TERMS, 4, WIDE_GROUP> : multiply_as<R, TERMS, 8, WIDE_GROUP>
                     : matmul.bits == 4 ? is_16 ? multiply_as<R, TERMS, 4, 16> : multiply_as<R, TERMS, 4, 32>
                     : is_16            ? multiply_as<R, TERMS, 8, 16>
                                        : multiply_as<R, TERMS, 8, 32>;
    multiply(matmul, src, range, residual, dst);
}

// Multiplies tiles of at most `R` rows.
template <size_t R>
void multiply_rows(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    if constexpr (R > 1)
        if (src.m_tile < R) return multiply_rows<R - 1>(matmul, src, range, residual, dst);
    auto* multiply = matmul.terms == 1 ? multiply_terms<R, 1> : multiply_terms<R, 2>;
    multiply(matmul, src, range, residual, dst);
}

// Adds the products of a part of K to the sums of a row and a block of columns.
template <size_t TERMS, size_t BITS, size_t GROUP>
void continue_row(const Matmul& matmul, const QuantizedSrc& src, const KPart& part, float* sums) {
    const GroupRange groups{part.begin / GROUP, part.end / GROUP};
    SrcTile tile = tile_of(matmul, src, 0);
    tile.quants += part.begin / SRC_GROUP * row_bytes(BITS, TERMS);
    tile.scales += part.begin / SRC_GROUP;
    tile.sums += groups.begin;
    const size_t bytes = n_block_bytes(matmul), part_bytes = bytes / matmul.K * (part.end - part.begin);
    const size_t times = PAIRS * ((part.end - part.begin) / PREFETCH_COLUMNS<GROUP>);
    const uint8_t* next = matmul.weights + part.next_block * bytes + bytes / matmul.K * part.begin;
    Prefetch<3> prefetch(next, next + part_bytes, times);
    for (size_t pair = 0; pair < PAIRS; ++pair, sums += LANES) {
        Floats total[1][2] = {{load(sums), load(sums + N_BLOCK / 2)}};
        multiply_tile<1, TERMS, BITS, GROUP, true>(matmul, matmul.weights + part.block * bytes, pair, tile, prefetch, total,
                                                   groups);
        for (size_t v = 0; v < 2; ++v) ::store(sums + v * (N_BLOCK / 2), total[0][v]);
    }
}

template <size_t TERMS>
void continue_terms(const Matmul& matmul, const QuantizedSrc& src, const KPart& part, float* sums) {
    const bool is_16 = matmul.group == 16;
    auto* continue_sums =
        matmul.bits == E2M1_BITS  ? continue_row<TERMS, E2M1_BITS, 32>
        : matmul.bits == SIX_BITS ? is_16 ? continue_row<TERMS, SIX_BITS, SUPER_GROUP> : continue_row<TERMS, SIX_BITS, 32>
        : has_wide_groups(matmul) ? matmul.bits == 4 ? continue_row<TERMS, 4, WIDE_GROUP> : continue_row<TERMS, 8, WIDE_GROUP>
        : matmul.bits == 4        ? is_16 ? continue_row<TERMS, 4, 16> : continue_row<TERMS, 4, 32>
        : is_16                   ? continue_row<TERMS, 8, 16>
                                  : continue_row<TERMS, 8, 32>;
    continue_sums(matmul, src, part, sums);
}

// Returns the number of rows per tile that minimizes the cost. The cost is the total number of rows, including the padding,
// plus one for each tile, because reading a block of weights costs as much as computing a row.
size_t rows_per_tile(size_t M) {
    size_t best = M < M_TILE_MAX ? M : M_TILE_MAX;
    const auto cost = [&](size_t rows) { return (M + rows - 1) / rows * (rows + 1); };
    for (size_t rows = best - 1; rows > 0; --rows)
        if (cost(rows) < cost(best)) best = rows;
    return best;
}

// Rounds a size up to whole cache lines, because each part of a quantized source begins at a cache line.
inline size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The parts of the memory of a packed source. If `data` is null, only their total size is computed.
struct SrcParts {
    uint8_t* data;
    size_t bytes = 0;
    template <typename T>
    T* next(size_t count) {
        T* part = data ? (T*)(data + bytes) : nullptr;
        bytes += whole_lines(count * sizeof(T));
        return part;
    }
};

QuantizedSrc divided(const Matmul& matmul, size_t rows, size_t m_tile, SrcParts& parts) {
    QuantizedSrc src{};
    src.m_tile = m_tile;
    src.quants = parts.next<int8_t>(rows * (matmul.K / SRC_GROUP) * row_bytes(matmul));
    src.scales = parts.next<float>(rows * (matmul.K / SRC_GROUP));
    src.sums = parts.next<float>(rows * num_groups(matmul));
    const size_t outliers = rows * outliers_per_row_max(matmul);
    src.outliers.counts = parts.next<uint32_t>(rows);
    src.outliers.columns = parts.next<uint32_t>(outliers);
    src.outliers.values = parts.next<float>(outliers * m_tile);
    return src;
}

size_t src_bytes(const Matmul& matmul, size_t rows) {
    SrcParts parts{nullptr};
    divided(matmul, rows, M_TILE_MAX, parts);
    return parts.bytes;
}

QuantizedSrc quantized(const Matmul& matmul, const PackedSrc& src) {
    SrcParts parts{src.data};
    QuantizedSrc quantized = divided(matmul, num_tiles(src) * src.m_tile, src.m_tile, parts);
    quantized.M = src.M;
    quantized.lora = src.lora;
    return quantized;
}

void multiply(const Matmul& matmul, const PackedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    multiply_rows<M_TILE_MAX>(matmul, quantized(matmul, src), range, residual, dst);
    activate(matmul, src, range, dst);
}

void multiply_k_part(const Matmul& matmul, const PackedSrc& src, const KPart& part, float* sums) {
    (matmul.terms == 1 ? continue_terms<1> : continue_terms<2>)(matmul, quantized(matmul, src), part, sums);
}

// Finishes the sums of a row as `multiply` does.
void finish(const Matmul& matmul, const PackedSrc& src, size_t block, const float* sums, FloatData residual, FloatData dst) {
    for (size_t pair = 0; pair < PAIRS; ++pair, sums += LANES) {
        Floats total[1][2] = {{load(sums), load(sums + N_BLOCK / 2)}};
        if (src.lora) add_adapters<1>(matmul, block, pair, src.lora, total);
        store_dst(matmul, total[0], block, pair, 0, residual, dst);
    }
    activate(matmul, src, {0, 1, block, block + 1, block}, dst);
}

// The bits of the absolute values. As integers, they have the same order as the absolute values, and NaN is the largest.
inline Ints magnitudes(Floats values) { return (Ints)((Words)values & 0x7fffffff); }

inline float largest_magnitude(Ints bits) {
#if defined(__AVX512F__)
    return as_float(uint32_t(_mm512_reduce_max_epi32((__m512i)bits)));
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return as_float(uint32_t(_mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)))));
#else
    int32_t found = bits[0];
    for (size_t lane = 1; lane < LANES; ++lane) found = bits[lane] > found ? bits[lane] : found;
    return as_float(uint32_t(found));
#endif
}

// A row of the source.
template <typename T>
struct SrcRow {
    const T* numbers;
    const float* norm;
    // If the source has a norm, the numbers are multiplied by this factor and by `norm`.
    float factor;
    // Numbers whose magnitude exceeds this limit are outliers.
    float limit;
    // The number of further outliers for which memory is available.
    size_t outliers_left;

    inline Floats load_at(size_t at) const {
        const Floats values = load(numbers + at);
        return norm ? values * factor * load(norm + at) : values;
    }
};

template <typename T>
SrcRow<T> src_row(const Matmul& matmul, const T* numbers) {
    const float factor = matmul.norm ? inverse_rms(matmul, numbers) : 1;
    SrcRow<T> row{numbers, matmul.norm, factor, __builtin_inff(), outliers_per_row_max(matmul)};
    if (matmul.terms > 1) return row;
    Floats squares{};
    for (size_t at = 0; at < matmul.K; at += LANES) {
        const Floats values = row.load_at(at);
        squares = fused_multiply_add(values, values, squares);
    }
    row.limit = OUTLIER_RATIO * __builtin_sqrtf(horizontal_sum(squares) / float(matmul.K));
    return row;
}

// The outliers of the rows of a tile in a group of columns.
struct GroupOutliers {
    // A bit for each column, which is set if a row has an outlier there.
    uint32_t columns = 0;
    float values[SRC_GROUP][M_TILE_MAX];

    void add(size_t column, size_t row, float value) {
        if (!(columns >> column & 1)) std::memset(values[column], 0, sizeof(values[column]));
        columns |= 1u << column;
        values[column][row] = value;
    }
};

constexpr size_t GROUP_VECTORS = SRC_GROUP / LANES;

inline float largest_magnitude(const Floats (&values)[GROUP_VECTORS]) {
    Ints most{};
    for (const Floats& vector : values) {
        const Ints bits = magnitudes(vector);
        most = most > bits ? most : bits;
    }
    return largest_magnitude(most);
}

// Moves the outliers in `values`, a group of a row's numbers, to `to`.
template <typename T>
void move_outliers(const Matmul& matmul, SrcRow<T>& row, size_t row_of_tile, Floats (&values)[GROUP_VECTORS],
                   GroupOutliers& to) {
    float numbers[SRC_GROUP];
    std::memcpy(numbers, values, sizeof(values));
    for (size_t column = 0; column < SRC_GROUP && row.outliers_left > 0; ++column)
        if (as_float(as_bits(numbers[column]) & 0x7fffffff) > row.limit) {
            to.add(column, row_of_tile, numbers[column] * matmul.scale_factor);
            numbers[column] = 0;
            --row.outliers_left;
        }
    std::memcpy(values, numbers, sizeof(values));
}

// The memory for the result of quantizing a group of a row: its quants, its scale, and the sum of the quants for each group of
// weights.
struct QuantizedGroup {
    int8_t* quants;
    float *scale, *sums;
};

// Quantizes a group of numbers of a row in a tile of `m_tile` rows. The group starts at `column`, and `top` is the largest
// magnitude of its numbers.
inline void quantize_group(const Matmul& matmul, const Floats (&values)[GROUP_VECTORS], float top, size_t m_tile, size_t column,
                           const QuantizedGroup& to) {
    const float most_quant = matmul.terms == 1 ? 127 : 127 << TERM_BITS, inverse = top > 0 ? most_quant / top : 0;
    *to.scale = top / most_quant * matmul.scale_factor;
    float* sums = to.sums;
    // The sum is unsigned, because NaN is quantized to numbers whose signed sums could overflow.
    Words sum{};
    for (size_t v = 0; v < GROUP_VECTORS; ++v) {
        // The addition rounds to the nearest integer, which is then in the low bits.
        const Words whole = (Words)(values[v] * inverse + 12582912.0f) - 0x4b400000u;
        if (has_pairs(matmul.bits, matmul.terms)) {
            store_pairs(to.quants + v * LANES * sizeof(int16_t), (Ints)whole);
        } else if (matmul.terms == 1) {
            store_bytes(to.quants + v * LANES, (Ints)whole);
        } else {
            const Ints high = (Ints)(whole + (1u << (TERM_BITS - 1))) >> TERM_BITS;
            store_bytes(to.quants + v * LANES, high);
            store_bytes(to.quants + m_tile * SRC_GROUP + v * LANES, (Ints)(whole - ((Words)high << TERM_BITS)));
        }
        sum += whole;
        if (!has_wide_groups(matmul) && (v + 1) * LANES % matmul.group == 0) {
            *sums = float(int32_t(horizontal_sum(sum)));
            sums += m_tile;
            sum = Words{};
        }
    }
    if (has_wide_groups(matmul))
        *sums = float(int32_t(horizontal_sum(sum))) * *to.scale + (column % WIDE_GROUP == 0 ? 0 : *sums);
}

// Quantizes a tile, and collects its outliers.
template <typename T>
void quantize_tile(const Matmul& matmul, const T* src, size_t tile, const QuantizedSrc& to) {
    const size_t m_tile = to.m_tile, begin = tile * m_tile, rows = to.M - begin < m_tile ? to.M - begin : m_tile;
    int8_t* quants = to.quants + begin * (matmul.K / SRC_GROUP) * row_bytes(matmul);
    float *scales = to.scales + begin * (matmul.K / SRC_GROUP), *sums = to.sums + begin * num_groups(matmul);
    if (rows < m_tile) {
        std::memset(quants, 0, m_tile * (matmul.K / SRC_GROUP) * row_bytes(matmul));
        std::memset(scales, 0, m_tile * (matmul.K / SRC_GROUP) * sizeof(float));
        std::memset(sums, 0, m_tile * num_groups(matmul) * sizeof(float));
    }
    uint32_t* columns = to.outliers.columns + begin * outliers_per_row_max(matmul);
    float* outliers = to.outliers.values + begin * outliers_per_row_max(matmul) * m_tile;
    uint32_t& count = to.outliers.counts[tile];
    count = 0;
    SrcRow<T> src_rows[M_TILE_MAX];
    for (size_t r = 0; r < rows; ++r) src_rows[r] = src_row(matmul, src + (begin + r) * matmul.K);
    for (size_t at = 0; at < matmul.K; at += SRC_GROUP) {
        GroupOutliers found;
        for (size_t r = 0; r < rows; ++r) {
            Floats values[GROUP_VECTORS];
            for (size_t v = 0; v < GROUP_VECTORS; ++v) values[v] = src_rows[r].load_at(at + v * LANES);
            float top = largest_magnitude(values);
            if (top > src_rows[r].limit) {
                move_outliers(matmul, src_rows[r], r, values, found);
                top = largest_magnitude(values);
            }
            quantize_group(matmul, values, top, m_tile, at,
                           {quants + r * SRC_GROUP * quant_bytes(matmul.bits, matmul.terms), scales + r, sums + r});
        }
        for (uint32_t left = found.columns; left != 0; left &= left - 1, ++count) {
            const size_t column = size_t(__builtin_ctz(left));
            columns[count] = uint32_t(at + column);
            std::memcpy(outliers + count * m_tile, found.values[column], m_tile * sizeof(float));
        }
        quants += m_tile * row_bytes(matmul), scales += m_tile;
        if ((at + SRC_GROUP) % matmul.group == 0) sums += m_tile * (has_wide_groups(matmul) ? 1 : SRC_GROUP / matmul.group);
    }
}

void quantize(const Matmul& matmul, FloatData src, size_t tile, size_t, const PackedSrc& to) {
    const QuantizedSrc quantized_src = quantized(matmul, to);
    if (src.is_bf16) quantize_tile(matmul, (const bf16*)src.data, tile, quantized_src);
    else quantize_tile(matmul, (const float*)src.data, tile, quantized_src);
}

// With at least 8 rows per thread, reading rows that other threads have packed costs more than reading all weights.
constexpr Division DIVISION = {rows_per_tile, M_TILE_MAX, 8, 256 << 10, 4};

}  // namespace

const Kernels ovfleet::projection::OVFLEET_KERNELS = {DIVISION,        src_bytes, quantize, multiply,
                                                      multiply_k_part, finish,    lora_down};
