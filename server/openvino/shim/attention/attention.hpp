// Attention over a paged KV cache: what is asked, and the kernels that compute it.
//
// Nothing here knows OpenVINO. `kernels.cpp` is compiled once for each instruction set, so every function in this header is
// `static`: were it merely `inline`, the linker could keep the body that was compiled for AVX-512 and call it on a processor
// without AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ovfleet {

// How numbers are kept in the cache.
enum class Precision : int64_t { f32, bf16, f16, u8 };

// What prompts are computed in: f32; bf16, as what is around; bf16, where what is around is f32.
enum class Compute : int64_t { f32, bf16, bf16_around_f32 };

// Tokens of a block. Scores of a block are two vectors of 16 floats.
constexpr size_t BLOCK_TOKENS = 32;
// Blocks that are looked at between two corrections of the running maximum.
constexpr size_t BLOCKS_AT_ONCE = 4;
constexpr size_t KEYS_AT_ONCE = BLOCKS_AT_ONCE * BLOCK_TOKENS;
// Blocks of a sequence that one thread takes at a time where one token attends to them: whoever takes them, and whatever
// else is in the step, sums are made in the same order.
constexpr size_t PART_BLOCKS = 32;
static_assert(PART_BLOCKS % BLOCKS_AT_ONCE == 0);
// Most numbers of a key or a value.
constexpr size_t HEAD_SIZE_MAX = 512;
// Most query heads of a layer.
constexpr size_t HEADS_MAX = 1 << 16;
// Numbers of a key that share a scale and a minimum, where keys are bytes; of values all of a head's do.
constexpr size_t KEY_GROUP = 32;

// An attention layer. A head of a block holds
// - keys `[size][token]`, then, if they are bytes, `[group][scale, minimum][token]` in f32: scores of a block are sums of
//   vectors along its tokens;
// - values `[token][size]`, then, if they are bytes, `[scale, minimum][token]` in f32.
struct Layer {
    size_t heads, kv_heads;
    // Multiples of 32 and of 16.
    size_t key_size, value_size;
    Precision precision;
    // Bytes of a head of a block.
    size_t key_bytes, value_bytes;
    float scale;
    // Tokens that a token attends to, with itself; 0: all.
    size_t window;
    // Whether queries, new keys and values and the output are bf16, not f32; and whether prompts are computed in it.
    bool is_bf16, in_bf16;
    // Of the weight of all keys, how much those must have that a tile of a long prompt looks at; 0: it looks at all.
    float share;
    // Whether it is told what weight blocks have with the tokens of decodes.
    bool weighs;
};

// Fills in the sizes of a layer's cache.
static inline void measure(Layer& layer) {
    const bool scaled = layer.precision == Precision::u8;
    const size_t number = layer.precision == Precision::f32 ? 4 : scaled ? 1 : 2, scale = scaled ? 2 * sizeof(float) : 0;
    layer.key_bytes = BLOCK_TOKENS * (layer.key_size * number + layer.key_size / KEY_GROUP * scale);
    layer.value_bytes = BLOCK_TOKENS * (layer.value_size * number + scale);
}

// What makes a layer one that the kernels cannot compute; null if they can. Attributes of a graph are checked with this before
// any of them sizes memory or divides.
static inline const char* unsupported(const Layer& layer) {
    const auto is_within = [](size_t value, size_t multiple, size_t most) {
        return value > 0 && value <= most && value % multiple == 0;
    };
    if (!is_within(layer.heads, 1, HEADS_MAX)) return "the number of query heads must be from 1 to 65536";
    if (!is_within(layer.kv_heads, 1, layer.heads) || layer.heads % layer.kv_heads != 0)
        return "the number of KV heads must divide the number of query heads";
    if (!is_within(layer.key_size, 32, HEAD_SIZE_MAX)) return "the key size must be a multiple of 32, up to 512";
    if (!is_within(layer.value_size, 16, HEAD_SIZE_MAX)) return "the value size must be a multiple of 16, up to 512";
    if (layer.precision < Precision::f32 || layer.precision > Precision::u8) return "the cache has an unknown precision";
    if (!(layer.scale > 0) || layer.scale > 1e30f) return "the scale must be a positive, finite number";
    if (!(layer.share >= 0) || layer.share > 1) return "the attention mass must be from 0 to 1";
    if (layer.window > size_t(INT32_MAX)) return "the sliding window does not fit into 32 bits";
    return nullptr;
}

// A sequence's tokens in a step, and its blocks.
struct Sequence {
    // Where its new tokens are among those of the step.
    size_t begin, count;
    // Tokens before them.
    size_t past;
    const int32_t* blocks;
    // Where its blocks are among those of the step.
    size_t place;
};

// The memory of a step: queries `[head][key_size]` of a token, `query_row` numbers from one token's to the next one's, and so
// on. `keys` and `values` are the new tokens'.
struct Memory {
    const void *queries, *keys, *values;
    size_t query_row, key_row, value_row;
    // Tables `[token][key_size]` by which queries and keys are turned first: x * cos + (-second half, first half) * sin. Null if
    // they are not.
    const float *cos, *sin;
    void* output;
    uint8_t *key_cache, *value_cache;
    // Where the weights of the step's blocks are added to, `[kv_head][block]`, if the layer tells them.
    float* weights;
    size_t step_blocks;
};

// Some new tokens of a sequence and a head of the cache: all queries that read the same keys; and the keys.
struct Item {
    const Sequence* sequence;
    size_t kv_head;
    size_t token_begin, token_end;
    // Whether its new keys and values are put into the cache first: nobody else reads them in this step.
    bool stores;
    // Blocks of the sequence, from a multiple of `BLOCKS_AT_ONCE` on.
    size_t block_begin, block_end;
    // Where the result goes if other items have the rest of the keys: for each query its maximum, its sum, its weighted
    // values, and if they are told the weights of its blocks. Null if there are none: then the output is written.
    float* part;
    // What is likely to be computed next by the same thread, to have its memory ready; itself if nothing is.
    const Item* next;
};

// Floats of a query in a part.
static inline size_t part_row(const Layer& layer) { return 2 + layer.value_size + (layer.weighs ? PART_BLOCKS : 0); }

struct Kernels {
    // Floats that `attend` needs for itself with so many queries at once, and blocks that they attend to.
    size_t (*scratch)(const Layer& layer, size_t queries, size_t blocks);
    // Puts the keys and values of a sequence's new tokens into a head of its blocks.
    void (*store)(const Layer& layer, const Sequence& sequence, const Memory& memory, size_t kv_head);
    // Computes an item.
    void (*attend)(const Layer& layer, const Item& item, const Memory& memory, float* scratch);
};

// The best for the processor this runs on.
const Kernels& kernels();
// Those for an instruction set, from the plainest to the best; null if this processor does not have it.
constexpr size_t KERNEL_SETS = 4;
const Kernels* kernels_of(size_t set);
extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif

}  // namespace ovfleet
