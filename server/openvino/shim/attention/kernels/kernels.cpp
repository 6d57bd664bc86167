// The kernels for paged attention. This file is compiled once for each instruction set, and `OVFLEET_KERNELS` is the name of
// its table of functions. For AMX, `OVFLEET_TILES` is the name of the implementation of the tile registers. The algorithm is
// FlashAttention: softmax with a running maximum, chunk by chunk (Dao et al., 2022). A tile contains the queries of some
// tokens, for all heads that share a KV head.
//
// The output of a query depends only on the query, its position, and the keys and values to which it attends. It does not
// depend on how the work is divided into items, or on the format in which a tile reads blocks. Unless sparse attention selects
// the keys for a whole tile, it does not depend on the other queries of the tile either. This holds because chunks and parts
// begin at positions that are multiples of their lengths, each sum is computed in a fixed order, and a key to which a query
// does not attend adds a zero. All compiled copies of a loop round in the same way, because operations are fused only by
// `fused_multiply_add`, and never by the compiler (-ffp-contract=off).
//
// This file uses no functions of the standard library except memcpy and memset. Otherwise, the linker could keep the copies of
// inline functions that are compiled here, and a processor without this instruction set would then run them.
#include "products_tiles.hpp"
#include "sparse.hpp"
#include "u4.hpp"

namespace {

// The partial results of some queries over some keys: for each query, the largest score, the sum of the softmax weights
// relative to this score, and the sum of the weighted values.
struct Sums {
    float *maxima, *totals, *values;
};

// The queries `[token][head]` of a work item, and the state of each.
struct Tile {
    size_t count;
    float *queries, *scores;
    // The sums over the current part of the keys, and over the parts before it.
    Sums part, before;
    // The queries, and the softmax weights of a chunk, as pairs of bf16. These arrays are only used if products are computed in
    // bf16. With AMX, only large tiles use them, because small tiles multiply vectors of floats.
    uint32_t *query_pairs, *weight_pairs;
    // For large tiles: the keys or values of a block (with AMX, the values of a whole chunk), converted to the format in which
    // they are multiplied.
    float* unpacked;
    SelectionScratch selection;
    // For decodes that report block scores, two arrays `[query][block of the part]`. `block_masses` contains the sum of the
    // weights of each block, relative to the running maximum with which the weights were computed, and `block_maxima` contains
    // this maximum. For other items, `block_masses` is null.
    float *block_masses, *block_maxima;
};

// How products are computed. `f32` stands for products in f32, and `bf16` for products in bf16 with the dot-product
// instructions of AVX-512. `tiles` stands for products in bf16 with AMX: large tiles use the tile registers, and small tiles
// use vector instructions, with bit-identical results. With `tiles`, the keys and values of a u4 cache are multiplied in f32.
enum class Products { f32, bf16, tiles };

#if defined(OVFLEET_TILES)
constexpr Products PRODUCTS = Products::tiles;
using Rounding = TileRounding;
#else
#if defined(__AVX512BF16__)
constexpr Products PRODUCTS = Products::bf16;
#else
constexpr Products PRODUCTS = Products::f32;
#endif
// The rounding mode of the thread remains unchanged.
struct Rounding {
    Rounding() {}
};
#endif

constexpr Sums Tile::* SUMS[] = {&Tile::part, &Tile::before};

// The minimum number of queries for which it is worthwhile to convert a block to another format. The number for tile registers
// is an estimate from a prototype.
constexpr size_t LARGE_TILE = PRODUCTS == Products::tiles ? 8 : 16;

// The maximum number of queries of a tile, unless a single token has more. It is larger with tile registers, so that each block
// is converted to their format less often.
constexpr size_t TILE_QUERIES = PRODUCTS == Products::tiles ? 128 : 96;

// Calls `allocate` with the number of floats of each array of a tile.
template <typename Allocate>
inline void allocate_tile(const Layer& layer, size_t count, size_t blocks, Tile& tile, Allocate allocate) {
    const size_t size = layer.key_size > layer.value_size ? layer.key_size : layer.value_size;
    const size_t large = count < LARGE_TILE ? 0 : count;
    // Pad the rows to whole tile registers.
    constexpr bool in_tiles = PRODUCTS == Products::tiles;
    const size_t rows = in_tiles && large ? (count + 15) / 16 * 16 : count;
    const size_t in_pairs = PRODUCTS == Products::f32 || (in_tiles && !large) ? 0 : rows;
    tile.queries = allocate(count * layer.key_size);
    tile.scores = allocate(rows * CHUNK_KEYS);
    for (Sums Tile::* sums : SUMS) tile.*sums = {allocate(count), allocate(count), allocate(rows * layer.value_size)};
    tile.query_pairs = (uint32_t*)allocate(in_pairs * layer.key_size / 2);
    tile.weight_pairs = (uint32_t*)allocate(in_pairs * CHUNK_PAIRS);
    tile.unpacked = allocate(!large ? 0 : in_tiles ? CHUNK_PAIRS * size : BLOCK_TOKENS * size);
    allocate_selection(layer, count, blocks, tile.selection, allocate);
    // Only decodes report block scores. A decode has one token, and therefore one query for each query head that uses the KV
    // head.
    const size_t reported = layer.block_scores ? layer.heads / layer.kv_heads * PART_BLOCKS_MAX : 0;
    tile.block_masses = allocate(reported);
    tile.block_maxima = allocate(reported);
}

// Rounds the length of an array up, so that the next array begins at a multiple of the vector size.
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
        read_floats(layer, tensors.queries, tensors.query_stride, token, head, layer.key_size, layer.key_padding, to);
        apply_rope(layer, tensors, token, to);
        if (layer.precision == Precision::u4) rotate(to, layer.key_size);
    }
}

