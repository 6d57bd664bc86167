// The products of adapters, in f32. Only for kernels.
#pragma once

#include "../../vectors.hpp"
#include "epilogue.hpp"
#include "norm.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// Adds the products of `up` and the results of `down` to the totals of rows with the same adapter. The products are added in
// ascending order of the ranks, so that the result of a row does not depend on other rows.
template <size_t R>
inline void add_up(const Matmul& matmul, size_t block, size_t pair, const LoraDown* lora, Floats (*total)[2]) {
    const auto* up_blocks = behind_adapters<UpBlock>(matmul, lora->adapter->up_blocks) + block * 2;
    const float* down[R];
    for (size_t r = 0; r < R; ++r) down[r] = lora[r].values;
    for (size_t v = 0; v < 2; ++v) {
        const float* up = behind_adapters<float>(matmul, up_blocks[v].up) + pair * LANES;
        Floats sum[R];
        for (size_t r = 0; r < R; ++r) sum[r] = total[r][v];
        for (size_t rank = up_blocks[v].first; rank < up_blocks[v].last; ++rank, up += N_BLOCK / 2) {
            const Floats weights = load(up);
            for (size_t r = 0; r < R; ++r) sum[r] += weights * down[r][rank];
        }
        for (size_t r = 0; r < R; ++r) total[r][v] = sum[r];
    }
}

// Adds the products of adapters to the totals of `R` rows. The function is not inlined, so that it does not slow down
// projections without adapters.
template <size_t R>
__attribute__((noinline)) void add_adapters(const Matmul& matmul, size_t block, size_t pair, const LoraDown* lora,
                                            Floats (*total)[2]) {
    bool is_same = lora->adapter;
    for (size_t r = 1; r < R; ++r) is_same = is_same && lora[r].adapter == lora->adapter;
    if (is_same) return add_up<R>(matmul, block, pair, lora, total);
    for (size_t r = 0; r < R; ++r)
        if (lora[r].adapter) add_up<1>(matmul, block, pair, lora + r, total + r);
}

// Multiplies `R` rows, each scaled by its factor, by `count` ranks of an adapter. The number of ranks that are computed at a
// time is limited, because their sums must fit into registers.
template <size_t R, typename T>
void lora_down_tile(const Matmul& matmul, const float* down, size_t count, const T* const* rows, const float* factors,
                    float* const* to) {
    constexpr size_t at_once = LANES == 16 || R < 3 ? RANK_BLOCK : RANK_BLOCK / 2;
    for (size_t rank = 0; rank < count; rank += at_once, down += at_once * matmul.K) {
        Floats sum[R][at_once];
        for (size_t r = 0; r < R; ++r)
            for (size_t k = 0; k < at_once; ++k) sum[r][k] = Floats{};
        for (size_t at = 0; at < matmul.K; at += LANES) {
            Floats row[R];
            for (size_t r = 0; r < R; ++r) row[r] = load(rows[r] + at);
            for (size_t k = 0; k < at_once; ++k) {
                const Floats weights = load(down + k * matmul.K + at);
                for (size_t r = 0; r < R; ++r) sum[r][k] += row[r] * weights;
            }
        }
        for (size_t r = 0; r < R; ++r)
            for (size_t k = 0; k < at_once; ++k) to[r][rank + k] = horizontal_sum(sum[r][k]) * factors[r];
    }
}

template <typename T>
void lora_down_from(const Matmul& matmul, const void* src, const AdapterRows& rows, size_t first, size_t last) {
    constexpr size_t tile = 4;
    static constexpr decltype(&lora_down_tile<1, T>) by_rows[tile] = {lora_down_tile<1, T>, lora_down_tile<2, T>,
                                                                      lora_down_tile<3, T>, lora_down_tile<4, T>};
    const float* down = behind_adapters<float>(matmul, rows.adapter->down) + first * matmul.K;
    for (size_t begin = 0; begin < rows.count; begin += tile) {
        const size_t count = rows.count - begin < tile ? rows.count - begin : tile;
        const T* from[tile];
        float factors[tile], *to[tile];
        for (size_t r = 0; r < count; ++r) {
            from[r] = (const T*)src + rows.rows[begin + r] * matmul.K;
            factors[r] = matmul.norm ? inverse_rms(matmul, from[r]) : 1;
            to[r] = rows.down + (begin + r) * rows.adapter->ranks + first;
        }
        by_rows[count - 1](matmul, down, last - first, from, factors, to);
    }
}

void lora_down(const Matmul& matmul, FloatData src, const AdapterRows& rows, size_t first, size_t last) {
    (src.is_bf16 ? lora_down_from<bf16> : lora_down_from<float>)(matmul, src.data, rows, first, last);
}

}  // namespace
