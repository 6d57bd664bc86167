// A cache of small integers (u4): 5-bit keys and 4-bit values. This header contains the functions that store and multiply them.
// Only for kernels.cpp.
//
// Two methods keep rounding errors small (docs/decisions/0090-u4-cache.md):
// - Queries, keys and values are rotated by a Hadamard matrix, which distributes large elements over many dimensions of a head.
//   The matrix is orthogonal, so scores do not change, and it is its own inverse, so it also rotates the outputs back.
// - Keys are stored as differences from the first key of their block, because the keys of a head are similar. The first
//   key is stored in f16, and its product with a query is added to all scores of the block.
//
// Products are computed with the stored integers: scores are scaled afterward, and the scales of values are multiplied
// into the softmax weights. Large tiles do not convert a whole u4 block in advance. Like small tiles, they read it
// directly, because converting the integers takes only a few instructions.
#pragma once

#include "products_bf16.hpp"

namespace {

// The packing of signed integers in 32-bit words. The numbers with even indices are in the low half of a word and those with
// odd indices in the high half, so that each half contains one number of each pair.
template <size_t BITS>
struct Packing {
    static constexpr size_t NUMBERS = 16 / BITS * 2;
    static constexpr size_t shift(size_t number) { return number % 2 * 16 + number / 2 * BITS; }
    static constexpr uint32_t MASK = (1u << BITS) - 1;
};

constexpr size_t KEY_BITS = 5, VALUE_BITS = 4;
using PackedKeys = Packing<KEY_BITS>;
using PackedValues = Packing<VALUE_BITS>;
static_assert(PackedKeys::NUMBERS == U4_KEY_WORD && U4_VALUE_GROUP % LANES == 0);

// The number of elements of a key that share a scale, without and with the padding to whole vectors.
constexpr size_t KEY_SCALE_NUMBERS = U4_KEY_GROUP * U4_KEY_WORD, PADDED_KEY_GROUP = 32;
static_assert(KEY_SCALE_NUMBERS <= PADDED_KEY_GROUP && PADDED_KEY_GROUP % LANES == 0);

// The words and the scales of one head in a block, in the format that attention.hpp describes.
struct U4Block {
    uint32_t* words;
    bf16* scales;
    U4Block(const uint8_t* at, size_t rows, size_t columns)
        : words((uint32_t*)at), scales((bf16*)(at + rows * columns * sizeof(uint32_t))) {}
};

inline U4Block u4_keys(size_t size, const uint8_t* block) { return {block, u4_key_rows(size), BLOCK_TOKENS}; }

inline f16* reference_key(size_t size, const U4Block& keys) {
    const size_t groups = (u4_key_rows(size) + U4_KEY_GROUP - 1) / U4_KEY_GROUP;
    return (f16*)(keys.scales + groups * BLOCK_TOKENS);
}

inline U4Block u4_values(size_t size, const uint8_t* block) { return {block, BLOCK_TOKENS / PackedValues::NUMBERS, size}; }

// The size of the Hadamard matrix that is stored as a table of signs. An element is -1 if the indices of its row and column
// have an odd number of set bits in common, and otherwise 1.
constexpr size_t SIGNS = 16;
struct HadamardSigns {
    float at[SIGNS][SIGNS];
};

constexpr HadamardSigns hadamard_signs() {
    HadamardSigns signs{};
    for (size_t row = 0; row < SIGNS; ++row)
        for (size_t column = 0; column < SIGNS; ++column) {
            float sign = 1;
            for (size_t common = row & column; common > 0; common &= common - 1) sign = -sign;
            signs.at[row][column] = sign;
        }
    return signs;
}

constexpr HadamardSigns HADAMARD_SIGNS = hadamard_signs();

// Multiplies each group of `width` consecutive elements of a head by an orthonormal Hadamard matrix, where `width` is the
// largest power of two that divides the size of the head. A second call undoes the first one.
inline void rotate(float* numbers, size_t size) {
    const size_t width = size & (~size + 1);
    float factor = 1;
    for (size_t rest = width; rest > 1; rest /= 4) factor *= rest == 2 ? 0.70710678f : 0.5f;
    for (size_t begin = 0; begin < size; begin += SIGNS) {
        Floats sum[SIGNS / LANES] = {};
        for (size_t i = 0; i < SIGNS; ++i)
            for (size_t v = 0; v < SIGNS / LANES; ++v)
                sum[v] = fused_multiply_add(load(HADAMARD_SIGNS.at[i] + v * LANES), broadcast(numbers[begin + i]), sum[v]);
        for (size_t v = 0; v < SIGNS / LANES; ++v) ::store(numbers + begin + v * LANES, sum[v] * broadcast(factor));
    }
    for (size_t half = SIGNS; half < width; half *= 2)
        for (size_t begin = 0; begin < size; begin += 2 * half)
            for (size_t i = begin; i < begin + half; i += LANES) {
                const Floats first = load(numbers + i), second = load(numbers + i + half);
                ::store(numbers + i, first + second);
                ::store(numbers + i + half, first - second);
            }
}

// Quantizes numbers to signed integers of `BITS` bits, and returns the scale. The sign of the scale is chosen so that the
// number with the largest magnitude becomes the lowest of these integers, whose magnitude is larger than that of the highest.
template <size_t BITS>
inline bf16 quantize_signed(const float* from, size_t count, int32_t* to) {
    constexpr int32_t half = 1 << (BITS - 1);
    Floats low = load(from), high = low;
    for (size_t i = LANES; i < count; i += LANES) {
        low = -larger(-low, -load(from + i));
        high = larger(high, load(from + i));
    }
    const float least = -largest(-low), most = largest(high);
    bf16 scale;
    convert((most > -least ? most : least) / -half, scale);
    const float rounded = as_float(uint32_t(scale.bits) << 16);
    // The inverse of a subnormal number can be infinite.
    const float inverse = rounded > -0x1p-126f && rounded < 0x1p-126f ? 0 : 1 / rounded;
    for (size_t i = 0; i < count; i += LANES) {
        // The conversion truncates, so the numbers are made positive before they are rounded.
        const Floats shifted = fused_multiply_add(load(from + i), broadcast(inverse), broadcast(half + 0.5f));
        Ints whole = __builtin_convertvector(shifted, Ints);
        whole = whole < 0 ? Ints{} : whole > 2 * half - 1 ? Ints{} + (2 * half - 1) : whole;
        whole -= half;
        std::memcpy(to + i, &whole, sizeof(whole));
    }
    return scale;
}

void store_u4_key(const U4Block& block, size_t size, size_t slot, const float* key) {
    const size_t rows = u4_key_rows(size);
    for (size_t group = 0; group * U4_KEY_GROUP < rows; ++group) {
        const size_t first = group * U4_KEY_GROUP, begin = first * U4_KEY_WORD;
        float padded[PADDED_KEY_GROUP] = {};
        const size_t rest = size - begin;
        std::memcpy(padded, key + begin, (rest < KEY_SCALE_NUMBERS ? rest : KEY_SCALE_NUMBERS) * sizeof(float));
        int32_t numbers[PADDED_KEY_GROUP];
        block.scales[group * BLOCK_TOKENS + slot] = quantize_signed<KEY_BITS>(padded, PADDED_KEY_GROUP, numbers);
        for (size_t row = first; row < rows && row < first + U4_KEY_GROUP; ++row) {
            uint32_t word = 0;
            for (size_t i = 0; i < U4_KEY_WORD; ++i)
                word |= (uint32_t(numbers[(row - first) * U4_KEY_WORD + i]) & PackedKeys::MASK) << PackedKeys::shift(i);
            block.words[row * BLOCK_TOKENS + slot] = word;
        }
    }
}

void store_u4_value(const U4Block& block, size_t size, size_t slot, const float* value) {
    uint32_t* words = block.words + slot / PackedValues::NUMBERS * size;
    const size_t shift = PackedValues::shift(slot % PackedValues::NUMBERS);
    for (size_t group = 0; group < size / U4_VALUE_GROUP; ++group) {
        const size_t begin = group * U4_VALUE_GROUP;
        int32_t numbers[U4_VALUE_GROUP];
        block.scales[group * BLOCK_TOKENS + slot] = quantize_signed<VALUE_BITS>(value + begin, U4_VALUE_GROUP, numbers);
        for (size_t i = 0; i < U4_VALUE_GROUP; ++i) {
            const uint32_t number = uint32_t(numbers[i]) & PackedValues::MASK;
            uint32_t& word = words[begin + i];
            word = (word & ~(PackedValues::MASK << shift)) | number << shift;
        }
    }
}

template <>
void store_token<u4>(const Layer& layer, const float* key, const float* value, uint8_t* keys, uint8_t* values, size_t slot) {
    float rotated[HEAD_SIZE_MAX];
    std::memcpy(rotated, key, layer.key_size * sizeof(float));
    rotate(rotated, layer.key_size);
    const U4Block of_keys = u4_keys(layer.key_size, keys);
    f16* reference = reference_key(layer.key_size, of_keys);
    for (size_t i = 0; slot == 0 && i < layer.key_size; ++i) store_number(rotated[i], reference[i]);
    for (size_t i = 0; i < layer.key_size; i += LANES) ::store(rotated + i, load(rotated + i) - load(reference + i));
    store_u4_key(of_keys, layer.key_size, slot, rotated);
    std::memcpy(rotated, value, layer.value_size * sizeof(float));
    rotate(rotated, layer.value_size);
    store_u4_value(u4_values(layer.value_size, values), layer.value_size, slot, rotated);
}

// The signed integer that the lowest `BITS` bits of an index represent.
template <size_t BITS>
constexpr int32_t signed_integer(size_t index) {
    const auto low = int32_t(index & Packing<BITS>::MASK);
    return low < 1 << (BITS - 1) ? low : low - (1 << BITS);
}

// Products of single numbers, computed in f32.
struct FloatProducts {
    typedef float Left;
    static constexpr size_t TOGETHER = 1;

#if defined(__AVX512F__)
    struct Table {
        float at[32];
    };
    template <size_t BITS>
    static constexpr Table table() {
        Table table{};
        for (size_t i = 0; i < 32; ++i) table.at[i] = float(signed_integer<BITS>(i));
        return table;
    }
#endif
    // Returns number `i` of each word.
    template <size_t BITS>
    static Floats numbers(Words words, size_t i) {
#if defined(__AVX512F__)
        // No mask is required, because the instructions use only the lowest four or five bits of an index.
        static constexpr Table all = table<BITS>();
        const auto index = (__m512i)(words >> uint32_t(Packing<BITS>::shift(i)));
        const __m512 low = _mm512_loadu_ps(all.at), high = _mm512_loadu_ps(all.at + 16);
        return (Floats)(BITS == 4 ? _mm512_permutexvar_ps(index, low) : _mm512_permutex2var_ps(low, index, high));
#else
        // A shift to the right extends the sign.
        constexpr size_t rest = 32 - BITS;
        return __builtin_convertvector((Ints)(words << uint32_t(rest - Packing<BITS>::shift(i))) >> int32_t(rest), Floats);
#endif
    }
    static Floats add(Floats sum, float left, Floats numbers) { return fused_multiply_add(numbers, broadcast(left), sum); }
    static Floats load_left(const float* from) { return load(from); }
    static void store_left(float* to, Floats numbers) { ::store(to, numbers); }
};

#if defined(__AVX512BF16__)

// Products of pairs of numbers, computed in bf16.
struct Bf16Products {
    typedef uint32_t Left;
    static constexpr size_t TOGETHER = 2;