// Resets the sums of a tile.
void clear(const Layer& layer, size_t count, const Sums& sums) {
    for (size_t query = 0; query < count; ++query) sums.maxima[query] = MASKED;
    std::memset(sums.totals, 0, count * sizeof(float));
    std::memset(sums.values, 0, count * layer.value_size * sizeof(float));
}

// Adds the sums of a query over the next part to those over the parts before it.
inline void add_part(size_t size, float maximum, float total, const float* values, float& maximum_before, float& total_before,
                     float* values_before) {
    // The query attends to no key of the part.
    if (maximum == MASKED) return;
    const float now = maximum > maximum_before ? maximum : maximum_before;
    const Floats factor = exponential(broadcast(maximum - now));
    const Floats factor_before = maximum_before == MASKED ? Floats{} : exponential(broadcast(maximum_before - now));
    for (size_t i = 0; i < size; i += LANES)
        ::store(values_before + i, fused_multiply_add(load(values + i), factor, load(values_before + i) * factor_before));
    total_before = fused_multiply_add(broadcast(total), factor, total_before * factor_before)[0];
    maximum_before = now;
}

// Adds a tile's sums over the current part to those over the parts before it, and resets the sums over the current part.
void finish_part(const Layer& layer, const Tile& tile) {
    const auto& [maxima, totals, values] = tile.part;
    for (size_t query = 0; query < tile.count; ++query) {
        const size_t at = query * layer.value_size;
        add_part(layer.value_size, maxima[query], totals[query], values + at, tile.before.maxima[query],
                 tile.before.totals[query], tile.before.values + at);
    }
    clear(layer, tile.count, tile.part);
}

// The range of the keys of a chunk to which a query attends, relative to the first key of the chunk.
struct KeyRange {
    size_t from, to;
};

KeyRange visible_keys(const Layer& layer, const WorkItem& item, size_t query, size_t first_key, size_t keys) {
    const size_t position = item.sequence->past + item.token_begin + query / (layer.heads / layer.kv_heads);
    const size_t from = layer.window && position + 1 > layer.window ? position + 1 - layer.window : 0;
    const auto within = [&](size_t key) { return key < first_key ? 0 : key - first_key < keys ? key - first_key : keys; };
    return {within(from), within(layer.is_bidirectional ? item.sequence->past + item.sequence->count : position + 1)};
}

// The keys or values of a block, the position of the block in its chunk, and the memory to prefetch, which is read next.
struct BlockRef {
    const uint8_t* block;
    size_t at;
    const uint8_t* next;
};

