// The projection kernels for AMX. This file is compiled for the tile registers of the processor and, for tests, also for a
// model of these registers in plain C++: once with portable vector code, and once with AVX-512. `OVFLEET_TILES` is the name of
// the implementation of the registers in tiles.hpp, and `OVFLEET_KERNELS` is the name of the table of functions.
//
// The weights of a block of columns are dequantized part by part, into a buffer that remains in the cache of the processor.
// Rows and weights are rounded to bf16, except that weights with per-channel scales are multiplied as integers, which are exact
// in bf16. The products are summed in f32, in an order that depends only on K: the result of a row depends neither on the other
// rows nor on the division of the work.
//
// This file uses no functions of the standard library except memcpy and memset. Otherwise, the linker could keep the copies of
// inline functions that are compiled here, and a processor without this instruction set would then run them.
#include "../../tiles.hpp"
#include "../../vectors.hpp"
#include "epilogue.hpp"
#include "lora.hpp"
#include "norm.hpp"
#include "prefetch.hpp"
#include "projection.hpp"
#include "six_bits.hpp"

namespace {

using namespace ovfleet::projection;

// The largest number of rows of a tile of the source: the rows of two tile registers.
constexpr size_t M_TILE_MAX = 2 * TILE_ROWS;
// In this file, a step is the part of K that one multiplication of two tile registers covers. `K_STEP` is the number of columns
// of the source in a step. `STEP_ROW_BYTES` is the size of these columns in one packed row, and `STEP_BYTES` is the size of the
// dequantized weights of a block of columns in one step.
constexpr size_t K_STEP = 32, STEP_ROW_BYTES = TILE_ROW_BYTES, STEP_BYTES = 2 * TILE_ROWS * TILE_ROW_BYTES;
// The number of steps whose weights are dequantized at a time if a range has several tiles. With two tiles, the kernels
// dequantize the weights of a few steps, which remain in the first-level cache. With more tiles, they dequantize as many as fit
// into the second-level cache together with the rows.
constexpr size_t STEPS_FEW = 8, STEPS_MANY = 64, FEW_TILES = 2;
// The number of tiles whose sums are stored while the weights of the next steps are dequantized.
constexpr size_t STORED_TILES = 8;
// The stride of the rows of sums, in bytes.
constexpr size_t SUM_BYTES = N_BLOCK * sizeof(float);

inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

size_t rows_per_tile(size_t M) { return least(M, M_TILE_MAX); }

// The packed source contains, for each tile and step, 32 columns of each row in bf16.
size_t src_bytes(const Matmul& matmul, size_t rows) { return rows * matmul.K * sizeof(bf16); }

inline size_t rows_of(const PackedSrc& src, size_t tile) { return least(src.m_tile, src.M - tile * src.m_tile); }

// The number of rows that are packed at a time.
constexpr size_t PACKED_ROWS = 8;

template <typename T>
void pack_from(const Matmul& matmul, const void* from, size_t tile, size_t part, const PackedSrc& to) {
    const size_t begin = part * PACKED_ROWS, end = least(begin + PACKED_ROWS, to.m_tile), rows = rows_of(to, tile);
    // Loading a tile register reads all of its rows, even if only some of them are used.
    const size_t padded = rows > TILE_ROWS ? M_TILE_MAX : TILE_ROWS;
    for (size_t r = begin; r < least(end, padded); ++r) {
        uint8_t* packed = to.data + tile * to.m_tile * matmul.K * sizeof(bf16) + r * STEP_ROW_BYTES;
        const T* row = (const T*)from + (tile * to.m_tile + r) * matmul.K;
        const float factor = matmul.norm && r < rows ? inverse_rms(matmul, row) : 1;
        for (size_t at = 0; at < matmul.K; at += K_STEP, packed += to.m_tile * STEP_ROW_BYTES)
            for (size_t lane = 0; lane < K_STEP; lane += LANES) {
                Floats values{};
                if (r < rows) values = load(row + at + lane);
                if (r < rows && matmul.norm) values = values * factor * load(matmul.norm + at + lane);
                store((bf16*)packed + lane, values);
            }
    }
}

void pack_src(const Matmul& matmul, FloatData src, size_t tile, size_t part, const PackedSrc& to) {
    (src.is_bf16 ? pack_from<bf16> : pack_from<float>)(matmul, src.data, tile, part, to);
}

// Returns, as floats, the quants of `BITS` bits that begin at bit `position` of each 32-bit lane.
template <size_t BITS>
inline Floats quants_at(Words lanes, int position) {
    const Words shifted = lanes >> position;
#if defined(__AVX512F__)
    // The permutation reads only the low 4 bits of each lane.
    if constexpr (BITS == 4) {
        const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return (Floats)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table);
    }
    if constexpr (BITS == E2M1_BITS) {
        const Floats table = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return (Floats)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table);
    }