    struct Table {
        uint16_t at[32];
    };
    template <size_t BITS>
    static constexpr Table table() {
        Table table{};
        for (size_t i = 0; i < 32; ++i) {
            const int32_t number = signed_integer<BITS>(i);
            const auto magnitude = uint32_t(number < 0 ? -number : number);
            uint32_t exponent = 0;
            while (magnitude >> exponent > 1) ++exponent;
            const uint32_t bits = magnitude == 0 ? 0 : ((127 + exponent) << 7 | (magnitude << (7 - exponent) & 0x7f));
            table.at[i] = uint16_t(bits | (number < 0 ? 0x8000 : 0));
        }
        return table;
    }
    // Returns pair `i` of each word.
    template <size_t BITS>
    static __m512i numbers(Words words, size_t i) {
        static constexpr Table all = table<BITS>();
        // No mask is required, because the instruction uses only the lowest five bits of an index.
        const __m512i index = _mm512_srli_epi16((__m512i)words, unsigned(i * BITS));
        return _mm512_permutexvar_epi16(index, _mm512_loadu_si512(all.at));
    }
    static Floats add(Floats sum, uint32_t left, __m512i numbers) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(left)), (__m512bh)numbers);
    }
    static Floats load_left(const uint32_t* from) { return load((const bf16*)from); }
    static void store_left(uint32_t* to, Floats numbers) { store_bf16(numbers, to); }
};

