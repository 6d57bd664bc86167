// Computes the products of attention in f32: the products of queries and the keys of a block, and those of softmax weights and
// the values of a block. Only for kernels.cpp.
#pragma once

#include "cache_block.hpp"

namespace {

// The numbers of queries and of vectors whose sums are computed together, for scores and for weighted values. The sums, and the
// scales and minima of 8-bit keys, fit into the 16 registers of AVX2 and the 32 registers of AVX-512.
#if defined(__AVX512F__)
constexpr size_t SCORE_QUERIES = 8, SCORE_VECTORS = BLOCK_VECTORS, VALUE_QUERIES = 6, VALUE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr size_t SCORE_QUERIES = 4, SCORE_VECTORS = 2, VALUE_QUERIES = 4, VALUE_VECTORS = 2;
#else
constexpr size_t SCORE_QUERIES = 1, SCORE_VECTORS = BLOCK_VECTORS, VALUE_QUERIES = 3, VALUE_VECTORS = 4;
#endif

// Prefetches the memory that is read next, because the processor cannot predict the addresses of blocks. Each iteration of a
// loop prefetches only a small part of this memory, to avoid delaying the current reads.
struct Prefetch {
    const uint8_t* at;
    size_t step;
    void next() {
        __builtin_prefetch(at);
        at += step;
    }
    // Returns a prefetch that stays at the same address. Use it if a loop reads a block again: the first loop over the block
    // has already prefetched the memory that is read after the block.
    Prefetch without_progress() const { return {at, 0}; }
};

// Computes the scores of `R` queries with the keys in `SCORE_VECTORS` vectors of a block, starting at vector `first`. Products
// are summed in the order of the dimensions, regardless of `R`.
template <typename T, size_t R>
inline void score_tile(const Layer& layer, const uint8_t* block, size_t first, const float* queries, float* scores,
                       Prefetch& prefetch) {
    constexpr size_t V = SCORE_VECTORS;
    const size_t size = layer.key_size;
    Floats sum[R][V] = {};
    for (size_t group = 0; group < size / KEY_GROUP; ++group) {
        const KeyGroup<T, V> keys(layer, block, group, first);
        for (size_t i = 0; i < KEY_GROUP; ++i) {
            prefetch.next();
            Floats key[V];
            for (size_t v = 0; v < V; ++v) key[v] = keys.key(i, v);
            for (size_t r = 0; r < R; ++r) {
                const Floats query = broadcast(queries[r * size + group * KEY_GROUP + i]);
                for (size_t v = 0; v < V; ++v) sum[r][v] = fused_multiply_add(key[v], query, sum[r][v]);
            }
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(scores + r * CHUNK_KEYS + (first + v) * LANES, sum[r][v]);
}

template <typename T, size_t R = SCORE_QUERIES>
inline void score(const Layer& layer, const uint8_t* block, const float* queries, float* scores, size_t count,
                  Prefetch prefetch) {
    for (; count >= R; count -= R) {
        score_tile<T, R>(layer, block, 0, queries, scores, prefetch);
        Prefetch same = prefetch.without_progress();
        for (size_t first = SCORE_VECTORS; first < BLOCK_VECTORS; first += SCORE_VECTORS)
            score_tile<T, R>(layer, block, first, queries, scores, same);
        queries += R * layer.key_size;
        scores += R * CHUNK_KEYS;
    }
    if constexpr (R > 1)
        if (count) score<T, R - 1>(layer, block, queries, scores, count, prefetch);
}

// Adds the weighted values of a block to the sums of `R` queries, token by token, for the elements in `V` vectors, starting at
// element `first`.
template <typename T, size_t R, size_t V>
inline void accumulate_tile(const Layer& layer, const uint8_t* block, size_t first, const float* weights, float* sums,
                            Prefetch& prefetch) {
    const size_t size = layer.value_size;
    sums += first;
    Floats sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = load(sums + r * size + v * LANES);
    for (size_t token = 0; token < BLOCK_TOKENS; ++token) {
        prefetch.next();
        const TokenValue<T> of_token(layer, block, token);
        Floats value[V];
        for (size_t v = 0; v < V; ++v) value[v] = of_token.value(first + v * LANES);
        for (size_t r = 0; r < R; ++r) {
            const Floats weight = broadcast(weights[r * CHUNK_KEYS + token]);
            for (size_t v = 0; v < V; ++v) sum[r][v] = fused_multiply_add(value[v], weight, sum[r][v]);
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(sums + r * size + v * LANES, sum[r][v]);
}

template <typename T, size_t R = VALUE_QUERIES>
inline void accumulate_values(const Layer& layer, const uint8_t* block, const float* weights, float* sums, size_t count,
                              Prefetch prefetch) {
    const size_t size = layer.value_size;
    for (; count >= R; count -= R) {
        Prefetch next = prefetch;
        size_t at = 0;
        for (; at + VALUE_VECTORS * LANES <= size; at += VALUE_VECTORS * LANES) {
            accumulate_tile<T, R, VALUE_VECTORS>(layer, block, at, weights, sums, next);
            next = prefetch.without_progress();
        }
        for (; at < size; at += LANES) accumulate_tile<T, R, 1>(layer, block, at, weights, sums, next);
        weights += R * CHUNK_KEYS;
        sums += R * size;
    }
    if constexpr (R > 1)
        if (count) accumulate_values<T, R - 1>(layer, block, weights, sums, count, prefetch);
}

}  // namespace