#endif
    if constexpr (BITS == E2M1_BITS) {
        Floats quants;
        for (size_t lane = 0; lane < LANES; ++lane) quants[lane] = float(quant_of_e2m1(shifted[lane]));
        return quants;
    }
    return __builtin_convertvector((Ints)(shifted & ((1 << BITS) - 1)), Floats);
}

inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return a * b + sum;
#endif
}

// Returns the differences of quants and zero points, which are exact in bf16. `offset` is the result of `offset_of`.
template <size_t BITS>
inline Floats differences_at(Words lanes, int position, Floats offset) {
    if constexpr (BITS == 8) return (Floats)((lanes >> position & 255) | 0x4b000000) - offset;
    else return quants_at<BITS>(lanes, position) - offset;
}
// With 8 bits, the offset includes 2^23, because `differences_at` inserts the quants into the lowest bits of the float 2^23.
template <size_t BITS>
inline Floats offset_of(Floats zero) {
    return BITS == 8 ? zero + 8388608.0f : zero;
}

// Dequantizes `COUNT` weights of a group for each column of a block, starting at the weight `first`. For each half of the
// columns, a row of a tile register contains two consecutive weights of each column. Per-channel scales are applied later, to
// the sums.
template <size_t BITS, size_t COUNT, bool PER_CHANNEL>
inline void dequantize_group(const uint8_t* group, size_t first, uint8_t* to, Prefetch<2>& prefetch) {
    constexpr size_t per_lane = 32 / stored_bits(BITS), half_bytes = TILE_ROWS * TILE_ROW_BYTES;
    // The bit positions of the weights of a lane, in the order of the weights: see the layout of `Matmul`.
    constexpr int positions[8] = {0, 8, 16, 24, 4, 12, 20, 28};
    for (size_t half = 0; half < 2; ++half)
        for (size_t lane = 0; lane < TILE_ROWS; lane += LANES) {
            const size_t column = half * TILE_ROWS + lane;
            const Floats scale = load((const f16*)group + column), zero = load((const f16*)group + N_BLOCK + column);
            // These products are exact in f32, so they add no rounding error.
            const Floats offset = PER_CHANNEL ? offset_of<BITS>(zero) : -(zero * scale);
            const uint8_t* quants = group + N_BLOCK * 2 * sizeof(f16) + N_BLOCK * first * stored_bits(BITS) / 8 + column * 4;
            uint8_t* rows = to + half * half_bytes + lane * 4;
            for (size_t at = 0; at < COUNT; at += per_lane, quants += N_BLOCK * 4) {
                prefetch.next();
                const Words lanes = read<Words>(quants);
                for (size_t i = 0; i < per_lane; i += 2, rows += TILE_ROW_BYTES) {
                    Words pairs;
                    if constexpr (PER_CHANNEL) {
                        pairs = exact_bf16_pairs(differences_at<BITS>(lanes, positions[i], offset),
                                                 differences_at<BITS>(lanes, positions[i + 1], offset));
                    } else {
                        pairs = bf16_pairs(multiply_add(quants_at<BITS>(lanes, positions[i]), scale, offset),
                                           multiply_add(quants_at<BITS>(lanes, positions[i + 1]), scale, offset));
                    }
                    std::memcpy(rows, &pairs, sizeof(pairs));
                }
            }
        }
}

