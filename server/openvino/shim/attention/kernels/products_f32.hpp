// The products of the attention in f32: of queries with the keys of a block, and of weights with its values. Only for
// kernels.cpp.
#pragma once

#include "cache_block.hpp"

namespace {

// Queries of a tile: registers hold the sums of a tile.
#if defined(__AVX512F__)
constexpr size_t SCORE_QUERIES = 8, VALUE_QUERIES = 6;
#elif defined(__AVX2__)
constexpr size_t SCORE_QUERIES = 3, VALUE_QUERIES = 3;
#else
constexpr size_t SCORE_QUERIES = 1, VALUE_QUERIES = 3;
#endif
// Vectors of values of a tile.
constexpr size_t VALUE_VECTORS = 4;
constexpr size_t BLOCK_VECTORS = BLOCK_TOKENS / LANES;

// Prefetches memory that is read soon, a little with each iteration of a loop: more at once would delay the current reads. The
// processor cannot predict the addresses of blocks.
struct Prefetch {
    const uint8_t* at;
    size_t step;
    void next() {
        __builtin_prefetch(at);
        at += step;
    }
};

// The scores of `R` queries with the keys of a block. `sums` has the sum of each group of a query.
template <typename T, size_t R>
inline void score_tile(const Layer& layer, const uint8_t* block, const float* queries, const float* sums, float* scores,
                       Prefetch& prefetch) {
    const Keys<T> keys{block};
    constexpr bool is_quantized = sizeof(T) == 1;
    const size_t size = layer.key_size, groups = is_quantized ? size / KEY_GROUP : 1, length = size / groups;
    constexpr size_t V = BLOCK_VECTORS;
    Floats total[R][V] = {};
    for (size_t group = 0; group < groups; ++group) {
        Floats sum[R][V] = {};
        for (size_t i = group * length; i < (group + 1) * length; ++i) {
            prefetch.next();
            Floats key[V];
            for (size_t v = 0; v < V; ++v) key[v] = load(keys.of(i) + v * LANES);
            for (size_t r = 0; r < R; ++r)
                for (size_t v = 0; v < V; ++v) sum[r][v] += key[v] * queries[r * size + i];
        }
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < V; ++v) {
                if (is_quantized) {
                    const float* scales = keys.scales(layer, group) + v * LANES;
                    total[r][v] += sum[r][v] * load(scales) + load(scales + BLOCK_TOKENS) * sums[r * groups + group];
                } else {
                    total[r][v] = sum[r][v];
                }
            }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(scores + r * CHUNK_KEYS + v * LANES, total[r][v]);
}

template <typename T, size_t R = SCORE_QUERIES>
inline void score(const Layer& layer, const uint8_t* block, const float* queries, const float* sums, float* scores,
                  size_t count, Prefetch prefetch) {
    const size_t groups = sizeof(T) == 1 ? layer.key_size / KEY_GROUP : 0;
    for (; count >= R; count -= R) {
        score_tile<T, R>(layer, block, queries, sums, scores, prefetch);
        queries += R * layer.key_size;
        sums += R * groups;
        scores += R * CHUNK_KEYS;
    }
    if constexpr (R > 1)
        if (count) score<T, R - 1>(layer, block, queries, sums, scores, count, prefetch);
}

// Adds the weighted values of a block to the sums of `R` queries.
template <typename T, size_t R, size_t V>
inline void accumulate_tile(const T* values, size_t size, const float* weights, float* sums, Prefetch& prefetch) {
    Floats sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = load(sums + r * size + v * LANES);
    for (size_t token = 0; token < BLOCK_TOKENS; ++token) {
        prefetch.next();
        Floats value[V];
        for (size_t v = 0; v < V; ++v) value[v] = load(values + token * size + v * LANES);
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < V; ++v) sum[r][v] += value[v] * weights[r * CHUNK_KEYS + token];
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(sums + r * size + v * LANES, sum[r][v]);
}

template <typename T, size_t R = VALUE_QUERIES>
inline void accumulate_values(const T* values, size_t size, const float* weights, float* sums, size_t count,
                              Prefetch prefetch) {
    for (; count >= R; count -= R) {
        size_t at = 0;
        for (; at + VALUE_VECTORS * LANES <= size; at += VALUE_VECTORS * LANES)
            accumulate_tile<T, R, VALUE_VECTORS>(values + at, size, weights, sums + at, prefetch);
        for (; at < size; at += LANES) accumulate_tile<T, R, 1>(values + at, size, weights, sums + at, prefetch);
        weights += R * CHUNK_KEYS;
        sums += R * size;
    }
    if constexpr (R > 1)
        if (count) accumulate_values<T, R - 1>(values, size, weights, sums, count, prefetch);
}

}  // namespace