// Empty hooks: `finish_query` is called after the softmax of each query, and `finish_chunk` after the last block of a chunk.
// Only `UnpackedBlocks` for tile registers has its own hooks.
struct OutsideTileRegisters {
    static void finish_query(size_t) {}
    static void finish_chunk(const Layer&, const Tile&, size_t) {}
};

// The softmax weights of one query for the keys of a block.
typedef Floats BlockWeights[BLOCK_VECTORS];

// Stores softmax weights in f32, in place of the scores.
inline void store_floats(const Tile& tile, size_t query, size_t key, const BlockWeights& weights) {
    for (size_t v = 0; v < BLOCK_VECTORS; ++v) ::store(tile.scores + query * CHUNK_KEYS + key + v * LANES, weights[v]);
}

// Softmax weights in f32.
struct FloatWeights : OutsideTileRegisters {
    static void prepare(const Layer&, const Tile&) {}
    // Returns the weights of keys relative to the weight of a key with the scaled score `maximum`.
    static Floats weights_of(Floats scores, float scale, float maximum) {
        return exponential(fused_multiply_add(scores, broadcast(scale), broadcast(-maximum)));
    }
    static void store(const Tile& tile, size_t query, size_t key, BlockWeights& weights) {
        store_floats(tile, query, key, weights);
    }
};

// Softmax weights that are rounded to bf16. The total of a query is the sum of the rounded weights, so that the
// rounding does not scale the output.
struct Bf16Weights {
    static Floats weights_of(Floats scores, float scale, float maximum) {
        return power_of_two(fused_multiply_add(scores, broadcast(scale * LOG2_E), broadcast(-maximum * LOG2_E)));
    }
};

// Reads blocks in the format of the cache, and multiplies in f32.
template <typename T>
struct FloatBlocks : FloatWeights {
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        score<T>(layer, ref.block, tile.queries, tile.scores + ref.at * BLOCK_TOKENS, tile.count,
                 {ref.next, layer.value_bytes / layer.key_size});
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        accumulate_values<T>(layer, ref.block, tile.scores + ref.at * BLOCK_TOKENS, tile.part.values, tile.count,
                             {ref.next, layer.key_bytes / BLOCK_TOKENS});
    }
};

#if defined(OVFLEET_TILES)

void round_queries(const Layer& layer, const Tile& tile) {
    for (size_t i = 0; i < tile.count * layer.key_size; ++i) {
        bf16 rounded;
        convert(tile.queries[i], rounded);
        tile.queries[i] = as_float(uint32_t(rounded.bits) << 16);
    }
}

// Small tiles read blocks in the format of the cache, and multiply with vector instructions.
template <typename T>
struct CacheBlocks : Bf16Weights, OutsideTileRegisters {
    static void prepare(const Layer& layer, const Tile& tile) { round_queries(layer, tile); }
    // Rounds the weights, and stores them.
    static void store(const Tile& tile, size_t query, size_t key, BlockWeights& weights) {
        for (Floats& vector : weights) vector = rounded_to_bf16(vector);
        store_floats(tile, query, key, weights);
    }
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        score_in_tile_order<T>(layer, ref.block, tile.queries, tile.scores + ref.at * BLOCK_TOKENS, tile.count,
                               {ref.next, layer.value_bytes / layer.key_size});
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        accumulate_in_tile_order<T>(layer, ref.block, tile.scores + ref.at * BLOCK_TOKENS, tile.part.values, tile.count,
                                    {ref.next, layer.key_bytes / BLOCK_TOKENS});
    }
};

// Large tiles convert each block to pairs of bf16 once, unless it contains them already.
template <typename T>
class UnpackedBlocks : public Bf16Weights {
public:
    UnpackedBlocks() : registers_(attention_config()) {}

