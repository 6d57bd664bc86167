// The format of a head of a block, and functions that store keys and values in it. Only for kernels.cpp.
#pragma once

#include "../../vectors.hpp"
#include "attention.hpp"

namespace {

using namespace ovfleet;

// The tag type of u4 caches, for which u4.hpp specializes templates.
struct u4 {
    uint8_t byte;
};

// Whether blocks contain pairs of numbers.
template <typename T>
constexpr bool IS_PAIRED = false;
template <>
constexpr bool IS_PAIRED<bf16> = true;

// Returns number `i` (0 or 1) of each pair of bf16. Number 0 is in the lower half of a word.
inline Floats number_of_pairs(Words pairs, size_t i) { return (Floats)(pairs << uint32_t(16 - i * 16) & 0xffff0000); }

// The keys of one head of a block.
template <typename T>
struct Keys {
    const uint8_t* at;
    const T* of(size_t dimension) const { return (const T*)at + dimension * BLOCK_TOKENS; }
    const float* scales(const Layer& layer, size_t group) const {
        return (const float*)(at + layer.key_size * BLOCK_TOKENS) + group * 2 * BLOCK_TOKENS;
    }
};

inline uint8_t* key_block(const Layer& layer, const StepTensors& tensors, int32_t block, size_t kv_head) {
    return tensors.key_cache + (size_t(block) * layer.kv_heads + kv_head) * layer.key_bytes;
}

inline uint8_t* value_block(const Layer& layer, const StepTensors& tensors, int32_t block, size_t kv_head) {
    return tensors.value_cache + (size_t(block) * layer.kv_heads + kv_head) * layer.value_bytes;
}

inline const float* value_scales(const Layer& layer, const uint8_t* block) {
    return (const float*)(block + layer.value_size * BLOCK_TOKENS);
}

constexpr size_t BLOCK_VECTORS = BLOCK_TOKENS / LANES;

// Reads a group of `KEY_GROUP` dimensions as floats, for the keys in `V` consecutive vectors of a block. In a u8 cache, these
// dimensions of a key share a scale and a minimum.
template <typename T, size_t V = BLOCK_VECTORS>
struct KeyGroup {
    const T* at;
    Floats scale[V], minimum[V];

    KeyGroup(const Layer& layer, const uint8_t* block, size_t group, size_t first = 0)
        : at(Keys<T>{block}.of(group * KEY_GROUP) + first * LANES * (IS_PAIRED<T> ? 2 : 1)) {
        if constexpr (sizeof(T) == 1) {
            const float* scales = Keys<T>{block}.scales(layer, group) + first * LANES;
            for (size_t v = 0; v < V; ++v) {
                scale[v] = load(scales + v * LANES);
                minimum[v] = load(scales + BLOCK_TOKENS + v * LANES);
            }
        }
    }
    // Returns dimensions `i` and `i + 1` of the group for the keys in vector `v`, as pairs of bf16. `i` is even.
    Words pairs(size_t i, size_t v) const { return read<Words>(at + i * BLOCK_TOKENS + v * LANES * 2); }
    // Returns dimension `i` of the group for the keys in vector `v`.
    Floats key(size_t i, size_t v) const {
        if constexpr (IS_PAIRED<T>) return number_of_pairs(pairs(i / 2 * 2, v), i % 2);
        const Floats number = load(at + i * BLOCK_TOKENS + v * LANES);
        if constexpr (sizeof(T) > 1) return number;
        return fused_multiply_add(number, scale[v], minimum[v]);
    }
};

// Reads the value of one token in a block as floats.
template <typename T>
struct TokenValue {
    const T* at;
    size_t token;
    Floats scale, minimum;