// Dequantizes a step of a block of columns whose weights have 6 bits.
template <size_t GROUP>
inline void dequantize_six_bits(const Matmul& matmul, const uint8_t* block, size_t step, uint8_t* to, Prefetch<2>& prefetch) {
    const uint8_t* super_scales = block + super_scale_bytes(step * K_STEP);
    const uint8_t* groups = GROUP == SUPER_GROUP ? block + super_scale_bytes(matmul.K) : block;
    for (size_t column = 0; column < N_BLOCK; column += LANES) {
        uint8_t* rows = to + column / TILE_ROWS * TILE_ROWS * TILE_ROW_BYTES + column % TILE_ROWS * 4;
        for (size_t i = 0; i < K_STEP / 16; ++i) {
            const uint8_t* quants;
            Floats scale, zero;
            if constexpr (GROUP == SUPER_GROUP) {
                const size_t group = step * (K_STEP / GROUP) + i;
                scale = super_scaled(super_scales + column * sizeof(f16), groups + quantized_scales_at(group) + column);
                zero = broadcast(SUPER_ZERO);
                quants = groups + super_quants_at(group);
            } else {
                const uint8_t* group = groups + step * group_bytes(matmul);
                scale = load((const f16*)group + column), zero = load((const f16*)group + N_BLOCK + column);
                quants = group + N_BLOCK * 2 * sizeof(f16) + i * SIX_BIT_BYTES;
            }
            // These products are exact in f32, so they add no rounding error.
            const Floats offset = -(zero * scale);
            for (size_t at = 0; at < 4; ++at) {
                prefetch.next();
                const Words four = six_bit_four(quants + column * 4, at);
                for (int position = 0; position < 32; position += 16, rows += TILE_ROW_BYTES) {
                    const Floats even = multiply_add(quants_at<8>(four, position), scale, offset);
                    const Floats odd = multiply_add(quants_at<8>(four, position + 8), scale, offset);
                    const Words pairs = bf16_pairs(even, odd);
                    std::memcpy(rows, &pairs, sizeof(pairs));
                }
            }
        }
    }
}

// Returns the configuration of the tile registers for tiles of the source with `m_tile` rows.
inline TileConfig config_for(size_t m_tile) {
    TileConfig config;
    const size_t first = least(m_tile, TILE_ROWS), second = m_tile - first;
    const auto set = [&](int tile, size_t rows) { config.set(size_t(tile), rows, TILE_ROW_BYTES); };
    set(SUMS_00, first), set(SUMS_01, first), set(ROWS_0, first);
    set(COLUMNS_0, TILE_ROWS), set(COLUMNS_1, TILE_ROWS);
    if (second > 0) set(SUMS_10, second), set(SUMS_11, second), set(ROWS_1, second);
    return config;
}

// The number of vectors of quants that are read in a step. For each of them, a part of the next block is prefetched.
template <size_t BITS>
constexpr size_t LOADS_PER_STEP = N_BLOCK / LANES * K_STEP / (BITS == SIX_BITS ? 4 : 32 / stored_bits(BITS));

// Dequantizes a step of a block of columns.
template <size_t BITS, size_t GROUP, bool PER_CHANNEL>
inline void dequantize(const Matmul& matmul, const uint8_t* block, size_t step, uint8_t* to, Prefetch<2>& prefetch) {
    if constexpr (BITS == SIX_BITS) {
        dequantize_six_bits<GROUP>(matmul, block, step, to, prefetch);
    } else {
        constexpr size_t bytes = N_BLOCK * 2 * sizeof(f16) + N_BLOCK * GROUP * stored_bits(BITS) / 8;
        constexpr size_t count = GROUP < K_STEP ? GROUP : K_STEP;
        for (size_t at = 0; at < K_STEP; at += count) {
            const size_t column = step * K_STEP + at;
            dequantize_group<BITS, count, PER_CHANNEL>(block + column / GROUP * bytes, column % GROUP,
                                                       to + at / 2 * TILE_ROW_BYTES, prefetch);
        }
    }
}