    static void prepare(const Layer& layer, const Tile& tile) {
        round_queries(layer, tile);
        pack_queries(layer, tile.queries, tile.count, tile.query_pairs);
        // Zero the padding rows after the queries.
        const size_t rows = whole_tiles(tile.count) - tile.count;
        std::memset(tile.part.values + tile.count * layer.value_size, 0, rows * layer.value_size * sizeof(float));
        for (size_t row = tile.count; row < tile.count + rows; ++row)
            for (size_t at = 0; at < CHUNK_BLOCKS; ++at)
                std::memset(packed_row(tile.weight_pairs, CHUNK_BLOCKS, row, at), 0, TILE_ROW_BYTES);
    }
    // Rounds the weights, and stores them.
    static void store(const Tile& tile, size_t query, size_t key, BlockWeights& weights) {
        for (Floats& vector : weights) vector = rounded_to_bf16(vector);
        store_high_halves(packed_row(tile.weight_pairs, CHUNK_BLOCKS, query, key / BLOCK_TOKENS), weights);
        if (tile.block_masses) store_floats(tile, query, key, weights);
    }
    void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        constexpr size_t group_pairs = KEY_GROUP / 2 * BLOCK_TOKENS;
        const size_t groups = layer.key_size / KEY_GROUP;
        auto* pairs = (const uint32_t*)ref.block;
        if constexpr (!IS_PAIRED<T>) {
            pack_keys<T>(layer, ref.block, (uint32_t*)tile.unpacked, {ref.next, layer.value_bytes / layer.key_size});
            pairs = (const uint32_t*)tile.unpacked;
        }
        Columns keys;
        keys.count = BLOCK_TOKENS;
        for (size_t group = 0; group < groups; ++group) keys.steps[group] = pairs + group * group_pairs;
        multiply(registers_, {{tile.query_pairs, whole_tiles(tile.count) / TILE_ROWS, groups},
                              keys,
                              groups,
                              InitialSums::zero,
                              tile.scores + ref.at * BLOCK_TOKENS,
                              CHUNK_KEYS});
    }
    void finish_query(size_t query) {
        // Stores from tile registers are slow if they are more than half a microsecond apart, so one is executed after every 8
        // queries. The softmax of 8 queries with 128 scores each takes about 0.2 microseconds (0.2 ns for each score).
        if (query % 8 == 7) registers_.keep_storing();
    }
    void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        values_.steps[ref.at] = (const uint32_t*)ref.block;
        if constexpr (!IS_PAIRED<T>) {
            uint32_t* pairs = (uint32_t*)tile.unpacked + ref.at * (BLOCK_TOKENS / 2 * layer.value_size);
            pack_values<T>(layer, ref.block, pairs, {ref.next, layer.key_bytes / BLOCK_TOKENS});
            values_.steps[ref.at] = pairs;
            registers_.keep_storing();
        }
    }
    // Multiplies the weights by the values of all blocks of a chunk in one call, so that the sums are loaded and stored once.
    void finish_chunk(const Layer& layer, const Tile& tile, size_t count) {
        values_.count = layer.value_size;
        multiply(registers_, {{tile.weight_pairs, whole_tiles(tile.count) / TILE_ROWS, CHUNK_BLOCKS},
                              values_,
                              count,
                              InitialSums::stored,
                              tile.part.values,
                              layer.value_size});
    }

private:
    TileRegisters registers_;
    Columns values_;
};

#elif defined(__AVX512BF16__)

// Stores queries and softmax weights as pairs of bf16, because one instruction multiplies two pairs element by element and
// adds both products to a sum.
struct Weights : Bf16Weights, OutsideTileRegisters {
    static void prepare(const Layer& layer, const Tile& tile) {
        convert_to_bf16(tile.queries, tile.count * layer.key_size, tile.query_pairs);
    }
    // Rounds the weights, and stores them.
    static void store(const Tile& tile, size_t query, size_t key, BlockWeights& weights) {
        for (size_t v = 0; v < BLOCK_VECTORS; ++v)
            weights[v] = store_bf16(weights[v], tile.weight_pairs + query * CHUNK_PAIRS + (key + v * LANES) / 2);
        if (tile.block_masses) store_floats(tile, query, key, weights);
    }
};

// Small tiles read blocks in the format of the cache.
template <typename T>
struct CacheBlocks : Weights {
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        score_bf16<T>(layer, ref.block, tile.query_pairs, tile.scores + ref.at * BLOCK_TOKENS, tile.count,
                      {ref.next, layer.value_bytes / layer.key_size});
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        accumulate_values_bf16<T>(layer, ref.block, tile.weight_pairs + ref.at * BLOCK_TOKENS / 2, tile.part.values, tile.count,
                                  {ref.next, layer.key_bytes / BLOCK_TOKENS});
    }
};

