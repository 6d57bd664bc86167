// The kernels of the paged attention. This file is compiled once for each instruction set, and `OVFLEET_KERNELS` is the name of
// its table of functions. The algorithm is FlashAttention: softmax with a running maximum, block by block (Dao et al., 2022). A
// tile has the queries of all heads that share a KV head.
//
// It uses only memcpy and memset of the standard library, because the linker could use inline functions that are compiled here
// for other callers.
#include "products_bf16.hpp"
#include "sparse.hpp"

namespace {

// The queries `[token][head]` of a work item, and the state of each.
struct Tile {
    size_t count, groups;
    float *queries, *sums, *scores, *values, *maxima, *totals;
    // Of large tiles: the keys or values of a block in another format, and queries and weights as pairs of bf16.
    float* unpacked;
    uint32_t *query_pairs, *weight_pairs;
    SelectionScratch selection;
    // Of decodes that report block scores: `[query][block]`, the mass of a block relative to the maximum at that time, and this
    // maximum. Else null.
    float *block_masses, *block_maxima;
};

// The number of queries from which on it is worthwhile to convert a block to another format.
constexpr size_t LARGE_TILE = 16;

// Calls `allocate` with the number of floats of each array of a tile.
template <typename Allocate>
inline void allocate_tile(const Layer& layer, size_t count, size_t blocks, Tile& tile, Allocate allocate) {
    const size_t size = layer.key_size > layer.value_size ? layer.key_size : layer.value_size;
    tile.queries = allocate(count * layer.key_size);
    tile.sums = allocate(count * (layer.key_size / KEY_GROUP));
    tile.scores = allocate(count * CHUNK_KEYS);
    tile.values = allocate(count * layer.value_size);
    tile.maxima = allocate(count);
    tile.totals = allocate(count);
    const size_t large = count < LARGE_TILE ? 0 : count;
    tile.unpacked = allocate(large ? BLOCK_TOKENS * size : 0);
    tile.query_pairs = (uint32_t*)allocate(large * layer.key_size / 2);
    tile.weight_pairs = (uint32_t*)allocate(large * BLOCK_TOKENS / 2);
    allocate_selection(layer, large, blocks, tile.selection, allocate);
    // Only decodes report block scores. They have one token, so one query for each query head of the KV head.
    const size_t reported = layer.block_scores ? layer.heads / layer.kv_heads * PART_BLOCKS : 0;
    tile.block_masses = allocate(reported);
    tile.block_maxima = allocate(reported);
}

// Each array begins at a multiple of a vector.
inline size_t padded(size_t floats) { return (floats + 15) / 16 * 16; }

size_t scratch(const Layer& layer, size_t queries, size_t blocks) {
    size_t all = 0;
    Tile tile;
    allocate_tile(layer, queries, blocks, tile, [&](size_t floats) {
        all += padded(floats);
        return (float*)nullptr;
    });
    return all;
}

Tile tile_in(const Layer& layer, size_t count, size_t blocks, float* scratch) {
    Tile tile;
    tile.count = count;
    tile.groups = layer.precision == Precision::u8 ? layer.key_size / KEY_GROUP : 0;
    allocate_tile(layer, count, blocks, tile, [&](size_t floats) {
        float* array = scratch;
        scratch += padded(floats);
        return array;
    });
    return tile;
}

void load_queries(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    const size_t group = layer.heads / layer.kv_heads;
    for (size_t query = 0; query < tile.count; ++query) {
        const size_t token = item.sequence->begin + item.token_begin + query / group;
        const size_t head = item.kv_head * group + query % group;
        float* to = tile.queries + query * layer.key_size;
        read_floats(layer, tensors.queries, token * tensors.query_stride + head * layer.key_size, layer.key_size, to);
        apply_rope(layer, tensors, token, to);
        for (size_t one = 0; one < tile.groups; ++one) {
            Floats sum = {};
            for (size_t i = 0; i < KEY_GROUP; i += LANES) sum += load(to + one * KEY_GROUP + i);
            tile.sums[query * tile.groups + one] = horizontal_sum(sum);
        }
        std::memset(tile.values + query * layer.value_size, 0, layer.value_size * sizeof(float));
        tile.maxima[query] = MASKED;
        tile.totals[query] = 0;
    }
}

// The keys of a chunk that a query sees.
struct KeyRange {
    size_t from, to;
};

KeyRange visible_keys(const Layer& layer, const WorkItem& item, size_t query, size_t first_key, size_t keys) {
    const size_t position = item.sequence->past + item.token_begin + query / (layer.heads / layer.kv_heads);
    const size_t from = layer.window && position + 1 > layer.window ? position + 1 - layer.window : 0;
    const auto within = [&](size_t key) { return key < first_key ? 0 : key - first_key < keys ? key - first_key : keys; };
    return {within(from), within(position + 1)};
}

// Turns the scores of a chunk into weights, and rescales the sum and the values of the query if its maximum has grown.
inline void online_softmax(const Layer& layer, KeyRange visible, size_t keys, float* scores, float& maximum, float& total,
                           float* values) {
    for (size_t key = 0; key < visible.from; ++key) scores[key] = MASKED;
    for (size_t key = visible.to; key < keys; ++key) scores[key] = MASKED;
    Floats high = load(scores);
    for (size_t key = LANES; key < keys; key += LANES) high = larger(high, load(scores + key));
    float now = largest(high) * layer.scale;
    if (maximum > now) now = maximum;
    if (now == MASKED) {
        // The query sees no key of the chunk.
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
        const float factor = maximum == MASKED ? 0 : exponential(Floats{} + (maximum - now))[0];
        total *= factor;
        for (size_t i = 0; i < layer.value_size; i += LANES) ::store(values + i, load(values + i) * factor);
        maximum = now;
    }
    total += horizontal_sum(sum);
}

// The keys or values of a block, the position of the block in its chunk, and the memory that is read after it.
struct BlockRef {
    const uint8_t* block;
    size_t at;
    const uint8_t* next;
};

// Small tiles read blocks in the format of the cache.
template <typename T>
struct CacheBlocks {
    static void prepare(const Layer&, const Tile&) {}
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        score<T>(layer, ref.block, tile.queries, tile.sums, tile.scores + ref.at * BLOCK_TOKENS, tile.count,
                 {ref.next, layer.value_bytes / layer.key_size});
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        float* weights = tile.scores + ref.at * BLOCK_TOKENS;
        if constexpr (sizeof(T) == 1) {
            const float *scales = value_scales(layer, ref.block), *minima = scales + BLOCK_TOKENS;
            for (size_t query = 0; query < tile.count; ++query) {
                float* weight = weights + query * CHUNK_KEYS;
                Floats sum = {};
                for (size_t token = 0; token < BLOCK_TOKENS; token += LANES) {
                    const Floats now = load(weight + token);
                    sum += now * load(minima + token);
                    ::store(weight + token, now * load(scales + token));
                }
                const float add = horizontal_sum(sum);
                float* values = tile.values + query * layer.value_size;
                for (size_t i = 0; i < layer.value_size; i += LANES) ::store(values + i, load(values + i) + add);
            }
        }
        accumulate_values<T>((const T*)ref.block, layer.value_size, weights, tile.values, tile.count,
                             {ref.next, layer.key_bytes / BLOCK_TOKENS});
    }
};