// The memory for the sums of a tile, and whether the sums begin with 0 or with the values that are stored there.
struct Sums {
    enum Begin { zero, stored } begin;
    float* at;
};

// Initializes the sums of a tile of the source, whose rows occupy one or two registers.
template <size_t REGISTERS>
inline void begin_sums(TileRegisters& registers, const Sums& sums) {
    auto& tiles = registers.tiles;
    const float *first = sums.at, *second = sums.at + TILE_ROWS * N_BLOCK;
    if (sums.begin == Sums::zero) {
        tiles.zero<SUMS_00>(), tiles.zero<SUMS_01>();
        if constexpr (REGISTERS == 2) tiles.zero<SUMS_10>(), tiles.zero<SUMS_11>();
    } else {
        tiles.load<SUMS_00>(first, SUM_BYTES), tiles.load<SUMS_01>(first + TILE_ROWS, SUM_BYTES);
        if constexpr (REGISTERS == 2)
            tiles.load<SUMS_10>(second, SUM_BYTES), tiles.load<SUMS_11>(second + TILE_ROWS, SUM_BYTES);
    }
}

// Multiplies the rows of a tile by the dequantized weights of one step, and adds the products to the sums.
template <size_t REGISTERS>
inline void multiply_step(TileRegisters& registers, const uint8_t* rows, const uint8_t* weights) {
    auto& tiles = registers.tiles;
    tiles.load<ROWS_0>(rows, STEP_ROW_BYTES);
    tiles.load<COLUMNS_0>(weights, TILE_ROW_BYTES);
    tiles.load<COLUMNS_1>(weights + STEP_BYTES / 2, TILE_ROW_BYTES);
    if constexpr (REGISTERS == 2) tiles.load<ROWS_1>(rows + TILE_ROWS * STEP_ROW_BYTES, STEP_ROW_BYTES);
    tiles.multiply<SUMS_00, ROWS_0, COLUMNS_0>();
    tiles.multiply<SUMS_01, ROWS_0, COLUMNS_1>();
    if constexpr (REGISTERS == 2) {
        tiles.multiply<SUMS_10, ROWS_1, COLUMNS_0>();
        tiles.multiply<SUMS_11, ROWS_1, COLUMNS_1>();
    }
}

template <size_t REGISTERS>
inline void store_sums(TileRegisters& registers, float* sums) {
    auto& tiles = registers.tiles;
    float* second = sums + TILE_ROWS * N_BLOCK;
    tiles.store<SUMS_00>(sums, SUM_BYTES), tiles.store<SUMS_01>(sums + TILE_ROWS, SUM_BYTES);
    if constexpr (REGISTERS == 2) tiles.store<SUMS_10>(second, SUM_BYTES), tiles.store<SUMS_11>(second + TILE_ROWS, SUM_BYTES);
}

// Multiplies the rows of a tile by the dequantized weights of several steps, and adds the products to the sums.
template <size_t REGISTERS>
inline void multiply_steps(TileRegisters& registers, const uint8_t* rows, size_t m_tile, const uint8_t* weights, size_t steps,
                           const Sums& sums) {
    begin_sums<REGISTERS>(registers, sums);
    for (size_t step = 0; step < steps; ++step, rows += m_tile * STEP_ROW_BYTES, weights += STEP_BYTES) {
        multiply_step<REGISTERS>(registers, rows, weights);
        if (step % STEPS_FEW == STEPS_FEW - 1) registers.keep_storing();
    }
    store_sums<REGISTERS>(registers, sums.at);
}