#endif

// Sums are computed for `U4_QUERIES` queries at a time, and for `U4_TOKEN_VECTORS` vectors of tokens (for scores) or
// `U4_VALUE_VECTORS` vectors of elements (for weighted values). With these numbers, the sums and the packed words fit into the
// registers.
#if defined(__AVX512F__)
constexpr size_t U4_QUERIES = 6, U4_TOKEN_VECTORS = 2, U4_VALUE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr size_t U4_QUERIES = 6, U4_TOKEN_VECTORS = 2, U4_VALUE_VECTORS = 2;
#else
constexpr size_t U4_QUERIES = 3, U4_TOKEN_VECTORS = 2, U4_VALUE_VECTORS = 4;
#endif

// The left operand of a product: queries or softmax weights, in rows that are `row_stride` elements apart. If the scales of
// the right operand are multiplied into the left operand, each group of `U4_VALUE_GROUP` columns that share scales has its own
// left matrix, and these matrices are `group_stride` elements apart. Otherwise, all columns have the same left matrix, and
// `group_stride` is 0.
template <typename Products>
struct LeftMatrix {
    const typename Products::Left* at;
    size_t row_stride, group_stride;
};

// Multiplies `R` rows of `left` by the first `COUNT` numbers of each packed word in `V` vectors, and adds the products to
// `sum`.
template <typename Products, size_t BITS, size_t COUNT, size_t R, size_t V>
inline void multiply_words(const LeftMatrix<Products>& left, const uint32_t* from, Floats (&sum)[R][V]) {
    Words words[V];
    for (size_t v = 0; v < V; ++v) words[v] = read<Words>(from + v * LANES);
    for (size_t i = 0; i < COUNT / Products::TOGETHER; ++i)
        for (size_t v = 0; v < V; ++v) {
            const auto numbers = Products::template numbers<BITS>(words[v], i);
            const auto* row = left.at + v * LANES / U4_VALUE_GROUP * left.group_stride + i;
            for (size_t r = 0; r < R; ++r) sum[r][v] = Products::add(sum[r][v], row[r * left.row_stride], numbers);
        }
}