// One dimension of the keys of a block, and some values of a token, as floats.
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

// Large tiles convert each block to f32.
template <typename T>
struct F32Blocks {
    static void prepare(const Layer&, const Tile&) {}
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        float* keys = (float*)tile.unpacked;
        for (size_t i = 0; i < layer.key_size; ++i)
            for (size_t token = 0; token < BLOCK_TOKENS; token += LANES)
                ::store(keys + i * BLOCK_TOKENS + token, key_at<T>(layer, ref.block, i, token));
        score<float>(layer, (const uint8_t*)keys, tile.queries, nullptr, tile.scores + ref.at * BLOCK_TOKENS, tile.count,
                     {(const uint8_t*)keys, 0});
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        float* values = (float*)tile.unpacked;
        for (size_t token = 0; token < BLOCK_TOKENS; ++token)
            for (size_t i = 0; i < layer.value_size; i += LANES)
                ::store(values + token * layer.value_size + i, value_at<T>(layer, ref.block, token, i));
        accumulate_values<float>(values, layer.value_size, tile.scores + ref.at * BLOCK_TOKENS, tile.values, tile.count,
                                 {(const uint8_t*)values, 0});
    }
};

#if defined(__AVX512BF16__)

// In bf16, large tiles convert each block to pairs of dimensions or of tokens, which one instruction multiplies and adds.
template <typename T>
struct Bf16Blocks {
    static void prepare(const Layer& layer, const Tile& tile) {
        convert_to_bf16(tile.queries, tile.count * layer.key_size, tile.query_pairs);
    }
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        auto* keys = (uint32_t*)tile.unpacked;
        for (size_t i = 0; i < layer.key_size; i += 2)
            for (size_t token = 0; token < BLOCK_TOKENS; token += 16)
                _mm512_storeu_si512(
                    keys + i / 2 * BLOCK_TOKENS + token,
                    interleave_bf16(key_at<T>(layer, ref.block, i, token), key_at<T>(layer, ref.block, i + 1, token)));
        multiply_bf16<2, 8>(tile.query_pairs, layer.key_size / 2, layer.key_size / 2, keys, BLOCK_TOKENS,
                            tile.scores + ref.at * BLOCK_TOKENS, CHUNK_KEYS, false, tile.count);
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        auto* values = (uint32_t*)tile.unpacked;
        for (size_t token = 0; token < BLOCK_TOKENS; token += 2)
            for (size_t i = 0; i < layer.value_size; i += 16)
                _mm512_storeu_si512(
                    values + token / 2 * layer.value_size + i,
                    interleave_bf16(value_at<T>(layer, ref.block, token, i), value_at<T>(layer, ref.block, token + 1, i)));
        for (size_t query = 0; query < tile.count; ++query)
            convert_to_bf16(tile.scores + query * CHUNK_KEYS + ref.at * BLOCK_TOKENS, BLOCK_TOKENS,
                            tile.weight_pairs + query * BLOCK_TOKENS / 2);
        multiply_bf16<4, 4>(tile.weight_pairs, BLOCK_TOKENS / 2, BLOCK_TOKENS / 2, values, layer.value_size, tile.values,
                            layer.value_size, true, tile.count);
    }
};