// Applies scales, adapters and the epilogue to the sums of `R` rows.
template <size_t R>
inline void finish_rows(const Matmul& matmul, const float* sums, size_t block, size_t row, const LoraDown* lora,
                        FloatData residual, FloatData dst) {
    const auto* channel_scales = (const f16*)(matmul.weights + block * n_block_bytes(matmul));
    for (size_t pair = 0; pair < PAIRS; ++pair) {
        Floats scales[2] = {broadcast(matmul.scale_factor), broadcast(matmul.scale_factor)};
        for (size_t v = 0; v < 2 && matmul.per_channel; ++v)
            scales[v] *= load(channel_scales + v * (N_BLOCK / 2) + pair * LANES);
        Floats total[R][2];
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v)
                total[r][v] = load(sums + r * N_BLOCK + v * (N_BLOCK / 2) + pair * LANES) * scales[v];
        if (lora) add_adapters<R>(matmul, block, pair, lora + row, total);
        for (size_t r = 0; r < R; ++r) add_bias(matmul, block, pair, total[r]);
        if (is_activation(matmul.epilogue)) {
            // Use a copy, so that the sums remain in registers if the matrix has no activation.
            Floats activations[R][2];
            std::memcpy(activations, total, sizeof(total));
            activate(matmul.epilogue, activations[0], R * 2);
            std::memcpy(total, activations, sizeof(total));
        }
        for (size_t r = 0; r < R; ++r) store_row(matmul, total[r], block, pair, row + r, residual, dst);
    }
}

void finish_tile(const Matmul& matmul, const PackedSrc& src, size_t tile, size_t block, const float* sums, FloatData residual,
                 FloatData dst) {
    constexpr size_t at_once = 4;
    const size_t rows = rows_of(src, tile), first = tile * src.m_tile;
    size_t r = 0;
    for (; r + at_once <= rows; r += at_once)
        finish_rows<at_once>(matmul, sums + r * N_BLOCK, block, first + r, src.lora, residual, dst);
    for (; r < rows; ++r) finish_rows<1>(matmul, sums + r * N_BLOCK, block, first + r, src.lora, residual, dst);
}

// Multiplies the only tile of a range by a block of columns. The weights of a step are dequantized while the processor computes
// the products of the previous steps. Both take about the same time.
template <size_t BITS, size_t GROUP, bool PER_CHANNEL, size_t REGISTERS>
inline void multiply_only_tile(const Matmul& matmul, const uint8_t* block, const uint8_t* rows, size_t m_tile,
                               TileRegisters& registers, Prefetch<2>& prefetch, float* sums) {
    constexpr size_t ahead = 2, buffers = ahead + 1;
    alignas(64) uint8_t weights[buffers][STEP_BYTES];
    const size_t steps = matmul.K / K_STEP;
    const auto dequantize_step = [&](size_t step) {
        if (step < steps) dequantize<BITS, GROUP, PER_CHANNEL>(matmul, block, step, weights[step % buffers], prefetch);
    };
    for (size_t step = 0; step < ahead; ++step) dequantize_step(step);
    begin_sums<REGISTERS>(registers, {Sums::zero, sums});
    for (size_t step = 0; step < steps; ++step, rows += m_tile * STEP_ROW_BYTES) {
        dequantize_step(step + ahead);
        multiply_step<REGISTERS>(registers, rows, weights[step % buffers]);
        if (step % STEPS_FEW == STEPS_FEW - 1) registers.keep_storing();
    }
    store_sums<REGISTERS>(registers, sums);
}

