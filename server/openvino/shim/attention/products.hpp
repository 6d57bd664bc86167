// The products of the attention: queries with the keys of a block, and weights with its values. Only for kernels.cpp.
#pragma once

#include "cache.hpp"

namespace {

// Queries and vectors of a tile: as many sums as registers hold.
#if defined(__AVX512F__)
constexpr size_t SCORE_ROWS = 8, VALUE_ROWS = 6;
#elif defined(__AVX2__)
constexpr size_t SCORE_ROWS = 3, VALUE_ROWS = 3;
#else
constexpr size_t SCORE_ROWS = 1, VALUE_ROWS = 3;
#endif
// Vectors along the values of a tile.
constexpr size_t VALUE_VECTORS = 4;
constexpr size_t BLOCK_VECTORS = BLOCK_TOKENS / LANES;

// Memory that is read soon, fetched a little with each step of a loop: more at once would hold up what is read now. Blocks lie
// anywhere, so that no processor guesses which is next.
struct Ahead {
    const uint8_t* at;
    size_t step;
    void fetch() {
        __builtin_prefetch(at);
        at += step;
    }
};

// Scores of `R` queries with the keys of a block. `sums` of a query are those of its numbers, group by group.
template <typename T, size_t R>
inline void score_rows(const Layer& layer, const uint8_t* block, const float* queries, const float* sums, float* scores,
                       Ahead& ahead) {
    const Keys<T> keys{block};
    constexpr bool quantised = sizeof(T) == 1;
    const size_t size = layer.key_size, groups = quantised ? size / KEY_GROUP : 1, length = size / groups;
    constexpr size_t V = BLOCK_VECTORS;
    Floats total[R][V] = {};
    for (size_t group = 0; group < groups; ++group) {
        Floats sum[R][V] = {};
        for (size_t i = group * length; i < (group + 1) * length; ++i) {
            ahead.fetch();
            Floats key[V];
            for (size_t v = 0; v < V; ++v) key[v] = load(keys.of(i) + v * LANES);
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < V; ++v) sum[r][v] += key[v] * queries[r * size + i];
        }
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < V; ++v) {
                if (quantised) {
                    const float* scales = keys.scales(layer, group) + v * LANES;
                    total[r][v] += sum[r][v] * load(scales) + load(scales + BLOCK_TOKENS) * sums[r * groups + group];
                } else {
                    total[r][v] = sum[r][v];
                }
            }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(scores + r * KEYS_AT_ONCE + v * LANES, total[r][v]);
}

template <typename T, size_t R = SCORE_ROWS>
inline void score(const Layer& layer, const uint8_t* block, const float* queries, const float* sums, float* scores,
                  size_t rows, Ahead ahead) {
    const size_t groups = sizeof(T) == 1 ? layer.key_size / KEY_GROUP : 0;
    for (; rows >= R; rows -= R) {
        score_rows<T, R>(layer, block, queries, sums, scores, ahead);
        queries += R * layer.key_size;
        sums += R * groups;
        scores += R * KEYS_AT_ONCE;
    }
    if constexpr (R > 1)
        if (rows) score<T, R - 1>(layer, block, queries, sums, scores, rows, ahead);
}

// Adds weighted values of a block to what `R` queries have.
template <typename T, size_t R, size_t V>
inline void weigh_rows(const T* values, size_t size, const float* weights, float* sums, Ahead& ahead) {
    Floats sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = load(sums + r * size + v * LANES);
    for (size_t token = 0; token < BLOCK_TOKENS; ++token) {
        ahead.fetch();
        Floats value[V];
        for (size_t v = 0; v < V; ++v) value[v] = load(values + token * size + v * LANES);
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < V; ++v) sum[r][v] += value[v] * weights[r * KEYS_AT_ONCE + token];
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(sums + r * size + v * LANES, sum[r][v]);
}

template <typename T, size_t R = VALUE_ROWS>
inline void weigh(const T* values, size_t size, const float* weights, float* sums, size_t rows, Ahead ahead) {
    for (; rows >= R; rows -= R) {
        size_t at = 0;
        for (; at + VALUE_VECTORS * LANES <= size; at += VALUE_VECTORS * LANES)
            weigh_rows<T, R, VALUE_VECTORS>(values + at, size, weights, sums + at, ahead);
        for (; at < size; at += LANES) weigh_rows<T, R, 1>(values + at, size, weights, sums + at, ahead);
        weights += R * KEYS_AT_ONCE;
        sums += R * size;
    }
    if constexpr (R > 1)
        if (rows) weigh<T, R - 1>(values, size, weights, sums, rows, ahead);
}

#if defined(__AVX512BF16__)

// Two numbers beside each other, the first in the lower half.
inline __m512i paired(Floats first, Floats second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

inline void pair(const float* from, size_t count, uint32_t* to) {
    for (size_t i = 0; i < count; i += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
        _mm512_storeu_si512(to + i / 2, (__m512i)both);
    }
}

// Adds to sums of `R` rows and `V` vectors: those of products of pairs, `[pair]` of each row with `[pair][column]`.
template <size_t R, size_t V>
inline void multiply_tile(const uint32_t* left, size_t left_row, size_t pairs, const uint32_t* right, size_t columns,
                          float* sums, size_t sums_row, bool add) {
    __m512 sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v)
            sum[r][v] = add ? _mm512_loadu_ps(sums + r * sums_row + v * 16) : _mm512_setzero_ps();
    for (size_t i = 0; i < pairs; ++i) {
        __m512i two[V];
        for (size_t v = 0; v < V; ++v) two[v] = _mm512_loadu_si512(right + i * columns + v * 16);
        for (size_t r = 0; r < R; ++r) {
            const __m512i one = _mm512_set1_epi32(int(left[r * left_row + i]));
            for (size_t v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)one, (__m512bh)two[v]);
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) _mm512_storeu_ps(sums + r * sums_row + v * 16, sum[r][v]);
}

template <size_t V, size_t R>
inline void multiply(const uint32_t* left, size_t left_row, size_t pairs, const uint32_t* right, size_t columns,
                     float* sums, size_t sums_row, bool add, size_t rows) {
    for (; rows >= R; rows -= R) {
        size_t at = 0;
        for (; at + V * 16 <= columns; at += V * 16)
            multiply_tile<R, V>(left, left_row, pairs, right + at, columns, sums + at, sums_row, add);
        for (; at < columns; at += 16)
            multiply_tile<R, 1>(left, left_row, pairs, right + at, columns, sums + at, sums_row, add);
        left += R * left_row;
        sums += R * sums_row;
    }
    if constexpr (R > 1)
        if (rows) multiply<V, R / 2>(left, left_row, pairs, right, columns, sums, sums_row, add, rows);
}

#endif

}  // namespace
