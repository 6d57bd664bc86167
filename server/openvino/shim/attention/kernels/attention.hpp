// The interface of the attention kernels: attention over a paged KV cache.
//
// Kernels do not use OpenVINO. `kernels.cpp` is compiled once for each instruction set, so every function in this header is
// `static`: the linker could otherwise keep the body of an `inline` function that was compiled for AVX-512, and a processor
// without AVX-512 would then run it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../isa.hpp"

namespace ovfleet {

// The precision of the KV cache. Compiled models contain these values.
enum class Precision : int64_t { f32, bf16, f16, u8, u4 };

// The number of tokens in a block. The scores of one query for the keys of a block fill two AVX-512 vectors of 16 floats.
constexpr size_t BLOCK_TOKENS = 32;
// The number of blocks in a chunk. The running maximum of the softmax is updated once for each chunk.
constexpr size_t CHUNK_BLOCKS = 4;
constexpr size_t CHUNK_KEYS = CHUNK_BLOCKS * BLOCK_TOKENS;
// The number of bf16 pairs that contain the softmax weights of one query for the keys of a chunk.
constexpr size_t CHUNK_PAIRS = CHUNK_KEYS / 2;
// The largest number of blocks in a part. The sums of a query are computed separately for each part and then added in order.
// Different threads can therefore compute the parts of a decode, and the sums are the same as if the token were part of a
// prompt.
constexpr size_t PART_BLOCKS_MAX = 32;
// Returns the end of the part that contains a block: the index of the block after the part. The first parts are shorter, so
// that many threads can share the decode of a short sequence. Later parts are longer, because merging the sums of each part
// takes time. The division into parts depends only on the position in the sequence.
static inline size_t part_end(size_t block) {
    const size_t length = block < 4 * PART_BLOCKS_MAX ? PART_BLOCKS_MAX / 2 : PART_BLOCKS_MAX;
    return block / length * length + length;
}
static_assert(PART_BLOCKS_MAX / 2 % CHUNK_BLOCKS == 0);
// Key sizes are multiples of `KEY_MULTIPLE`, and value sizes are multiples of `VALUE_MULTIPLE`.
constexpr size_t KEY_MULTIPLE = 32, VALUE_MULTIPLE = 16;
// The largest size of a key or a value, in elements.
constexpr size_t HEAD_SIZE_MAX = 512;
// The largest number of query heads of a layer.
constexpr size_t HEADS_MAX = 1 << 16;
// In a u8 cache, the number of elements of a key that share a scale and a minimum. All elements of a value share one scale and
// one minimum.
constexpr size_t KEY_GROUP = 32;
// In a u4 cache, a 32-bit word contains `U4_KEY_WORD` elements of a key. `U4_KEY_GROUP` words of a key share a scale, and so
// do `U4_VALUE_GROUP` elements of a value.
constexpr size_t U4_KEY_WORD = 6, U4_KEY_GROUP = 4, U4_VALUE_GROUP = 16;

// An attention layer. One head of a block contains
// - keys `[key_size][token]`, followed by `[group][scale, minimum][token]` in f32 if the cache is u8. The tokens are the
//   innermost dimension, so that a vector contains the scores of consecutive tokens;
// - values `[token][value_size]`, followed by `[scale, minimum][token]` in f32 if the cache is u8.
// In a bf16 cache, numbers are stored in pairs, as dot-product instructions require: keys `[key_size / 2][token][2]` and values
// `[token / 2][value_size][2]`.
// In a u4 cache, scales are bf16, and one head of a block contains
// - 5-bit keys, in words `[element / U4_KEY_WORD][token]`, then `[word / U4_KEY_GROUP][token]` scales, then the key of the
//   first token in f16. The 5-bit keys are differences from this key;
// - 4-bit values, in words `[token / 8][element]`, then `[element / U4_VALUE_GROUP][token]` scales.
struct Layer {
    size_t heads, kv_heads;
    // The key size is a multiple of 32, and the value size is a multiple of 16.
    size_t key_size, value_size;
    // The number of zeros with which the kernels pad each query and key of a step's tensors, and the number with which
    // they pad each value.
    size_t key_padding, value_padding;
    Precision precision;
    // The sizes in bytes of the keys and of the values of one head of a block.
    size_t key_bytes, value_bytes;
    float scale;
    // The maximum number of tokens to which a token attends, including itself, or 0 without a sliding window.
    size_t window;
    // Whether a token also attends to the tokens after it in its sequence.
    bool is_bidirectional;
    // Whether queries, keys, values and outputs are bf16 instead of f32.
    bool is_bf16;
    // With sparse attention, the fraction of the attention mass that the keys selected for a tile of a long prompt must cover;
    // 0 without sparse attention.
    float attention_mass;
    // Whether decodes report the attention to each block.
    bool block_scores;
};

// The number of 32-bit words of a key in a u4 cache.
static inline size_t u4_key_rows(size_t key_size) { return (key_size + U4_KEY_WORD - 1) / U4_KEY_WORD; }

// Computes `key_bytes` and `value_bytes` from the other members of a layer.
static inline void set_cache_sizes(Layer& layer) {
    if (layer.precision == Precision::u4) {
        const size_t rows = u4_key_rows(layer.key_size), groups = (rows + U4_KEY_GROUP - 1) / U4_KEY_GROUP;
        layer.key_bytes =
            BLOCK_TOKENS * (rows * sizeof(uint32_t) + groups * sizeof(uint16_t)) + layer.key_size * sizeof(uint16_t);
        layer.value_bytes = BLOCK_TOKENS * (layer.value_size / 2 + layer.value_size / U4_VALUE_GROUP * sizeof(uint16_t));
        return;
    }
    const bool scaled = layer.precision == Precision::u8;
    const size_t number = layer.precision == Precision::f32 ? 4 : scaled ? 1 : 2, scale = scaled ? 2 * sizeof(float) : 0;
    layer.key_bytes = BLOCK_TOKENS * (layer.key_size * number + layer.key_size / KEY_GROUP * scale);
    layer.value_bytes = BLOCK_TOKENS * (layer.value_size * number + scale);
}

// Returns the reason why the kernels do not support a layer, or null if they do. The attributes of a graph are checked
// with this function before any of them is used as a size or a divisor.
static inline const char* unsupported(const Layer& layer) {
    const auto is_within = [](size_t value, size_t multiple, size_t most) {
        return value > 0 && value <= most && value % multiple == 0;
    };
    if (!is_within(layer.heads, 1, HEADS_MAX)) return "the number of query heads must be from 1 to 65536";
    if (!is_within(layer.kv_heads, 1, layer.heads) || layer.heads % layer.kv_heads != 0)
        return "the number of KV heads must divide the number of query heads";
    if (!is_within(layer.key_size, KEY_MULTIPLE, HEAD_SIZE_MAX)) return "the key size must be a multiple of 32, up to 512";
    if (!is_within(layer.value_size, VALUE_MULTIPLE, HEAD_SIZE_MAX))
        return "the value size must be a multiple of 16, up to 512";
    if (layer.key_padding >= layer.key_size || layer.value_padding >= layer.value_size)
        return "the padding must be smaller than the key size and the value size";
    if (layer.is_bf16 && (layer.key_padding || layer.value_padding)) return "only f32 tensors may be padded";
    if (layer.precision < Precision::f32 || layer.precision > Precision::u4) return "the cache has an unknown precision";
    if (!(layer.scale > 0) || layer.scale > 1e30f) return "the scale must be a positive, finite number";
    if (!(layer.attention_mass >= 0) || layer.attention_mass > 1) return "the attention mass must be from 0 to 1";
    if (layer.window > size_t(INT32_MAX)) return "the sliding window must be at most 2147483647 tokens";
    if (layer.window && layer.is_bidirectional) return "bidirectional attention must not have a sliding window";
    return nullptr;
}

// The new tokens of a sequence in a step, and the blocks of the sequence.
struct Sequence {
    // The index of the sequence's first new token among the new tokens of all sequences, and the number of the
    // sequence's new tokens.
    size_t begin, count;
    // The number of tokens before the new tokens.
    size_t past;
    const int32_t* blocks;
    // The index of the sequence's first block among the blocks of the step.
    size_t first_block;
};

// The tensors of a step. The queries of a token are `[head][key_size]`, without the padding, and `query_stride` is the number
// of elements from the queries of one token to those of the next one. The keys and values, which are only those of the new
// tokens, are laid out in the same way.
struct StepTensors {
    const void *queries, *keys, *values;
    size_t query_stride, key_stride, value_stride;
    // The tables `[token][key_size]` of a rotary embedding that the kernels apply to queries and keys:
    // x * cos + concat(-second half, first half) * sin. Null if the kernels apply no rotary embedding.
    const float *cos, *sin;
    void* output;
    uint8_t *key_cache, *value_cache;
    // The scores `[kv_head][block]` of the step's blocks, or null if the layer does not report them. The kernels add the
    // softmax weights of a block's keys to the score of the block.
    float* block_scores;
    size_t step_blocks;
    // The sink of each query head: a learned logit that takes part in the softmax like the score of an additional key whose
    // value vector is zero. Null without sinks.
    const float* sinks;
};

// A unit of the work of a step: some new tokens of a sequence, the query heads that share one KV head, and a range of the keys.
struct WorkItem {
    const Sequence* sequence;
    size_t kv_head;
    size_t token_begin, token_end;
    // Whether the item first stores the new keys and values of its KV head. In this case, no other item of the step reads them.
    bool stores;
    // The range of the sequence's blocks whose keys the item covers. It begins at a multiple of `CHUNK_BLOCKS`, and is within
    // one part if the result is partial.
    size_t block_begin, block_end;
    // The partial result if other items cover the rest of the keys, or null if this item writes the output. A partial result
    // contains, for each query, the largest score, the sum of the softmax weights, the weighted sum of the values and, if block
    // scores are reported, the sum of the weights of each block.
    float* part;
    // The item that the same thread will probably compute next, for prefetching; the item itself if no item follows.
    const WorkItem* next;
};

// The number of floats of one query in a partial result.
static inline size_t part_stride(const Layer& layer) {
    return 2 + layer.value_size + (layer.block_scores ? PART_BLOCKS_MAX : 0);
}

// The kernels of one instruction set.
struct Kernels {
    // The maximum number of queries of a work item, unless a single token has more.
    size_t tile_queries;
    // The number of floats that `attend` needs as scratch memory for these numbers of queries and blocks.
    size_t (*scratch)(const Layer& layer, size_t queries, size_t blocks);
    // Stores the keys and values of a sequence's new tokens in one head of its blocks.
    void (*store)(const Layer& layer, const Sequence& sequence, const StepTensors& tensors, size_t kv_head);
    // Computes the attention for a work item.
    void (*attend)(const Layer& layer, const WorkItem& item, const StepTensors& tensors, float* scratch);
    // Adds the partial results of `count` items, which together cover all keys of a token and a KV head, and writes the output.
    void (*merge)(const Layer& layer, const WorkItem* items, size_t count, const StepTensors& tensors);
};

// Returns the kernels for an instruction set, or null if they do not exist or this processor lacks the instruction set.
const Kernels* attention_kernels(Isa isa);
// For tests: returns the AMX kernels that use the C++ model of the tile registers and vector code for the instruction set
// `vectors`, or null if they are not compiled for this instruction set or this processor lacks it.
const Kernels* attention_tile_model(Isa vectors);
extern const Kernels kernels_portable, kernels_tile_model_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx, kernels_tile_model_avx512;
#endif

}  // namespace ovfleet
