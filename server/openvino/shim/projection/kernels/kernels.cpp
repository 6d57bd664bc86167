// The kernels of the projections. This file is compiled once for each instruction set, and `OVFLEET_KERNELS` is the name of its
// table of functions.
//
// Products of integers are summed exactly within a group, and then scaled in f32: the result of a row depends only on the row,
// not on the other rows of the step. Rows are quantized by the largest of 32 numbers: to 8 bits as in llama.cpp's Q8_0, or to
// 15 bits, which are multiplied in two terms of 8 bits.
//
// It uses only memcpy and memset of the standard library, because the linker could use inline functions that are compiled here
// for other callers.
#include "../../vectors.hpp"
#include "dot.hpp"
#include "epilogue.hpp"
#include "lora.hpp"
#include "norm.hpp"
#include "prefetch.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// The largest number of rows of a tile.
constexpr size_t M_TILE_MAX = 6;

// Bytes of four weights of 16 columns.
constexpr size_t FOUR_BYTES = 64;

inline Floats as_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Adds the products of a group of weights and one term of `R` rows.
template <size_t R, size_t BITS, size_t GROUP>
inline void add_term(const uint8_t* weights, const int8_t* quants, DotSum<BITS> (&sum)[R][2]) {
    constexpr size_t per_load = BITS == 4 ? 2 : 1, loads = GROUP / 4 / per_load;
    for (size_t at = 0; at < loads; ++at) {
        Fours fours[2];
        for (size_t v = 0; v < 2; ++v) fours[v] = read<Fours>(weights + (2 * at + v) * FOUR_BYTES);
        const int8_t* tile_quants = quants + at * per_load * 4;
        if (BITS == 8) {
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(fours[v], read<int32_t>(tile_quants + r * SRC_GROUP));
        } else {
            Fours low[2], high[2];
            for (size_t v = 0; v < 2; ++v) {
                low[v] = fours[v] & 15;
                high[v] = (Fours)((Words)fours[v] >> 4) & 15;
            }
            for (size_t r = 0; r < R; ++r) {
                const int8_t* row_quants = tile_quants + r * SRC_GROUP;
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(low[v], read<int32_t>(row_quants));
                for (size_t v = 0; v < 2; ++v) sum[r][v].add(high[v], read<int32_t>(row_quants + 4));
            }
        }
    }
}

// Computes a tile of `R` rows and a pair of vectors of a block of columns.
template <size_t R, size_t TERMS, size_t BITS, size_t GROUP>
inline void multiply_tile(const Matmul& matmul, const uint8_t* block, size_t pair, const int8_t* quants, const float* scales,
                          const float* sums, Prefetch& prefetch, Floats (&total)[R][2]) {
    constexpr size_t bytes = N_BLOCK * 2 * sizeof(f16) + N_BLOCK * GROUP * BITS / 8;
    for (size_t r = 0; r < R; ++r) total[r][0] = total[r][1] = Floats{};
    for (size_t group = 0; group < num_groups(matmul); ++group, block += bytes, sums += R) {
        const auto* halves = (const f16*)block + pair * LANES;
        const uint8_t* weights = block + N_BLOCK * 2 * sizeof(f16) + pair * LANES * 4;
        prefetch.next();
        DotSum<BITS> sum[R][2];
        add_term<R, BITS, GROUP>(weights, quants, sum);
        if (TERMS == 2) {
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < 2; ++v) sum[r][v].begin_term();
            add_term<R, BITS, GROUP>(weights, quants + R * SRC_GROUP, sum);
        }
        const Floats scale[2] = {load(halves), load(halves + N_BLOCK / 2)};
        const Floats zero[2] = {load(halves + N_BLOCK), load(halves + N_BLOCK + N_BLOCK / 2)};
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v)
                total[r][v] += (as_floats(sum[r][v].total()) - zero[v] * sums[r]) * (scale[v] * scales[r]);
        // Two groups of 16 share the scale of the source.
        const bool is_half = GROUP < SRC_GROUP && group % 2 == 0;
        quants += is_half ? GROUP : R * SRC_GROUP * TERMS - (SRC_GROUP - GROUP);
        scales += is_half ? 0 : R;
    }
}