// Large tiles convert each block to pairs once, unless it contains them already.
template <typename T>
struct UnpackedBlocks : Weights {
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        auto* pairs = (uint32_t*)ref.block;
        if constexpr (!IS_PAIRED<T>) {
            pairs = (uint32_t*)tile.unpacked;
            for (size_t group = 0; group < layer.key_size / KEY_GROUP; ++group) {
                const KeyGroup<T> keys(layer, ref.block, group);
                for (size_t i = 0; i < KEY_GROUP; i += 2)
                    for (size_t v = 0; v < BLOCK_VECTORS; ++v)
                        _mm512_storeu_si512(pairs + (group * KEY_GROUP + i) / 2 * BLOCK_TOKENS + v * LANES,
                                            key_pair(keys, i, v));
            }
        }
        multiply_bf16<2, 8>(tile.query_pairs, layer.key_size / 2, layer.key_size / 2, pairs, BLOCK_TOKENS,
                            tile.scores + ref.at * BLOCK_TOKENS, CHUNK_KEYS, false, tile.count);
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        auto* pairs = (uint32_t*)ref.block;
        if constexpr (!IS_PAIRED<T>) {
            pairs = (uint32_t*)tile.unpacked;
            for (size_t token = 0; token < BLOCK_TOKENS; token += 2)
                for (size_t i = 0; i < layer.value_size; i += LANES)
                    _mm512_storeu_si512(pairs + token / 2 * layer.value_size + i, value_pair<T>(layer, ref.block, token, i));
        }
        multiply_bf16<4, 4>(tile.weight_pairs + ref.at * BLOCK_TOKENS / 2, CHUNK_PAIRS, BLOCK_TOKENS / 2, pairs,
                            layer.value_size, tile.part.values, layer.value_size, true, tile.count);
    }
};

#else

typedef FloatWeights Weights;

// Small tiles read blocks in the format of the cache.
template <typename T>
struct CacheBlocks : FloatBlocks<T> {};

// Large tiles convert each block to f32 once.
template <typename T>
struct UnpackedBlocks : Weights {
    static void score_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        for (size_t group = 0; group < layer.key_size / KEY_GROUP; ++group) {
            const KeyGroup<T> keys(layer, ref.block, group);
            float* to = tile.unpacked + group * KEY_GROUP * BLOCK_TOKENS;
            for (size_t i = 0; i < KEY_GROUP; ++i)
                for (size_t v = 0; v < BLOCK_VECTORS; ++v) ::store(to + i * BLOCK_TOKENS + v * LANES, keys.key(i, v));
        }
        score<float>(layer, (const uint8_t*)tile.unpacked, tile.queries, tile.scores + ref.at * BLOCK_TOKENS, tile.count,
                     {(const uint8_t*)tile.unpacked, 0});
    }
    static void accumulate_block(const Layer& layer, const Tile& tile, const BlockRef& ref) {
        for (size_t token = 0; token < BLOCK_TOKENS; ++token) {
            const TokenValue<T> value(layer, ref.block, token);
            for (size_t i = 0; i < layer.value_size; i += LANES)
                ::store(tile.unpacked + token * layer.value_size + i, value.value(i));
        }
        const auto* values = (const uint8_t*)tile.unpacked;
        accumulate_values<float>(layer, values, tile.scores + ref.at * BLOCK_TOKENS, tile.part.values, tile.count, {values, 0});
    }
};

#endif

#if defined(OVFLEET_TILES)

// The keys and values of a u4 cache are multiplied in f32.
template <>
struct CacheBlocks<u4> : FloatBlocks<u4> {};

#endif

// Large tiles also read u4 blocks in the format of the cache.
template <>
struct UnpackedBlocks<u4> : CacheBlocks<u4> {};