#endif

// Records the mass of `count` blocks from `first` on.
inline void record_block_masses(const Tile& tile, size_t first, size_t count) {
    for (size_t query = 0; query < tile.count; ++query)
        for (size_t at = 0; at < count; ++at) {
            const float* weights = tile.scores + query * CHUNK_KEYS + at * BLOCK_TOKENS;
            Floats sum = {};
            for (size_t token = 0; token < BLOCK_TOKENS; token += LANES) sum += load(weights + token);
            tile.block_masses[query * PART_BLOCKS + first + at] = horizontal_sum(sum);
            tile.block_maxima[query * PART_BLOCKS + first + at] = tile.maxima[query];
        }
}

// The mass of a block for a query, relative to the final maximum of the query.
inline float block_mass(const Tile& tile, size_t query, size_t block) {
    const size_t at = query * PART_BLOCKS + block;
    const float mass = tile.block_masses[at];
    return mass > 0 ? mass * power(tile.block_maxima[at] - tile.maxima[query]) : 0;
}

// The chunks that an item attends to: all, or those that are listed.
struct ChunkSelection {
    size_t count;
    const uint32_t* chunks;
    size_t at(size_t index) const { return chunks ? chunks[index] : index; }
};

// Selects the chunks that a large tile attends to.
template <typename T>
ChunkSelection select_keys(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    const size_t chunks = chunks_of(item.block_end - item.block_begin), first_key = item.block_begin * BLOCK_TOKENS;
    if (!(layer.attention_mass > 0) || chunks < SELECTION_CHUNKS_MIN) return {chunks, nullptr};
    const SelectionScratch& scratch = tile.selection;
    const size_t group = layer.heads / layer.kv_heads, groups = layer.key_size / KEY_GROUP;
    const Sample sample = sample_of(group, tile.count);
    for (size_t index = 0; index < sample.count; ++index) {
        const size_t query = sample.query(index);
        std::memcpy(scratch.queries + index * layer.key_size, tile.queries + query * layer.key_size,
                    layer.key_size * sizeof(float));
        std::memcpy(scratch.sums + index * groups, tile.sums + query * groups, tile.groups * sizeof(float));
    }
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
        const size_t begin = item.block_begin + chunk * CHUNK_BLOCKS;
        const size_t rest = item.block_end - begin, count = rest < CHUNK_BLOCKS ? rest : CHUNK_BLOCKS;
        for (size_t at = 0; at < count; ++at) {
            const uint8_t* block = key_block(layer, tensors, item.sequence->blocks[begin + at], item.kv_head);
            const size_t next = begin + at + 1 < item.block_end ? begin + at + 1 : item.block_begin;
            score<T>(layer, block, scratch.queries, scratch.sums, scratch.scores + at * BLOCK_TOKENS, sample.count,
                     {key_block(layer, tensors, item.sequence->blocks[next], item.kv_head), layer.key_bytes / layer.key_size});
        }
        for (size_t index = 0; index < sample.count; ++index) {
            const KeyRange keys =
                visible_keys(layer, item, sample.query(index), first_key + chunk * CHUNK_KEYS, count * BLOCK_TOKENS);
            scratch.masses[index * chunks + chunk] =
                mass_of(scratch.scores + index * CHUNK_KEYS, keys.from, keys.to, count * BLOCK_TOKENS, layer.scale,
                        scratch.maxima[index * chunks + chunk]);
        }
    }
    compute_fractions(scratch, sample.count, chunks);
    const size_t own = (item.sequence->past + item.token_begin - first_key) / CHUNK_KEYS;
    return {select_chunks(scratch, chunks, own, layer.attention_mass), scratch.chunks};
}

