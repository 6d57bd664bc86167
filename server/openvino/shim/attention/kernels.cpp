// The kernels of the paged attention, compiled once for each instruction set, by the name of which `OVFLEET_KERNELS` is.
// The algorithm is FlashAttention's: softmax with a running maximum, block by block (Dao et al., 2022), where the queries of
// all heads that share a head of the cache go together.
//
// Nothing of the standard library is used but memcpy and memset: whatever is inlined here may not be taken for what others call.
#include "sparse.hpp"

namespace {

// The queries of an item, `[token][head]` as rows, and what is known of each.
struct Rows {
    size_t count, groups;
    float *queries, *sums, *scores, *values, *maxima, *totals;
    // Of items with many rows: a block's keys or values in another form, and queries and weights as pairs of bf16.
    float* unpacked;
    uint32_t *query_pairs, *weight_pairs;
    Choice choice;
    // Of a decode whose weights are told: those of each block by the maximum there was, and that; `[row][block]`. Else null.
    float *block_weights, *block_maxima;
};

// From so many rows on a block is worth another form.
constexpr size_t MANY_ROWS = 16;

// Calls `take` with the floats that each part of the rows needs.
template <typename Take>
inline void parts(const Layer& layer, size_t count, size_t blocks, Rows& rows, Take take) {
    const size_t size = layer.key_size > layer.value_size ? layer.key_size : layer.value_size;
    rows.queries = take(count * layer.key_size);
    rows.sums = take(count * (layer.key_size / KEY_GROUP));
    rows.scores = take(count * KEYS_AT_ONCE);
    rows.values = take(count * layer.value_size);
    rows.maxima = take(count);
    rows.totals = take(count);
    const size_t many = count < MANY_ROWS ? 0 : count;
    rows.unpacked = take(many ? BLOCK_TOKENS * size : 0);
    rows.query_pairs = (uint32_t*)take(many * layer.key_size / 2);
    rows.weight_pairs = (uint32_t*)take(many * BLOCK_TOKENS / 2);
    choice_parts(layer, many, blocks, rows.choice, take);
    // Only decodes report block weights: one token, so one row for each query head of the KV head.
    const size_t told = layer.weighs ? layer.heads / layer.kv_heads * PART_BLOCKS : 0;
    rows.block_weights = take(told);
    rows.block_maxima = take(told);
}

// Each part begins at a vector.
inline size_t rounded(size_t floats) { return (floats + 15) / 16 * 16; }

size_t scratch(const Layer& layer, size_t queries, size_t blocks) {
    size_t all = 0;
    Rows rows;
    parts(layer, queries, blocks, rows, [&](size_t floats) {
        all += rounded(floats);
        return (float*)nullptr;
    });
    return all;
}

Rows rows_in(const Layer& layer, size_t count, size_t blocks, float* scratch) {
    Rows rows;
    rows.count = count;
    rows.groups = layer.precision == Precision::u8 ? layer.key_size / KEY_GROUP : 0;
    parts(layer, count, blocks, rows, [&](size_t floats) {
        float* taken = scratch;
        scratch += rounded(floats);
        return taken;
    });
    return rows;
}

void begin(const Layer& layer, const Item& item, const Memory& memory, const Rows& rows) {
    const size_t group = layer.heads / layer.kv_heads;
    for (size_t row = 0; row < rows.count; ++row) {
        const size_t token = item.sequence->begin + item.token_begin + row / group;
        const size_t head = item.kv_head * group + row % group;
        float* to = rows.queries + row * layer.key_size;
        read_row(layer, memory.queries, token * memory.query_row + head * layer.key_size, layer.key_size, to);
        turn(layer, memory, token, to);
        for (size_t one = 0; one < rows.groups; ++one) {
            Floats sum = {};
            for (size_t i = 0; i < KEY_GROUP; i += LANES) sum += load(to + one * KEY_GROUP + i);
            rows.sums[row * rows.groups + one] = horizontal_sum(sum);
        }
        std::memset(rows.values + row * layer.value_size, 0, layer.value_size * sizeof(float));
        rows.maxima[row] = NONE;
        rows.totals[row] = 0;
    }
}

// The keys that a row sees, of those that are looked at.
struct Seen { size_t from, to; };

Seen seen(const Layer& layer, const Item& item, size_t row, size_t first_key, size_t keys) {
    const size_t at = item.sequence->past + item.token_begin + row / (layer.heads / layer.kv_heads);
    const size_t from = layer.window && at + 1 > layer.window ? at + 1 - layer.window : 0;
    const auto within = [&](size_t key) { return key < first_key ? 0 : key - first_key < keys ? key - first_key : keys; };
    return {within(from), within(at + 1)};
}

// Turns a row of scores into weights, and what the row has so far into what it has by the new maximum.
inline void soften(const Layer& layer, Seen seen, size_t keys, float* scores, float& maximum, float& total, float* values) {
    for (size_t key = 0; key < seen.from; ++key) scores[key] = NONE;
    for (size_t key = seen.to; key < keys; ++key) scores[key] = NONE;
    Floats high = load(scores);
    for (size_t key = LANES; key < keys; key += LANES) high = larger(high, load(scores + key));
    float now = largest(high) * layer.scale;
    if (maximum > now) now = maximum;
    if (now == NONE) {
        // It sees none of them.
        std::memset(scores, 0, keys * sizeof(float));
        return;
    }
    Floats sum = {};
    for (size_t key = 0; key < keys; key += LANES) {
        const Floats weight = exponential(load(scores + key) * layer.scale - now);
        sum += weight;
        ::store(scores + key, weight);
    }
    if (now != maximum) {
        const float factor = maximum == NONE ? 0 : exponential(Floats{} + (maximum - now))[0];
        total *= factor;
        for (size_t i = 0; i < layer.value_size; i += LANES) ::store(values + i, load(values + i) * factor);
        maximum = now;
    }
    total += horizontal_sum(sum);
}

// A block's keys or values, its place among those that are looked at, and what is read after it.
struct Place {
    const uint8_t* block;
    size_t at;
    const uint8_t* next;
};

// Few queries read blocks as the cache has them.
template <typename T>
struct Direct {
    static void prepare(const Layer&, const Rows&) {}
    static void score_block(const Layer& layer, const Rows& rows, const Place& place) {
        score<T>(layer, place.block, rows.queries, rows.sums, rows.scores + place.at * BLOCK_TOKENS, rows.count,
                 {place.next, layer.value_bytes / layer.key_size});
    }
    static void weigh_block(const Layer& layer, const Rows& rows, const Place& place) {
        float* weights = rows.scores + place.at * BLOCK_TOKENS;
        if constexpr (sizeof(T) == 1) {
            const float *scales = value_scales(layer, place.block), *minima = scales + BLOCK_TOKENS;
            for (size_t row = 0; row < rows.count; ++row) {
                float* weight = weights + row * KEYS_AT_ONCE;
                Floats sum = {};
                for (size_t token = 0; token < BLOCK_TOKENS; token += LANES) {
                    const Floats now = load(weight + token);
                    sum += now * load(minima + token);
                    ::store(weight + token, now * load(scales + token));
                }
                const float add = horizontal_sum(sum);
                float* values = rows.values + row * layer.value_size;
                for (size_t i = 0; i < layer.value_size; i += LANES) ::store(values + i, load(values + i) + add);
            }
        }
        weigh<T>((const T*)place.block, layer.value_size, weights, rows.values, rows.count,
                 {place.next, layer.key_bytes / BLOCK_TOKENS});
    }
};

// A key's numbers along the tokens of a block, and a token's values, as floats.
template <typename T>
inline Floats key_at(const Layer& layer, const uint8_t* block, size_t i, size_t token) {
    const Keys<T> keys{block};
    const Floats key = load(keys.of(i) + token);
    if constexpr (sizeof(T) > 1) return key;
    const float* scales = keys.scales(layer, i / KEY_GROUP) + token;
    return key * load(scales) + load(scales + BLOCK_TOKENS);
}

template <typename T>
inline Floats value_at(const Layer& layer, const uint8_t* block, size_t token, size_t i) {
    const Floats value = load((const T*)block + token * layer.value_size + i);
    if constexpr (sizeof(T) > 1) return value;
    const float* scales = value_scales(layer, block) + token;
    return value * scales[0] + scales[BLOCK_TOKENS];
}

// For many queries each block is made f32 first.
template <typename T>
struct Unpacked {
    static void prepare(const Layer&, const Rows&) {}
    static void score_block(const Layer& layer, const Rows& rows, const Place& place) {
        float* keys = (float*)rows.unpacked;
        for (size_t i = 0; i < layer.key_size; ++i)
            for (size_t token = 0; token < BLOCK_TOKENS; token += LANES)
                ::store(keys + i * BLOCK_TOKENS + token, key_at<T>(layer, place.block, i, token));
        score<float>(layer, (const uint8_t*)keys, rows.queries, nullptr, rows.scores + place.at * BLOCK_TOKENS, rows.count,
                     {(const uint8_t*)keys, 0});
    }
    static void weigh_block(const Layer& layer, const Rows& rows, const Place& place) {
        float* values = (float*)rows.unpacked;
        for (size_t token = 0; token < BLOCK_TOKENS; ++token)
            for (size_t i = 0; i < layer.value_size; i += LANES)
                ::store(values + token * layer.value_size + i, value_at<T>(layer, place.block, token, i));
        weigh<float>(values, layer.value_size, rows.scores + place.at * BLOCK_TOKENS, rows.values, rows.count,
                     {(const uint8_t*)values, 0});
    }
};

#if defined(__AVX512BF16__)

// In bf16 each block is made pairs of dimensions or of tokens first, which are multiplied and added at once.
template <typename T>
struct Paired {
    static void prepare(const Layer& layer, const Rows& rows) {
        pair(rows.queries, rows.count * layer.key_size, rows.query_pairs);
    }
    static void score_block(const Layer& layer, const Rows& rows, const Place& place) {
        auto* keys = (uint32_t*)rows.unpacked;
        for (size_t i = 0; i < layer.key_size; i += 2)
            for (size_t token = 0; token < BLOCK_TOKENS; token += 16)
                _mm512_storeu_si512(keys + i / 2 * BLOCK_TOKENS + token,
                                    paired(key_at<T>(layer, place.block, i, token), key_at<T>(layer, place.block, i + 1, token)));
        multiply<2, 8>(rows.query_pairs, layer.key_size / 2, layer.key_size / 2, keys, BLOCK_TOKENS,
                       rows.scores + place.at * BLOCK_TOKENS, KEYS_AT_ONCE, false, rows.count);
    }
    static void weigh_block(const Layer& layer, const Rows& rows, const Place& place) {
        auto* values = (uint32_t*)rows.unpacked;
        for (size_t token = 0; token < BLOCK_TOKENS; token += 2)
            for (size_t i = 0; i < layer.value_size; i += 16)
                _mm512_storeu_si512(
                    values + token / 2 * layer.value_size + i,
                    paired(value_at<T>(layer, place.block, token, i), value_at<T>(layer, place.block, token + 1, i)));
        for (size_t row = 0; row < rows.count; ++row)
            pair(rows.scores + row * KEYS_AT_ONCE + place.at * BLOCK_TOKENS, BLOCK_TOKENS,
                 rows.weight_pairs + row * BLOCK_TOKENS / 2);
        multiply<4, 4>(rows.weight_pairs, BLOCK_TOKENS / 2, BLOCK_TOKENS / 2, values, layer.value_size, rows.values,
                       layer.value_size, true, rows.count);
    }
};

#endif

// Notes the weights that `count` blocks from `first` on have.
inline void note_weights(const Rows& rows, size_t first, size_t count) {
    for (size_t row = 0; row < rows.count; ++row)
        for (size_t at = 0; at < count; ++at) {
            const float* weights = rows.scores + row * KEYS_AT_ONCE + at * BLOCK_TOKENS;
            Floats sum = {};
            for (size_t token = 0; token < BLOCK_TOKENS; token += LANES) sum += load(weights + token);
            rows.block_weights[row * PART_BLOCKS + first + at] = horizontal_sum(sum);
            rows.block_maxima[row * PART_BLOCKS + first + at] = rows.maxima[row];
        }
}

// The weight that a block has with a row, by the row's last maximum.
inline float weight_at(const Rows& rows, size_t row, size_t block) {
    const size_t at = row * PART_BLOCKS + block;
    const float weight = rows.block_weights[at];
    return weight > 0 ? weight * power(rows.block_maxima[at] - rows.maxima[row]) : 0;
}

// The parts of an item's keys, `BLOCKS_AT_ONCE` blocks each, that are looked at: all, or those that are listed.
struct Looked {
    size_t count;
    const uint32_t* parts;
    size_t at(size_t index) const { return parts ? parts[index] : index; }
};

// Chooses what an item with many rows looks at.
template <typename T>
Looked look(const Layer& layer, const Item& item, const Memory& memory, const Rows& rows) {
    const size_t parts = parts_of(item.block_end - item.block_begin), first_key = item.block_begin * BLOCK_TOKENS;
    if (!(layer.share > 0) || parts < CHOSEN_FROM) return {parts, nullptr};
    const Choice& choice = rows.choice;
    const size_t group = layer.heads / layer.kv_heads, groups = layer.key_size / KEY_GROUP;
    const Sample sample = sample_of(group, rows.count);
    for (size_t index = 0; index < sample.count; ++index) {
        const size_t row = sample.row(index);
        std::memcpy(choice.queries + index * layer.key_size, rows.queries + row * layer.key_size, layer.key_size * sizeof(float));
        std::memcpy(choice.sums + index * groups, rows.sums + row * groups, rows.groups * sizeof(float));
    }
    for (size_t part = 0; part < parts; ++part) {
        const size_t begin = item.block_begin + part * BLOCKS_AT_ONCE;
        const size_t rest = item.block_end - begin, count = rest < BLOCKS_AT_ONCE ? rest : BLOCKS_AT_ONCE;
        for (size_t at = 0; at < count; ++at) {
            const uint8_t* block = key_block(layer, memory, item.sequence->blocks[begin + at], item.kv_head);
            const size_t next = begin + at + 1 < item.block_end ? begin + at + 1 : item.block_begin;
            score<T>(layer, block, choice.queries, choice.sums, choice.scores + at * BLOCK_TOKENS, sample.count,
                     {key_block(layer, memory, item.sequence->blocks[next], item.kv_head), layer.key_bytes / layer.key_size});
        }
        for (size_t index = 0; index < sample.count; ++index) {
            const Seen keys = seen(layer, item, sample.row(index), first_key + part * KEYS_AT_ONCE, count * BLOCK_TOKENS);
            choice.weights[index * parts + part] =
                weight_of(choice.scores + index * KEYS_AT_ONCE, keys.from, keys.to, count * BLOCK_TOKENS, layer.scale,
                          choice.maxima[index * parts + part]);
        }
    }
    find_shares(choice, sample.count, parts);
    const size_t own = (item.sequence->past + item.token_begin - first_key) / KEYS_AT_ONCE;
    return {choose(choice, parts, own, layer.share), choice.parts};
}

template <typename Blocks>
void attend_by(const Layer& layer, const Item& item, const Memory& memory, const Rows& rows, Looked looked) {
    const int32_t* blocks = item.sequence->blocks;
    // Those behind the last are the next item's.
    const auto keys_of = [&](size_t block) -> const uint8_t* {
        if (block < item.block_end) return key_block(layer, memory, blocks[block], item.kv_head);
        const Item& next = *item.next;
        const size_t there = next.block_begin + (block - item.block_end);
        const size_t at = there < next.block_end ? there : next.block_begin;
        return key_block(layer, memory, next.sequence->blocks[at], next.kv_head);
    };
    const auto values_of = [&](size_t block) { return value_block(layer, memory, blocks[block], item.kv_head); };
    Blocks::prepare(layer, rows);
    for (size_t index = 0; index < looked.count; ++index) {
        const size_t first = item.block_begin + looked.at(index) * BLOCKS_AT_ONCE;
        const size_t rest = item.block_end - first, count = rest < BLOCKS_AT_ONCE ? rest : BLOCKS_AT_ONCE;
        const size_t next = index + 1 < looked.count ? item.block_begin + looked.at(index + 1) * BLOCKS_AT_ONCE : item.block_end;
        const size_t keys = count * BLOCK_TOKENS;
        for (size_t at = 0; at < count; ++at)
            Blocks::score_block(layer, rows, {keys_of(first + at), at, values_of(first + at)});
        for (size_t row = 0; row < rows.count; ++row)
            soften(layer, seen(layer, item, row, first * BLOCK_TOKENS, keys), keys, rows.scores + row * KEYS_AT_ONCE,
                   rows.maxima[row], rows.totals[row], rows.values + row * layer.value_size);
        if (rows.block_weights) note_weights(rows, first - item.block_begin, count);
        for (size_t at = 0; at < count; ++at)
            Blocks::weigh_block(layer, rows, {values_of(first + at), at, keys_of(next + at)});
    }
}

template <typename T>
void attend_as(const Layer& layer, const Item& item, const Memory& memory, const Rows& rows) {
    if (rows.count < MANY_ROWS)
        return attend_by<Direct<T>>(layer, item, memory, rows, {parts_of(item.block_end - item.block_begin), nullptr});
    const Looked looked = look<T>(layer, item, memory, rows);
#if defined(__AVX512BF16__)
    if (layer.in_bf16) return attend_by<Paired<T>>(layer, item, memory, rows, looked);
#endif
    attend_by<Unpacked<T>>(layer, item, memory, rows, looked);
}

void finish(const Layer& layer, const Item& item, const Memory& memory, const Rows& rows) {
    const size_t group = layer.heads / layer.kv_heads, size = layer.value_size;
    const size_t blocks = rows.block_weights ? item.block_end - item.block_begin : 0;
    for (size_t row = 0; row < rows.count; ++row) {
        const float* values = rows.values + row * size;
        if (item.part) {
            float* part = item.part + row * part_row(layer);
            part[0] = rows.maxima[row];
            part[1] = rows.totals[row];
            std::memcpy(part + 2, values, size * sizeof(float));
            for (size_t block = 0; block < blocks; ++block) part[2 + size + block] = weight_at(rows, row, block);
            continue;
        }
        if (blocks > 0) {
            float* weights = memory.weights + item.kv_head * memory.step_blocks + item.sequence->place + item.block_begin;
            for (size_t block = 0; block < blocks; ++block) weights[block] += weight_at(rows, row, block) / rows.totals[row];
        }
        const size_t token = item.sequence->begin + item.token_begin + row / group;
        const size_t at = (token * layer.heads + item.kv_head * group + row % group) * size;
        const float factor = 1 / rows.totals[row];
        if (layer.is_bf16)
            for (size_t i = 0; i < size; ++i) convert(values[i] * factor, ((bf16*)memory.output)[at + i]);
        else
            for (size_t i = 0; i < size; ++i) ((float*)memory.output)[at + i] = values[i] * factor;
    }
}

void attend(const Layer& layer, const Item& item, const Memory& memory, float* scratch) {
    Rows rows = rows_in(layer, (item.token_end - item.token_begin) * (layer.heads / layer.kv_heads),
                        item.block_end - item.block_begin, scratch);
    if (!layer.weighs || item.sequence->count > 1) rows.block_weights = nullptr;
    if (item.stores) store_new(layer, *item.sequence, memory, item.kv_head);
    begin(layer, item, memory, rows);
    switch (layer.precision) {
        case Precision::f32: attend_as<float>(layer, item, memory, rows); break;
        case Precision::bf16: attend_as<bf16>(layer, item, memory, rows); break;
        case Precision::f16: attend_as<f16>(layer, item, memory, rows); break;
        case Precision::u8: attend_as<uint8_t>(layer, item, memory, rows); break;
    }
    finish(layer, item, memory, rows);
}

}  // namespace

const ovfleet::Kernels ovfleet::OVFLEET_KERNELS = {scratch, store_new, attend};
