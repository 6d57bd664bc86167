// The products of the attention in bf16, with the dot products of AVX-512. Only for kernels.cpp.
#pragma once

#include "cache_block.hpp"

#if defined(__AVX512BF16__)

namespace {

// Interleaves the numbers of two vectors as pairs of bf16, the first in the lower half.
inline __m512i interleave_bf16(Floats first, Floats second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Converts numbers to bf16.
inline void convert_to_bf16(const float* from, size_t count, uint32_t* to) {
    for (size_t i = 0; i < count; i += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
        _mm512_storeu_si512(to + i / 2, (__m512i)both);
    }
}

// Multiplies `R` rows of pairs, `left` [row][pair], by `V` vectors of columns of `right` [pair][column]. Adds to the sums, or
// replaces them.
template <size_t R, size_t V>
inline void multiply_bf16_tile(const uint32_t* left, size_t left_stride, size_t pairs, const uint32_t* right, size_t columns,
                               float* sums, size_t sums_stride, bool add) {
    __m512 sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = add ? _mm512_loadu_ps(sums + r * sums_stride + v * 16) : _mm512_setzero_ps();
    for (size_t i = 0; i < pairs; ++i) {
        __m512i columns_pair[V];
        for (size_t v = 0; v < V; ++v) columns_pair[v] = _mm512_loadu_si512(right + i * columns + v * 16);
        for (size_t r = 0; r < R; ++r) {
            const __m512i pair = _mm512_set1_epi32(int(left[r * left_stride + i]));
            for (size_t v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)pair, (__m512bh)columns_pair[v]);
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) _mm512_storeu_ps(sums + r * sums_stride + v * 16, sum[r][v]);
}

template <size_t V, size_t R>
inline void multiply_bf16(const uint32_t* left, size_t left_stride, size_t pairs, const uint32_t* right, size_t columns,
                          float* sums, size_t sums_stride, bool add, size_t rows) {
    for (; rows >= R; rows -= R) {
        size_t at = 0;
        for (; at + V * 16 <= columns; at += V * 16)
            multiply_bf16_tile<R, V>(left, left_stride, pairs, right + at, columns, sums + at, sums_stride, add);
        for (; at < columns; at += 16)
            multiply_bf16_tile<R, 1>(left, left_stride, pairs, right + at, columns, sums + at, sums_stride, add);
        left += R * left_stride;
        sums += R * sums_stride;
    }
    if constexpr (R > 1)
        if (rows) multiply_bf16<V, R / 2>(left, left_stride, pairs, right, columns, sums, sums_stride, add, rows);
}

}  // namespace

#endif
