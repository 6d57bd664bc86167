// Which keys a tile of a long prompt looks at, where it is not to look at all. Only for kernels.cpp.
//
// Some of the tile's queries are multiplied with all keys, and what share of their weight a part of the keys has is taken for
// its share of all (SampleAttention; Zhu et al., 2024). Parts are left out from the lightest on, while those that stay have as
// much weight as is asked (XAttention; Xu et al., 2025). The first keys and the tile's own are always looked at.
#pragma once

#include "products.hpp"

namespace {

// Of so many tokens of a tile one has its queries multiplied with all keys.
constexpr size_t SAMPLED_EVERY = 8;
// From so many parts of `KEYS_AT_ONCE` keys on it is worth to choose among them.
constexpr size_t CHOSEN_FROM = 16;

inline size_t parts_of(size_t blocks) { return (blocks + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE; }

// The rows of a tile whose queries are multiplied with all keys: all heads of some tokens, the last of each few.
struct Sample {
    size_t group, step, count;
    size_t row(size_t index) const { return (index / group * step + step - 1) * group + index % group; }
};

inline Sample sample_of(size_t group, size_t rows) {
    const size_t tokens = rows / group, step = tokens < SAMPLED_EVERY ? tokens : SAMPLED_EVERY;
    return {group, step, tokens / step * group};
}

// What choosing takes, all of it scratch: of the sample its queries, the sums of these by groups, scores of a part, and for each
// part the largest score and the weight by it; of each part its share, and the list of those that are looked at.
struct Choice {
    float *queries, *sums, *scores, *maxima, *weights, *shares;
    uint32_t* parts;
};

template <typename Take>
inline void choice_parts(const Layer& layer, size_t rows, size_t blocks, Choice& choice, Take take) {
    const bool chooses = layer.share > 0 && rows > 0;
    const size_t sampled = chooses ? sample_of(layer.heads / layer.kv_heads, rows).count : 0, parts = parts_of(blocks);
    choice.queries = take(sampled * layer.key_size);
    choice.sums = take(sampled * (layer.key_size / KEY_GROUP));
    choice.scores = take(sampled * KEYS_AT_ONCE);
    choice.maxima = take(sampled * parts);
    choice.weights = take(sampled * parts);
    choice.shares = take(chooses ? parts : 0);
    choice.parts = (uint32_t*)take(chooses ? parts : 0);
}

// The weight of those of `keys` scores from `from` to `to`, by their largest, which it finds. The others become none.
inline float weight_of(float* scores, size_t from, size_t to, size_t keys, float scale, float& most) {
    for (size_t key = 0; key < from; ++key) scores[key] = NONE;
    for (size_t key = to; key < keys; ++key) scores[key] = NONE;
    Floats high = load(scores);
    for (size_t key = LANES; key < keys; key += LANES) high = larger(high, load(scores + key));
    most = largest(high) * scale;
    if (most == NONE) return 0;
    Floats sum = {};
    for (size_t key = 0; key < keys; key += LANES) sum += exponential(load(scores + key) * scale - most);
    return horizontal_sum(sum);
}

inline float power(float x) { return exponential(Floats{} + x)[0]; }

// The share of the sample's weight that each part has.
inline void find_shares(const Choice& choice, size_t sampled, size_t parts) {
    for (size_t part = 0; part < parts; ++part) choice.shares[part] = 0;
    for (size_t row = 0; row < sampled; ++row) {
        const float *maxima = choice.maxima + row * parts, *weights = choice.weights + row * parts;
        float most = NONE, total = 0;
        for (size_t part = 0; part < parts; ++part) most = maxima[part] > most ? maxima[part] : most;
        for (size_t part = 0; part < parts; ++part)
            if (weights[part] > 0) total += weights[part] * power(maxima[part] - most);
        for (size_t part = 0; part < parts; ++part)
            if (weights[part] > 0) choice.shares[part] += weights[part] * power(maxima[part] - most) / (total * float(sampled));
    }
}

// Lists the parts that have at least `share` of the weight, the heaviest first chosen, besides the first one and those from
// `own` on; in their order. Answers how many.
inline size_t choose(const Choice& choice, size_t parts, size_t own, float share) {
    // What is chosen has no share any more.
    constexpr float chosen = -1;
    float sum = 0;
    const auto take = [&](size_t part) {
        sum += choice.shares[part];
        choice.shares[part] = chosen;
    };
    take(0);
    for (size_t part = own > 0 ? own : 1; part < parts; ++part) take(part);
    while (sum < share) {
        size_t best = 0;
        for (size_t part = 1; part < own; ++part)
            if (choice.shares[part] > choice.shares[best]) best = part;
        if (choice.shares[best] <= 0) break;
        take(best);
    }
    size_t count = 0;
    for (size_t part = 0; part < parts; ++part)
        if (choice.shares[part] == chosen) choice.parts[count++] = uint32_t(part);
    return count;
}

}  // namespace