// Turns the scores of a query for a chunk into weights, and rescales the sums of the query if its maximum has grown.
template <typename Blocks>
inline void online_softmax(const Layer& layer, const Tile& tile, size_t query, KeyRange visible, size_t keys) {
    float *scores = tile.scores + query * CHUNK_KEYS, *values = tile.part.values + query * layer.value_size;
    float &maximum = tile.part.maxima[query], &total = tile.part.totals[query];
    for (size_t key = 0; key < visible.from; ++key) scores[key] = MASKED;
    for (size_t key = visible.to; key < keys; ++key) scores[key] = MASKED;
    Floats high = load(scores);
    for (size_t key = LANES; key < keys; key += LANES) high = larger(high, load(scores + key));
    float now = largest(high) * layer.scale;
    if (maximum > now) now = maximum;
    // The query attends to no key of the chunk, and to none of the part's earlier keys.
    if (now == MASKED) {
        BlockWeights zeros = {};
        for (size_t key = 0; key < keys; key += BLOCK_TOKENS) Blocks::store(tile, query, key, zeros);
        return;
    }
    Floats sum = {};
    for (size_t key = 0; key < keys; key += BLOCK_TOKENS) {
        BlockWeights weights;
        for (size_t v = 0; v < BLOCK_VECTORS; ++v)
            weights[v] = Blocks::weights_of(load(scores + key + v * LANES), layer.scale, now);
        Blocks::store(tile, query, key, weights);
        for (const Floats& vector : weights) sum += vector;
    }
    if (now != maximum) {
        const float factor = maximum == MASKED ? 0 : exponential(broadcast(maximum - now))[0];
        total *= factor;
        for (size_t i = 0; i < layer.value_size; i += LANES) ::store(values + i, load(values + i) * factor);
        maximum = now;
    }
    total += horizontal_sum(sum);
}

// Records the mass of `count` blocks, starting at `first`.
inline void record_block_masses(const Tile& tile, size_t first, size_t count) {
    for (size_t query = 0; query < tile.count; ++query)
        for (size_t at = 0; at < count; ++at) {
            const float* weights = tile.scores + query * CHUNK_KEYS + at * BLOCK_TOKENS;
            Floats sum = {};
            for (size_t token = 0; token < BLOCK_TOKENS; token += LANES) sum += load(weights + token);
            tile.block_masses[query * PART_BLOCKS_MAX + first + at] = horizontal_sum(sum);
            tile.block_maxima[query * PART_BLOCKS_MAX + first + at] = tile.part.maxima[query];
        }
}

// Rescales the recorded masses of a part, so that all of them are relative to the final maximum.
inline void rescale_block_masses(const Tile& tile, size_t blocks) {
    for (size_t query = 0; query < tile.count; ++query)
        for (size_t at = query * PART_BLOCKS_MAX; at < query * PART_BLOCKS_MAX + blocks; ++at)
            if (tile.block_masses[at] > 0) tile.block_masses[at] *= power(tile.block_maxima[at] - tile.part.maxima[query]);
}

// The chunks that an item attends to: all of them, or the listed ones.
struct ChunkSelection {
    size_t count;
    const uint32_t* chunks;
    size_t at(size_t index) const { return chunks ? chunks[index] : index; }
};