    TokenValue(const Layer& layer, const uint8_t* block, size_t token)
        : at((const T*)block + (IS_PAIRED<T> ? token / 2 * 2 : token) * layer.value_size), token(token) {
        if constexpr (sizeof(T) == 1) {
            const float* scales = value_scales(layer, block);
            scale = broadcast(scales[token]);
            minimum = broadcast(scales[BLOCK_TOKENS + token]);
        }
    }
    // Returns the elements of this token and the next one, starting at `i`, as pairs of bf16. `token` is even.
    Words pairs(size_t i) const { return read<Words>(at + 2 * i); }
    // Returns the elements starting at `i`.
    Floats value(size_t i) const {
        if constexpr (IS_PAIRED<T>) return number_of_pairs(pairs(i), token % 2);
        const Floats number = load(at + i);
        if constexpr (sizeof(T) > 1) return number;
        return fused_multiply_add(number, scale, minimum);
    }
};

// Quantizes `count` numbers to bytes, which are stored `stride` bytes apart, and returns their scale and minimum.
inline void quantize(const float* from, size_t count, uint8_t* to, size_t stride, float& scale, float& minimum) {
    Floats low = load(from), high = low;
    for (size_t i = LANES; i < count; i += LANES) {
        const Floats next = load(from + i);
        low = -larger(-low, -next);
        high = larger(high, next);
    }
    minimum = -largest(-low);
    scale = (largest(high) - minimum) / 255;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (size_t i = 0; i < count; i += LANES) {
        Ints whole =
            __builtin_convertvector(fused_multiply_add(load(from + i) - minimum, broadcast(inverse), broadcast(0.5f)), Ints);
        whole = whole < 0 ? Ints{} : whole > 255 ? Ints{} + 255 : whole;
        uint8_t bytes[LANES];
        store_bytes(stride == 1 ? to + i : bytes, whole);
        for (size_t lane = 0; stride > 1 && lane < LANES; ++lane) to[(i + lane) * stride] = bytes[lane];
    }
}

// Reads the query, key or value of a token and a head as `size` floats, the last `padding` of which are zeros. `stride` is the
// number of elements from one token to the next.
inline void read_floats(const Layer& layer, const void* from, size_t stride, size_t token, size_t head, size_t size,
                        size_t padding, float* to) {
    const size_t count = size - padding, index = token * stride + head * count;
    if (layer.is_bf16)
        for (size_t i = 0; i < count; i += LANES) ::store(to + i, load((const bf16*)from + index + i));
    else if (count % LANES == 0)
        for (size_t i = 0; i < count; i += LANES) ::store(to + i, load((const float*)from + index + i));
    else std::memcpy(to, (const float*)from + index, count * sizeof(float));
    for (size_t i = count; i < size; ++i) to[i] = 0;
}

// Applies the rotary embedding of a token to a query or key.
inline void apply_rope(const Layer& layer, const StepTensors& tensors, size_t token, float* numbers) {
    if (!tensors.cos) return;
    const size_t half = layer.key_size / 2;
    const float *cos = tensors.cos + token * layer.key_size, *sin = tensors.sin + token * layer.key_size;
    for (size_t i = 0; i < half; i += LANES) {
        const Floats first = load(numbers + i), second = load(numbers + half + i);
        ::store(numbers + i, fused_multiply_add(first, load(cos + i), -(second * load(sin + i))));
        ::store(numbers + half + i, fused_multiply_add(second, load(cos + half + i), first * load(sin + half + i)));
    }
}

// Stores the nearest number that the type can represent.
template <typename T>
inline void store_number(float value, T& to) {
    convert(value, to);
}

// A number outside the range of f16 is stored as the largest finite f16 of the same sign, because an infinity could turn the
// later outputs of the sequence into NaN.
inline void store_number(float value, f16& to) {
    constexpr float most = 65504.0f;
    convert(value > most ? most : value < -most ? -most : value, to);
}

template <typename T>
void store_token(const Layer& layer, const float* key, const float* value, uint8_t* keys, uint8_t* values, size_t slot) {
    for (size_t i = 0; i < layer.key_size; ++i) store_number(key[i], ((T*)keys)[i * BLOCK_TOKENS + slot]);
    for (size_t i = 0; i < layer.value_size; ++i) store_number(value[i], ((T*)values)[slot * layer.value_size + i]);
}

template <>
void store_token<uint8_t>(const Layer& layer, const float* key, const float* value, uint8_t* keys, uint8_t* values,
                          size_t slot) {
    for (size_t group = 0; group < layer.key_size / KEY_GROUP; ++group) {
        float* scales = (float*)Keys<uint8_t>{keys}.scales(layer, group);
        quantize(key + group * KEY_GROUP, KEY_GROUP, keys + group * KEY_GROUP * BLOCK_TOKENS + slot, BLOCK_TOKENS, scales[slot],
                 scales[BLOCK_TOKENS + slot]);
    }
    float* scales = (float*)value_scales(layer, values);
    quantize(value, layer.value_size, values + slot * layer.value_size, 1, scales[slot], scales[BLOCK_TOKENS + slot]);
}

template <>
void store_token<bf16>(const Layer& layer, const float* key, const float* value, uint8_t* keys, uint8_t* values, size_t slot) {
    bf16 rounded[HEAD_SIZE_MAX];
    for (size_t i = 0; i < layer.key_size; i += LANES) ::store(rounded + i, load(key + i));
    for (size_t i = 0; i < layer.key_size; i += 2)
        std::memcpy((bf16*)keys + i * BLOCK_TOKENS + slot * 2, rounded + i, 2 * sizeof(bf16));
    for (size_t i = 0; i < layer.value_size; i += LANES) ::store(rounded + i, load(value + i));
    bf16* to = (bf16*)values + slot / 2 * 2 * layer.value_size + slot % 2;
    for (size_t i = 0; i < layer.value_size; ++i) to[2 * i] = rounded[i];
}

template <>
void store_token<u4>(const Layer& layer, const float* key, const float* value, uint8_t* keys, uint8_t* values, size_t slot);

void store_new_tokens(const Layer& layer, const Sequence& sequence, const StepTensors& tensors, size_t kv_head) {
    const auto store_one = [&] {
        switch (layer.precision) {
            case Precision::f32: return store_token<float>;
            case Precision::bf16: return store_token<bf16>;
            case Precision::f16: return store_token<f16>;
            case Precision::u4: return store_token<u4>;
            case Precision::u8: break;
        }
        return store_token<uint8_t>;
    }();
    for (size_t token = 0; token < sequence.count; ++token) {
        const size_t position = sequence.past + token, in_step = sequence.begin + token;
        const int32_t block = sequence.blocks[position / BLOCK_TOKENS];
        uint8_t* values = value_block(layer, tensors, block, kv_head);
        // The values after the last token are multiplied by a weight of 0, so they must be finite.
        if (position % BLOCK_TOKENS == 0 && sequence.count - token < BLOCK_TOKENS) std::memset(values, 0, layer.value_bytes);
        float key[HEAD_SIZE_MAX], value[HEAD_SIZE_MAX];
        read_floats(layer, tensors.keys, tensors.key_stride, in_step, kv_head, layer.key_size, layer.key_padding, key);
        read_floats(layer, tensors.values, tensors.value_stride, in_step, kv_head, layer.value_size, layer.value_padding,
                    value);
        apply_rope(layer, tensors, in_step, key);
        store_one(layer, key, value, key_block(layer, tensors, block, kv_head), values, position % BLOCK_TOKENS);
    }
}

}  // namespace