// Prefetches as much memory as `rows` calls of `Prefetch::next` would, one cache line at a time.
inline void prefetch_rows(Prefetch& prefetch, size_t rows) {
    constexpr size_t line = 64;
    for (size_t at = 0; at < rows * prefetch.step; at += line) __builtin_prefetch(prefetch.at + at);
    prefetch.at += rows * prefetch.step;
}

// Computes the scores of `R` queries with the keys of a block.
template <typename Products, size_t R>
inline void score_u4_tile(const U4Block& block, size_t size, const typename Products::Left* queries, float* scores,
                          Prefetch& prefetch) {
    constexpr size_t V = U4_TOKEN_VECTORS, TILE_TOKENS = V * LANES;
    const size_t rows = u4_key_rows(size);
    const f16* reference = reference_key(size, block);
    float with_reference[R];
    for (size_t r = 0; r < R; ++r) {
        Floats sum = {};
        for (size_t i = 0; i < size; i += LANES)
            sum = fused_multiply_add(Products::load_left(queries + (r * size + i) / Products::TOGETHER), load(reference + i),
                                     sum);
        with_reference[r] = horizontal_sum(sum);
    }
    for (size_t token = 0; token < BLOCK_TOKENS; token += TILE_TOKENS)
        for (size_t first = 0; first < rows; first += U4_KEY_GROUP) {
            Floats sum[R][V] = {};
            for (size_t row = first; row < rows && row < first + U4_KEY_GROUP; ++row) {
                prefetch_rows(prefetch, U4_KEY_WORD * TILE_TOKENS / BLOCK_TOKENS);
                const size_t begin = row * U4_KEY_WORD;
                const LeftMatrix<Products> left{queries + begin / Products::TOGETHER, size / Products::TOGETHER, 0};
                const uint32_t* words = block.words + row * BLOCK_TOKENS + token;
                // The key size is even, so the last word may contain only two or four numbers.
                if (begin + U4_KEY_WORD <= size) multiply_words<Products, KEY_BITS, U4_KEY_WORD>(left, words, sum);
                else if (begin + 4 == size) multiply_words<Products, KEY_BITS, 4>(left, words, sum);
                else multiply_words<Products, KEY_BITS, 2>(left, words, sum);
            }
            for (size_t v = 0; v < V; ++v) {
                const Floats scale = load(block.scales + first / U4_KEY_GROUP * BLOCK_TOKENS + token + v * LANES);
                for (size_t r = 0; r < R; ++r) {
                    float* to = scores + r * CHUNK_KEYS + token + v * LANES;
                    ::store(to, fused_multiply_add(sum[r][v], scale, first == 0 ? broadcast(with_reference[r]) : load(to)));
                }
            }
        }
}