template <typename Blocks>
void attend_with(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile,
                 ChunkSelection selection) {
    const int32_t* blocks = item.sequence->blocks;
    // The blocks behind the last one are those of the next item.
    const auto keys_of = [&](size_t block) -> const uint8_t* {
        if (block < item.block_end) return key_block(layer, tensors, blocks[block], item.kv_head);
        const WorkItem& next = *item.next;
        const size_t there = next.block_begin + (block - item.block_end);
        const size_t at = there < next.block_end ? there : next.block_begin;
        return key_block(layer, tensors, next.sequence->blocks[at], next.kv_head);
    };
    const auto values_of = [&](size_t block) { return value_block(layer, tensors, blocks[block], item.kv_head); };
    Blocks::prepare(layer, tile);
    for (size_t index = 0; index < selection.count; ++index) {
        const size_t first = item.block_begin + selection.at(index) * CHUNK_BLOCKS;
        const size_t rest = item.block_end - first, count = rest < CHUNK_BLOCKS ? rest : CHUNK_BLOCKS;
        const size_t next =
            index + 1 < selection.count ? item.block_begin + selection.at(index + 1) * CHUNK_BLOCKS : item.block_end;
        const size_t keys = count * BLOCK_TOKENS;
        for (size_t at = 0; at < count; ++at)
            Blocks::score_block(layer, tile, {keys_of(first + at), at, values_of(first + at)});
        for (size_t query = 0; query < tile.count; ++query)
            online_softmax(layer, visible_keys(layer, item, query, first * BLOCK_TOKENS, keys), keys,
                           tile.scores + query * CHUNK_KEYS, tile.maxima[query], tile.totals[query],
                           tile.values + query * layer.value_size);
        if (tile.block_masses) record_block_masses(tile, first - item.block_begin, count);
        for (size_t at = 0; at < count; ++at)
            Blocks::accumulate_block(layer, tile, {values_of(first + at), at, keys_of(next + at)});
    }
}

template <typename T>
void attend_as(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    if (tile.count < LARGE_TILE)
        return attend_with<CacheBlocks<T>>(layer, item, tensors, tile, {chunks_of(item.block_end - item.block_begin), nullptr});
    const ChunkSelection selection = select_keys<T>(layer, item, tensors, tile);
#if defined(__AVX512BF16__)
    if (layer.prompts_in_bf16) return attend_with<Bf16Blocks<T>>(layer, item, tensors, tile, selection);
#endif
    attend_with<F32Blocks<T>>(layer, item, tensors, tile, selection);
}

// Writes the output, or the partial result of the item.
void store_results(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    const size_t group = layer.heads / layer.kv_heads, size = layer.value_size;
    const size_t blocks = tile.block_masses ? item.block_end - item.block_begin : 0;
    for (size_t query = 0; query < tile.count; ++query) {
        const float* values = tile.values + query * size;
        if (item.part) {
            float* part = item.part + query * part_stride(layer);
            part[0] = tile.maxima[query];
            part[1] = tile.totals[query];
            std::memcpy(part + 2, values, size * sizeof(float));
            for (size_t block = 0; block < blocks; ++block) part[2 + size + block] = block_mass(tile, query, block);
            continue;
        }
        if (blocks > 0) {
            float* scores =
                tensors.block_scores + item.kv_head * tensors.step_blocks + item.sequence->first_block + item.block_begin;
            for (size_t block = 0; block < blocks; ++block)
                scores[block] += block_mass(tile, query, block) / tile.totals[query];
        }
        const size_t token = item.sequence->begin + item.token_begin + query / group;
        const size_t at = (token * layer.heads + item.kv_head * group + query % group) * size;
        const float factor = 1 / tile.totals[query];
        if (layer.is_bf16)
            for (size_t i = 0; i < size; ++i) convert(values[i] * factor, ((bf16*)tensors.output)[at + i]);
        else
            for (size_t i = 0; i < size; ++i) ((float*)tensors.output)[at + i] = values[i] * factor;
    }
}

void attend(const Layer& layer, const WorkItem& item, const StepTensors& tensors, float* scratch) {
    Tile tile = tile_in(layer, (item.token_end - item.token_begin) * (layer.heads / layer.kv_heads),
                        item.block_end - item.block_begin, scratch);
    if (!layer.block_scores || item.sequence->count > 1) tile.block_masses = nullptr;
    if (item.stores) store_new_tokens(layer, *item.sequence, tensors, item.kv_head);
    load_queries(layer, item, tensors, tile);
    switch (layer.precision) {
        case Precision::f32: attend_as<float>(layer, item, tensors, tile); break;
        case Precision::bf16: attend_as<bf16>(layer, item, tensors, tile); break;
        case Precision::f16: attend_as<f16>(layer, item, tensors, tile); break;
        case Precision::u8: attend_as<uint8_t>(layer, item, tensors, tile); break;
    }
    store_results(layer, item, tensors, tile);
}

}  // namespace

const ovfleet::Kernels ovfleet::OVFLEET_KERNELS = {scratch, store_new_tokens, attend};