template <size_t BITS, size_t GROUP, bool PER_CHANNEL = false>
void multiply_as(const Matmul& matmul, const PackedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    alignas(64) uint8_t weights[STEPS_MANY * STEP_BYTES];
    alignas(64) float stored[STORED_TILES][M_TILE_MAX * N_BLOCK];
    TileRegisters registers(config_for(src.m_tile));
    const size_t steps = matmul.K / K_STEP, bytes = n_block_bytes(matmul);
    const size_t tiles = range.tile_end - range.tile_begin, steps_at_once = tiles <= FEW_TILES ? STEPS_FEW : STEPS_MANY;
    const bool is_whole = steps <= steps_at_once;
    // The number of tiles that are multiplied each time the weights are dequantized.
    const size_t tiles_at_once = is_whole ? tiles : STORED_TILES;
    const size_t times = steps * ((tiles + tiles_at_once - 1) / tiles_at_once);
    for (size_t n_block = range.block_begin; n_block < range.block_end; ++n_block) {
        const uint8_t* block = matmul.weights + n_block * bytes;
        const uint8_t* next = matmul.weights + (n_block + 1 < range.block_end ? n_block + 1 : range.next_block) * bytes;
        Prefetch<2> prefetch(next, next + bytes, times * LOADS_PER_STEP<BITS>);
        const auto rows_at = [&](size_t tile, size_t step) {
            return src.data + (tile * matmul.K + step * K_STEP) * src.m_tile * sizeof(bf16);
        };
        const auto is_in_two = [&](size_t tile) { return rows_of(src, tile) > TILE_ROWS; };
        if (tiles == 1) {
            auto* multiply = is_in_two(range.tile_begin) ? multiply_only_tile<BITS, GROUP, PER_CHANNEL, 2>
                                                         : multiply_only_tile<BITS, GROUP, PER_CHANNEL, 1>;
            multiply(matmul, block, rows_at(range.tile_begin, 0), src.m_tile, registers, prefetch, stored[0]);
            finish_tile(matmul, src, range.tile_begin, n_block, stored[0], residual, dst);
            continue;
        }
        for (size_t begin = range.tile_begin; begin < range.tile_end; begin += tiles_at_once) {
            const size_t end = least(begin + tiles_at_once, range.tile_end);
            for (size_t step = 0; step < steps; step += steps_at_once) {
                const size_t count = least(steps_at_once, steps - step);
                for (size_t i = 0; i < count; ++i) {
                    dequantize<BITS, GROUP, PER_CHANNEL>(matmul, block, step + i, weights + i * STEP_BYTES, prefetch);
                    if (i % STEPS_FEW == STEPS_FEW - 1) registers.keep_storing();
                }
                for (size_t tile = begin; tile < end; ++tile) {
                    const Sums sums{step == 0 ? Sums::zero : Sums::stored, stored[is_whole ? 0 : tile - begin]};
                    auto* multiply = is_in_two(tile) ? multiply_steps<2> : multiply_steps<1>;
                    multiply(registers, rows_at(tile, step), src.m_tile, weights, count, sums);
                    if (step + count == steps) finish_tile(matmul, src, tile, n_block, sums.at, residual, dst);
                }
            }
        }
    }
}

template <size_t BITS>
auto* multiply_bits(const Matmul& matmul) {
    if (matmul.per_channel) return has_wide_groups(matmul) ? multiply_as<BITS, WIDE_GROUP, true> : multiply_as<BITS, 32, true>;
    return has_wide_groups(matmul) ? multiply_as<BITS, WIDE_GROUP>
           : matmul.group == 16    ? multiply_as<BITS, 16>
                                   : multiply_as<BITS, 32>;
}

void multiply(const Matmul& matmul, const PackedSrc& src, const DstRange& range, FloatData residual, FloatData dst) {
    auto* multiply = matmul.bits == E2M1_BITS ? multiply_as<E2M1_BITS, 32>
                     : matmul.bits == SIX_BITS
                         ? matmul.group == 16 ? multiply_as<SIX_BITS, SUPER_GROUP> : multiply_as<SIX_BITS, 32>
                     : matmul.bits == 4 ? multiply_bits<4>(matmul)
                                        : multiply_bits<8>(matmul);
    multiply(matmul, src, range, residual, dst);
}

// Below 128 rows per thread, it takes longer to dequantize all weights in each thread than to read rows that other threads have
// packed. A megabyte of rows fits into the second-level cache together with the dequantized weights. A block of columns is
// dequantized for at least two tiles (64 rows) if a thread has that many.
constexpr Division DIVISION = {rows_per_tile, PACKED_ROWS, 128, 512 << 10, 2};

}  // namespace

const Kernels ovfleet::projection::OVFLEET_KERNELS = {DIVISION, src_bytes, pack_src, multiply, nullptr, nullptr, lora_down};