template <size_t R, size_t TERMS, size_t BITS, size_t GROUP, typename T>
void multiply_as(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, const T* residual, T* dst) {
    const size_t bytes = n_block_bytes(matmul), times = (range.tile_end - range.tile_begin) * PAIRS * num_groups(matmul);
    for (size_t block = range.block_begin; block < range.block_end; ++block) {
        const uint8_t* next = matmul.weights + (block + 1 < range.block_end ? block + 1 : range.next_block) * bytes;
        Prefetch prefetch{next, next + bytes, (bytes / 64 + times - 1) / times};
        for (size_t tile = range.tile_begin; tile < range.tile_end; ++tile)
            for (size_t pair = 0; pair < PAIRS; ++pair) {
                Floats total[R][2];
                multiply_tile<R, TERMS, BITS, GROUP>(
                    matmul, matmul.weights + block * bytes, pair, src.quants + tile * R * matmul.K * TERMS,
                    src.scales + tile * R * (matmul.K / SRC_GROUP), src.sums + tile * R * num_groups(matmul), prefetch, total);
                if (src.lora) {
                    // A copy, so that the sums stay in registers.
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

template <size_t R, size_t TERMS, typename T>
void multiply_terms(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, const T* residual, T* dst) {
    auto* multiply = matmul.bits == 4 ? matmul.group == 16 ? multiply_as<R, TERMS, 4, 16, T> : multiply_as<R, TERMS, 4, 32, T>
                     : matmul.group == 16 ? multiply_as<R, TERMS, 8, 16, T>
                                          : multiply_as<R, TERMS, 8, 32, T>;
    multiply(matmul, src, range, residual, dst);
}

template <size_t R, typename T>
void multiply_rows(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, const void* residual, void* dst) {
    auto* multiply = matmul.terms == 1 ? multiply_terms<R, 1, T> : multiply_terms<R, 2, T>;
    multiply(matmul, src, range, (const T*)residual, (T*)dst);
}

template <typename T>
void multiply_to(const Matmul& matmul, const QuantizedSrc& src, const DstRange& range, const void* residual, void* dst) {
    static constexpr decltype(&multiply_rows<1, T>) by_rows[M_TILE_MAX] = {multiply_rows<1, T>, multiply_rows<2, T>,
                                                                           multiply_rows<3, T>, multiply_rows<4, T>,
                                                                           multiply_rows<5, T>, multiply_rows<6, T>};
    by_rows[src.m_tile - 1](matmul, src, range, residual, dst);
}

// The number of rows of a tile that minimizes the cost: reading a block of weights costs as much as a row, and so does a row of
// padding.
size_t rows_per_tile(size_t M) {
    size_t best = M < M_TILE_MAX ? M : M_TILE_MAX;
    const auto cost = [&](size_t rows) { return (M + rows - 1) / rows * (rows + 1); };
    for (size_t rows = best - 1; rows > 0; --rows)
        if (cost(rows) < cost(best)) best = rows;
    return best;
}

// The parts of a quantized source begin at cache lines.
inline size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t src_bytes(const Matmul& matmul, size_t rows) {
    return rows * matmul.K * matmul.terms + whole_lines(rows * (matmul.K / SRC_GROUP) * sizeof(float)) +
           rows * num_groups(matmul) * sizeof(float);
}

QuantizedSrc quantized(const Matmul& matmul, const PackedSrc& src) {
    const size_t rows = num_tiles(src) * src.m_tile;
    uint8_t* scales = src.data + rows * matmul.K * matmul.terms;
    uint8_t* sums = scales + whole_lines(rows * (matmul.K / SRC_GROUP) * sizeof(float));
    return {src.M, src.m_tile, (int8_t*)src.data, (float*)scales, (float*)sums, src.lora};
}

void multiply(const Matmul& matmul, const PackedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    (dst.is_bf16 ? multiply_to<bf16> : multiply_to<float>)(matmul, quantized(matmul, src), range, residual.data, dst.data);
}

// The bits of the magnitudes of numbers. As integers, they have the order of the magnitudes, and NaN is the largest.
inline Ints magnitudes(Floats values) { return (Ints)((Words)values & 0x7fffffff); }

inline float largest_magnitude(Ints bits) {
#if defined(__AVX512F__)
    return as_float(uint32_t(_mm512_reduce_max_epi32((__m512i)bits)));
#else
    int32_t found = bits[0];
    for (size_t lane = 1; lane < LANES; ++lane) found = bits[lane] > found ? bits[lane] : found;
    return as_float(uint32_t(found));
#endif
}

// Quantizes a row in a tile of `m_tile` rows.
template <typename T>
void quantize_row(const Matmul& matmul, const T* row, size_t m_tile, int8_t* quants, float* scales, float* sums) {
    constexpr size_t vectors = SRC_GROUP / LANES;
    const float factor = matmul.norm ? inverse_rms(matmul, row) : 1;
    const float most_quant = matmul.terms == 1 ? 127 : 127 << TERM_BITS;
    for (size_t at = 0; at < matmul.K; at += SRC_GROUP, quants += matmul.terms * m_tile * SRC_GROUP, scales += m_tile) {
        Floats values[vectors];
        Ints most{};
        for (size_t v = 0; v < vectors; ++v) {
            values[v] = load(row + at + v * LANES);
            if (matmul.norm) values[v] = values[v] * factor * load(matmul.norm + at + v * LANES);
            const Ints bits = magnitudes(values[v]);
            most = most > bits ? most : bits;
        }
        const float top = largest_magnitude(most), inverse = top > 0 ? most_quant / top : 0;
        *scales = top / most_quant * matmul.scale_factor;
        // Unsigned, since NaN is quantized to numbers whose signed sums overflow.
        Words sum{};
        for (size_t v = 0; v < vectors; ++v) {
            // The addition rounds to the nearest integer, which is then in the low bits.
            const Words whole = (Words)(values[v] * inverse + 12582912.0f) - 0x4b400000u;
            if (matmul.terms == 1) {
                store_bytes(quants + v * LANES, (Ints)whole);
            } else {
                const Ints high = (Ints)(whole + (1u << (TERM_BITS - 1))) >> TERM_BITS;
                store_bytes(quants + v * LANES, high);
                store_bytes(quants + m_tile * SRC_GROUP + v * LANES, (Ints)(whole - ((Words)high << TERM_BITS)));
            }
            sum += whole;
            if ((v + 1) * LANES % matmul.group == 0) {
                *sums = horizontal_sum(as_floats((Ints)sum));
                sums += m_tile;
                sum = Words{};
            }
        }
    }
}

template <typename T>
void quantize_from(const Matmul& matmul, const void* src, size_t tile, const QuantizedSrc& to) {
    const size_t m_tile = to.m_tile, begin = tile * m_tile;
    int8_t* quants = to.quants + begin * matmul.K * matmul.terms;
    float *scales = to.scales + begin * (matmul.K / SRC_GROUP), *sums = to.sums + begin * num_groups(matmul);
    if (begin + m_tile > to.M) {
        std::memset(quants, 0, m_tile * matmul.K * matmul.terms);
        std::memset(scales, 0, m_tile * (matmul.K / SRC_GROUP) * sizeof(float));
        std::memset(sums, 0, m_tile * num_groups(matmul) * sizeof(float));
    }
    for (size_t r = 0; r < m_tile && begin + r < to.M; ++r)
        quantize_row(matmul, (const T*)src + (begin + r) * matmul.K, m_tile, quants + r * SRC_GROUP, scales + r, sums + r);
}

void quantize(const Matmul& matmul, FloatData src, size_t tile, size_t, const PackedSrc& to) {
    (src.is_bf16 ? quantize_from<bf16> : quantize_from<float>)(matmul, src.data, tile, quantized(matmul, to));
}

// Above 8 rows for each thread, reading what other threads have packed costs more than reading all weights.
constexpr Division DIVISION = {rows_per_tile, M_TILE_MAX, 8, 256 << 10, 4};

}  // namespace

const Kernels ovfleet::projection::OVFLEET_KERNELS = {DIVISION, src_bytes, quantize, multiply, lora_down};