template <typename Products, size_t R = U4_QUERIES>
inline void score_u4(const Layer& layer, const uint8_t* block, const typename Products::Left* queries, float* scores,
                     size_t count, Prefetch prefetch) {
    const size_t size = layer.key_size;
    for (; count >= R; count -= R) {
        score_u4_tile<Products, R>(u4_keys(size, block), size, queries, scores, prefetch);
        queries += R * size / Products::TOGETHER;
        scores += R * CHUNK_KEYS;
    }
    if constexpr (R > 1)
        if (count) score_u4<Products, R - 1>(layer, block, queries, scores, count, prefetch);
}

// Adds the weighted values of a block to the sums of `R` queries, for `V` vectors of columns that begin at `column`. The
// scales of the values are multiplied into the weights.
template <typename Products, size_t R, size_t V>
inline void accumulate_u4_tile(const U4Block& block, size_t size, size_t column, const typename Products::Left* weights,
                               float* sums, Prefetch& prefetch) {
    constexpr size_t GROUPS = V * LANES / U4_VALUE_GROUP, PAIRS = BLOCK_TOKENS / Products::TOGETHER;
    typename Products::Left scaled[R][GROUPS][PAIRS];
    for (size_t group = 0; group < GROUPS; ++group)
        for (size_t token = 0; token < BLOCK_TOKENS; token += LANES) {
            const Floats scale = load(block.scales + (column / U4_VALUE_GROUP + group) * BLOCK_TOKENS + token);
            for (size_t r = 0; r < R; ++r) {
                const auto* weight = weights + (r * CHUNK_KEYS + token) / Products::TOGETHER;
                Products::store_left(scaled[r][group] + token / Products::TOGETHER, Products::load_left(weight) * scale);
            }
        }
    Floats sum[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) sum[r][v] = load(sums + r * size + column + v * LANES);
    for (size_t token = 0; token < BLOCK_TOKENS; token += PackedValues::NUMBERS) {
        prefetch_rows(prefetch, PackedValues::NUMBERS);
        const LeftMatrix<Products> left{scaled[0][0] + token / Products::TOGETHER, GROUPS * PAIRS, PAIRS};
        const uint32_t* words = block.words + token / PackedValues::NUMBERS * size + column;
        multiply_words<Products, VALUE_BITS, PackedValues::NUMBERS>(left, words, sum);
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(sums + r * size + column + v * LANES, sum[r][v]);
}

template <typename Products, size_t R = U4_QUERIES>
inline void accumulate_u4(const u4* values, size_t size, const typename Products::Left* weights, float* sums, size_t count,
                          Prefetch prefetch) {
    constexpr size_t WIDE = U4_VALUE_VECTORS * LANES;
    const U4Block block = u4_values(size, (const uint8_t*)values);
    for (; count >= R; count -= R) {
        size_t column = 0;
        for (; column + WIDE <= size; column += WIDE)
            accumulate_u4_tile<Products, R, U4_VALUE_VECTORS>(block, size, column, weights, sums, prefetch);
        for (; column < size; column += U4_VALUE_GROUP)
            accumulate_u4_tile<Products, R, U4_VALUE_GROUP / LANES>(block, size, column, weights, sums, prefetch);
        weights += R * CHUNK_KEYS / Products::TOGETHER;
        sums += R * size;
    }
    if constexpr (R > 1)
        if (count) accumulate_u4<Products, R - 1>(values, size, weights, sums, count, prefetch);
}

// Specializations of the functions that the kernels call for every precision.

template <>
inline void score<u4>(const Layer& layer, const uint8_t* block, const float* queries, float* scores, size_t count,
                      Prefetch prefetch) {
    score_u4<FloatProducts>(layer, block, queries, scores, count, prefetch);
}

template <>
inline void accumulate_values<u4>(const Layer& layer, const uint8_t* block, const float* weights, float* sums, size_t count,
                                  Prefetch prefetch) {
    accumulate_u4<FloatProducts>((const u4*)block, layer.value_size, weights, sums, count, prefetch);
}

#if defined(__AVX512BF16__)

template <>
inline void score_bf16<u4>(const Layer& layer, const uint8_t* block, const uint32_t* queries, float* scores, size_t count,
                           Prefetch prefetch) {
    score_u4<Bf16Products>(layer, block, queries, scores, count, prefetch);
}

template <>
inline void accumulate_values_bf16<u4>(const Layer& layer, const uint8_t* block, const uint32_t* weights, float* sums,
                                       size_t count, Prefetch prefetch) {
    accumulate_u4<Bf16Products>((const u4*)block, layer.value_size, weights, sums, count, prefetch);
}

#endif

}  // namespace
