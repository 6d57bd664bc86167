// Selects the keys that a tile of a long prompt attends to with sparse attention. Only for kernels.cpp.
//
// A sample of the tile's queries is multiplied by all keys. The fraction of the sample's attention mass that a chunk of
// keys receives is used as an estimate of this fraction for all queries of the tile (SampleAttention; Zhu et al., 2024).
// Chunks are selected in order of decreasing mass until they cover the required fraction (XAttention; Xu et al., 2025). The
// first chunk and the chunks that contain the keys of the tile's own tokens are always selected.
#pragma once

#include "products_f32.hpp"

namespace {

// The interval, in tokens, at which the queries of a tile are sampled.
constexpr size_t SAMPLE_STEP = 8;
// The minimum numbers of queries and of chunks for which a selection is worthwhile.
constexpr size_t SELECTION_QUERIES_MIN = 16, SELECTION_CHUNKS_MIN = 16;

inline size_t chunks_of(size_t blocks) { return (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS; }

// The queries of a tile that are multiplied by all keys: the queries of all heads for every `step`-th token.
struct Sample {
    size_t group, step, count;
    size_t query(size_t index) const { return (index / group * step + step - 1) * group + index % group; }
};

inline Sample sample_of(size_t group, size_t queries) {
    const size_t tokens = queries / group, step = tokens < SAMPLE_STEP ? tokens : SAMPLE_STEP;
    return {group, step, tokens / step * group};
}

// Scratch memory of the selection:
// - the queries of the sample `[query][key_size]`, and their scores with the keys of a chunk `[query][CHUNK_KEYS]`;
// - the largest score of each query in each chunk, and the mass of the chunk relative to that score, both
//   `[query][chunk]`;
// - the fraction of the mass that each chunk has;
// - the indices of the selected chunks.
struct SelectionScratch {
    float *queries, *scores, *maxima, *masses, *fractions;
    uint32_t* chunks;
};

template <typename Allocate>
inline void allocate_selection(const Layer& layer, size_t queries, size_t blocks, SelectionScratch& scratch,
                               Allocate allocate) {
    const bool selects = layer.attention_mass > 0 && queries >= SELECTION_QUERIES_MIN;
    const size_t sampled = selects ? sample_of(layer.heads / layer.kv_heads, queries).count : 0, chunks = chunks_of(blocks);
    scratch.queries = allocate(sampled * layer.key_size);
    scratch.scores = allocate(sampled * CHUNK_KEYS);
    scratch.maxima = allocate(sampled * chunks);
    scratch.masses = allocate(sampled * chunks);
    scratch.fractions = allocate(selects ? chunks : 0);
    scratch.chunks = (uint32_t*)allocate(selects ? chunks : 0);
}

// Masks the scores of the keys before `from`, and of those from `to` on. Returns the sum of exp(score - largest score) over the
// remaining keys, and stores the largest score in `most`. Both are computed from scores multiplied by `scale`.
inline float mass_of(float* scores, size_t from, size_t to, size_t keys, float scale, float& most) {
    for (size_t key = 0; key < from; ++key) scores[key] = MASKED;
    for (size_t key = to; key < keys; ++key) scores[key] = MASKED;
    Floats high = load(scores);
    for (size_t key = LANES; key < keys; key += LANES) high = larger(high, load(scores + key));
    most = largest(high) * scale;
    if (most == MASKED) return 0;
    Floats sum = {};
    for (size_t key = 0; key < keys; key += LANES) sum += exponential(load(scores + key) * scale - most);
    return horizontal_sum(sum);
}

inline float power(float x) { return exponential(broadcast(x))[0]; }

// Computes the fraction of the sample's mass that each chunk has.
inline void compute_fractions(const SelectionScratch& scratch, size_t sampled, size_t chunks) {
    for (size_t chunk = 0; chunk < chunks; ++chunk) scratch.fractions[chunk] = 0;
    for (size_t query = 0; query < sampled; ++query) {
        const float *maxima = scratch.maxima + query * chunks, *masses = scratch.masses + query * chunks;
        float most = MASKED, total = 0;
        for (size_t chunk = 0; chunk < chunks; ++chunk) most = maxima[chunk] > most ? maxima[chunk] : most;
        for (size_t chunk = 0; chunk < chunks; ++chunk)
            if (masses[chunk] > 0) total += masses[chunk] * power(maxima[chunk] - most);
        for (size_t chunk = 0; chunk < chunks; ++chunk)
            if (masses[chunk] > 0)
                scratch.fractions[chunk] += masses[chunk] * power(maxima[chunk] - most) / (total * float(sampled));
    }
}

// Selects the first chunk, all chunks from `own` on, and then further chunks in order of decreasing mass, until the
// selected chunks cover the fraction `attention_mass`. Lists the indices of the selected chunks in ascending order, and
// returns the length of the list.
inline size_t select_chunks(const SelectionScratch& scratch, size_t chunks, size_t own, float attention_mass) {
    // The value that replaces the fraction of a selected chunk.
    constexpr float selected = -1;
    float sum = 0;
    const auto select = [&](size_t chunk) {
        sum += scratch.fractions[chunk];
        scratch.fractions[chunk] = selected;
    };
    select(0);
    for (size_t chunk = own > 0 ? own : 1; chunk < chunks; ++chunk) select(chunk);
    while (sum < attention_mass) {
        size_t best = 0;
        for (size_t chunk = 1; chunk < own; ++chunk)
            if (scratch.fractions[chunk] > scratch.fractions[best]) best = chunk;
        if (scratch.fractions[best] <= 0) break;
        select(best);
    }
    size_t count = 0;
    for (size_t chunk = 0; chunk < chunks; ++chunk)
        if (scratch.fractions[chunk] == selected) scratch.chunks[count++] = uint32_t(chunk);
    return count;
}

}  // namespace