// Selects the chunks that a tile attends to.
template <typename T>
ChunkSelection select_keys(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    const size_t chunks = chunks_of(item.block_end - item.block_begin), first_key = item.block_begin * BLOCK_TOKENS;
    if (!(layer.attention_mass > 0) || tile.count < SELECTION_QUERIES_MIN || chunks < SELECTION_CHUNKS_MIN)
        return {chunks, nullptr};
    const SelectionScratch& scratch = tile.selection;
    const size_t group = layer.heads / layer.kv_heads;
    const Sample sample = sample_of(group, tile.count);
    for (size_t index = 0; index < sample.count; ++index) {
        const size_t query = sample.query(index);
        std::memcpy(scratch.queries + index * layer.key_size, tile.queries + query * layer.key_size,
                    layer.key_size * sizeof(float));
    }
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
        const size_t begin = item.block_begin + chunk * CHUNK_BLOCKS;
        const size_t rest = item.block_end - begin, count = rest < CHUNK_BLOCKS ? rest : CHUNK_BLOCKS;
        for (size_t at = 0; at < count; ++at) {
            const uint8_t* block = key_block(layer, tensors, item.sequence->blocks[begin + at], item.kv_head);
            const size_t next = begin + at + 1 < item.block_end ? begin + at + 1 : item.block_begin;
            score<T>(layer, block, scratch.queries, scratch.scores + at * BLOCK_TOKENS, sample.count,
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
                 ChunkSelection selection, Blocks&& reader) {
    const int32_t* blocks = item.sequence->blocks;
    // After the last block of this item, the first keys of the next item are prefetched.
    const auto keys_of = [&](size_t block) -> const uint8_t* {
        if (block < item.block_end) return key_block(layer, tensors, blocks[block], item.kv_head);
        const WorkItem& next = *item.next;
        const size_t there = next.block_begin + (block - item.block_end);
        const size_t at = there < next.block_end ? there : next.block_begin;
        return key_block(layer, tensors, next.sequence->blocks[at], next.kv_head);
    };
    const auto values_of = [&](size_t block) { return value_block(layer, tensors, blocks[block], item.kv_head); };
    reader.prepare(layer, tile);
    clear(layer, tile.count, tile.part);
    clear(layer, tile.count, tile.before);
    size_t end_of_part = part_end(item.block_begin);
    for (size_t index = 0; index < selection.count; ++index) {
        const size_t first = item.block_begin + selection.at(index) * CHUNK_BLOCKS;
        if (first >= end_of_part) finish_part(layer, tile);
        end_of_part = part_end(first);
        const size_t rest = item.block_end - first, count = rest < CHUNK_BLOCKS ? rest : CHUNK_BLOCKS;
        const size_t next =
            index + 1 < selection.count ? item.block_begin + selection.at(index + 1) * CHUNK_BLOCKS : item.block_end;
        const size_t keys = count * BLOCK_TOKENS;
        for (size_t at = 0; at < count; ++at) reader.score_block(layer, tile, {keys_of(first + at), at, values_of(first + at)});
        for (size_t query = 0; query < tile.count; ++query) {
            online_softmax<Blocks>(layer, tile, query, visible_keys(layer, item, query, first * BLOCK_TOKENS, keys), keys);
            reader.finish_query(query);
        }
        if (tile.block_masses) record_block_masses(tile, first - item.block_begin, count);
        for (size_t at = 0; at < count; ++at)
            reader.accumulate_block(layer, tile, {values_of(first + at), at, keys_of(next + at)});
        reader.finish_chunk(layer, tile, count);
    }
    if (tile.block_masses) rescale_block_masses(tile, item.block_end - item.block_begin);
    if (!item.part) finish_part(layer, tile);
}

template <typename T>
void attend_as(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    const ChunkSelection selection = select_keys<T>(layer, item, tensors, tile);
    if (tile.count < LARGE_TILE) attend_with(layer, item, tensors, tile, selection, CacheBlocks<T>());
    else attend_with(layer, item, tensors, tile, selection, UnpackedBlocks<T>());
}

// Returns the factor by which the sum of the weighted values of a query is multiplied to obtain the output. `maximum` is the
// largest score over all keys, and `total` is the sum of their weights. The sink of a head acts like the score of an additional
// key whose value vector is zero.
inline float inverse_total(const Layer& layer, const WorkItem& item, const StepTensors& tensors, size_t query, float maximum,
                           float total) {
    if (!tensors.sinks) return 1 / total;
    const size_t group = layer.heads / layer.kv_heads;
    const float sink = tensors.sinks[item.kv_head * group + query % group], now = sink > maximum ? sink : maximum;
    const float factor = power(maximum - now);
    return factor / (total * factor + power(sink - now));
}

// Writes the output of a query. `inverse` is the factor that `inverse_total` returns.
inline void store_output(const Layer& layer, const WorkItem& item, const StepTensors& tensors, size_t query, float inverse,
                         const float* values) {
    float rotated[HEAD_SIZE_MAX];
    if (layer.precision == Precision::u4) {
        std::memcpy(rotated, values, layer.value_size * sizeof(float));
        rotate(rotated, layer.value_size);
        values = rotated;
    }
    const size_t group = layer.heads / layer.kv_heads;
    const size_t token = item.sequence->begin + item.token_begin + query / group;
    const size_t size = layer.value_size - layer.value_padding;
    const size_t at = (token * layer.heads + item.kv_head * group + query % group) * size;
    for (size_t i = 0; i < size; i += LANES) {
        // Adding zero turns -0 into 0. A key to which only other queries of the tile attend has the same effect, so the sign
        // would otherwise depend on the tile.
        const Floats output = load(values + i) * inverse + 0.0f;
        if (layer.is_bf16)
            for (size_t lane = 0; lane < LANES; ++lane) convert(output[lane], ((bf16*)tensors.output)[at + i + lane]);
        else if (i + LANES <= size) ::store((float*)tensors.output + at + i, output);
        else std::memcpy((float*)tensors.output + at + i, &output, (size - i) * sizeof(float));
    }
}

inline float* block_scores_of(const WorkItem& item, const StepTensors& tensors) {
    return tensors.block_scores + item.kv_head * tensors.step_blocks + item.sequence->first_block + item.block_begin;
}

// Writes the output, or the partial result of the item.
void store_results(const Layer& layer, const WorkItem& item, const StepTensors& tensors, const Tile& tile) {
    const size_t size = layer.value_size, blocks = tile.block_masses ? item.block_end - item.block_begin : 0;
    for (size_t query = 0; query < tile.count; ++query) {
        if (!item.part) {
            const float inverse =
                inverse_total(layer, item, tensors, query, tile.before.maxima[query], tile.before.totals[query]);
            store_output(layer, item, tensors, query, inverse, tile.before.values + query * size);
            for (size_t block = 0; block < blocks; ++block)
                block_scores_of(item, tensors)[block] += tile.block_masses[query * PART_BLOCKS_MAX + block] * inverse;
            continue;
        }
        float* part = item.part + query * part_stride(layer);
        part[0] = tile.part.maxima[query];
        part[1] = tile.part.totals[query];
        std::memcpy(part + 2, tile.part.values + query * size, size * sizeof(float));
        for (size_t block = 0; block < blocks; ++block)
            part[2 + size + block] = tile.block_masses[query * PART_BLOCKS_MAX + block];
    }
}

void merge(const Layer& layer, const WorkItem* items, size_t count, const StepTensors& tensors) {
    const Rounding rounding;
    const size_t group = layer.heads / layer.kv_heads, size = layer.value_size;
    for (size_t query = 0; query < group; ++query) {
        float values[HEAD_SIZE_MAX], maximum = MASKED, total = 0;
        std::memset(values, 0, size * sizeof(float));
        const auto part_of = [&](size_t index) { return items[index].part + query * part_stride(layer); };
        for (size_t index = 0; index < count; ++index) {
            const float* part = part_of(index);
            add_part(size, part[0], part[1], part + 2, maximum, total, values);
        }
        const float inverse = inverse_total(layer, items[0], tensors, query, maximum, total);
        store_output(layer, items[0], tensors, query, inverse, values);
        for (size_t index = 0; layer.block_scores && index < count; ++index) {
            const WorkItem& item = items[index];
            const float* part = part_of(index);
            for (size_t block = 0; block < item.block_end - item.block_begin; ++block)
                block_scores_of(item, tensors)[block] += part[2 + size + block] * power(part[0] - maximum) * inverse;
        }
    }
}

void attend(const Layer& layer, const WorkItem& item, const StepTensors& tensors, float* scratch) {
    Tile tile = tile_in(layer, (item.token_end - item.token_begin) * (layer.heads / layer.kv_heads),
                        item.block_end - item.block_begin, scratch);
    if (!layer.block_scores || item.sequence->count > 1) tile.block_masses = nullptr;
    if (item.stores) store_new_tokens(layer, *item.sequence, tensors, item.kv_head);
    const Rounding rounding;
    load_queries(layer, item, tensors, tile);
    switch (layer.precision) {
        case Precision::f32: attend_as<float>(layer, item, tensors, tile); break;
        case Precision::bf16: attend_as<bf16>(layer, item, tensors, tile); break;
        case Precision::f16: attend_as<f16>(layer, item, tensors, tile); break;
        case Precision::u8: attend_as<uint8_t>(layer, item, tensors, tile); break;
        case Precision::u4: attend_as<u4>(layer, item, tensors, tile); break;
    }
    store_results(layer, item, tensors, tile);
}

}  // namespace

const ovfleet::Kernels ovfleet::OVFLEET_KERNELS = {TILE_QUERIES, scratch, store_new_tokens, attend, merge};
