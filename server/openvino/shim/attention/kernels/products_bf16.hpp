// Computes the products of attention in bf16 with the dot-product instructions of AVX-512. Only for kernels.cpp.
#pragma once

#include "products_f32.hpp"

#if defined(__AVX512BF16__)

namespace {

// Interleaves the numbers of two vectors as pairs of bf16, with the numbers of `first` in the lower halves.
inline __m512i interleave_bf16(Floats first, Floats second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// Stores numbers as bf16, and returns the rounded numbers.
inline Floats store_bf16(Floats numbers, uint32_t* to) {
    const auto rounded = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
    _mm256_storeu_si256((__m256i*)to, rounded);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
}

// Returns dimensions `i` and `i + 1` of a group as pairs of bf16, for the keys in vector `v`.
template <typename T>
inline __m512i key_pair(const KeyGroup<T>& keys, size_t i, size_t v) {
    if constexpr (IS_PAIRED<T>) return (__m512i)keys.pairs(i, v);
    return interleave_bf16(keys.key(i, v), keys.key(i + 1, v));
}

// Returns the values of tokens `token` and `token + 1` as pairs of bf16, starting at element `i`.
template <typename T>
inline __m512i value_pair(const Layer& layer, const uint8_t* block, size_t token, size_t i) {
    const TokenValue<T> first(layer, block, token), second(layer, block, token + 1);
    if constexpr (IS_PAIRED<T>) return (__m512i)first.pairs(i);
    return interleave_bf16(first.value(i), second.value(i));
}

// Converts `count` floats to bf16, and stores two of them in each word of `to`.
inline void convert_to_bf16(const float* from, size_t count, uint32_t* to) {
    for (size_t i = 0; i < count; i += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
        _mm512_storeu_si512(to + i / 2, (__m512i)both);
    }
}

// Multiplies `R` rows of pairs, `left` [row][pair], by `V` vectors of columns of `right` [pair][column]. Adds the products to
// `sums` if `add` is set, and otherwise replaces `sums` with them.
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

// Computes the scores of `R` queries with the keys of a block of the cache. Products are summed in the same order as in
// `multiply_bf16`.
template <typename T, size_t R>
inline void score_bf16_tile(const Layer& layer, const uint8_t* block, const uint32_t* queries, float* scores,
                            Prefetch& prefetch) {
    constexpr size_t V = BLOCK_VECTORS, GROUP_PAIRS = KEY_GROUP / 2;
    const size_t pairs = layer.key_size / 2;
    __m512 sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_ps();
    for (size_t group = 0; group < layer.key_size / KEY_GROUP; ++group) {
        const KeyGroup<T> keys(layer, block, group);
        for (size_t i = 0; i < GROUP_PAIRS; ++i) {
            prefetch.next();
            prefetch.next();
            __m512i key[V];
            for (size_t v = 0; v < V; ++v) key[v] = key_pair(keys, 2 * i, v);
            for (size_t r = 0; r < R; ++r) {
                const __m512i query = _mm512_set1_epi32(int(queries[r * pairs + group * GROUP_PAIRS + i]));
                for (size_t v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)query, (__m512bh)key[v]);
            }
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) _mm512_storeu_ps(scores + r * CHUNK_KEYS + v * LANES, sum[r][v]);
}

template <typename T, size_t R = SCORE_QUERIES>
inline void score_bf16(const Layer& layer, const uint8_t* block, const uint32_t* queries, float* scores, size_t count,
                       Prefetch prefetch) {
    for (; count >= R; count -= R) {
        score_bf16_tile<T, R>(layer, block, queries, scores, prefetch);
        queries += R * layer.key_size / 2;
        scores += R * CHUNK_KEYS;
    }
    if constexpr (R > 1)
        if (count) score_bf16<T, R - 1>(layer, block, queries, scores, count, prefetch);
}

// Adds the weighted values of a block of the cache to the sums of `R` queries, two tokens at a time, for the elements in `V`
// vectors, starting at element `begin`.
template <typename T, size_t R, size_t V>
inline void accumulate_bf16_tile(const Layer& layer, const uint8_t* block, size_t begin, const uint32_t* weights, float* sums,
                                 Prefetch& prefetch) {
    const size_t size = layer.value_size;
    sums += begin;
    __m512 sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = _mm512_loadu_ps(sums + r * size + v * LANES);
    for (size_t token = 0; token < BLOCK_TOKENS; token += 2) {
        prefetch.next();
        prefetch.next();
        __m512i value[V];
        for (size_t v = 0; v < V; ++v) value[v] = value_pair<T>(layer, block, token, begin + v * LANES);
        for (size_t r = 0; r < R; ++r) {
            const __m512i weight = _mm512_set1_epi32(int(weights[r * CHUNK_PAIRS + token / 2]));
            for (size_t v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)weight, (__m512bh)value[v]);
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) _mm512_storeu_ps(sums + r * size + v * LANES, sum[r][v]);
}

template <typename T, size_t R = VALUE_QUERIES>
inline void accumulate_values_bf16(const Layer& layer, const uint8_t* block, const uint32_t* weights, float* sums, size_t count,
                                   Prefetch prefetch) {
    const size_t size = layer.value_size;
    for (; count >= R; count -= R) {
        size_t at = 0;
        for (; at + VALUE_VECTORS * LANES <= size; at += VALUE_VECTORS * LANES)
            accumulate_bf16_tile<T, R, VALUE_VECTORS>(layer, block, at, weights, sums, prefetch);
        for (; at < size; at += LANES) accumulate_bf16_tile<T, R, 1>(layer, block, at, weights, sums, prefetch);
        weights += R * CHUNK_PAIRS;
        sums += R * size;
    }
    if constexpr (R > 1)
        if (count) accumulate_values_bf16<T, R - 1>(layer, block, weights, sums, count, prefetch);
}

}  // namespace

#endif
