// The operations that are fused after a multiplication. Only for kernels.
#pragma once

#include "../../vectors.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// The number of pairs of vectors in a block of columns. In each pair, one vector covers `LANES` of the first 16 columns, and
// the other covers `LANES` of the last 16.
constexpr size_t PAIRS = N_BLOCK / 2 / LANES;

template <typename T>
inline Floats load_up_to(const T* from, size_t count) {
    if (count >= LANES) return load(from);
    T part[LANES] = {};
    for (size_t i = 0; i < count; ++i) part[i] = from[i];
    return load(part);
}

inline void store_up_to(float* to, Floats values, size_t count) {
    if (count >= LANES) return ::store(to, values);
    for (size_t i = 0; i < count; ++i) to[i] = values[i];
}

inline void store_up_to(bf16* to, Floats values, size_t count) {
    if (count >= LANES) return store(to, values);
    for (size_t i = 0; i < count; ++i) convert(values[i], to[i]);
}

// Computes sigmoid(x) for x > -87, with a relative error of up to 3e-6. For smaller x, the result is about 2^-126.
inline Floats sigmoid(Floats x) {
    const Floats exponent = x * -LOG2_E, most = broadcast(126.0f);
    return inverse(1.0f + power_of_two(exponent < most ? exponent : most));
}

// Approximates erf(x) with formula 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions", whose absolute error
// is at most 1.5e-7 before rounding.
inline Floats error_function(Floats x) {
    const Floats size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
    Floats sum = 1.061405429f * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    const Floats result = 1.0f - sum * t * exponential(-size * size);
    return x < 0 ? -result : result;
}

inline Floats activated(Epilogue epilogue, Floats x) {
    constexpr float sqrt_half = 0.70710678f, sqrt_8_over_pi = 1.5957691f;
    switch (epilogue) {
        case Epilogue::gelu: return 0.5f * x * (1.0f + error_function(sqrt_half * x));
        // (1 + tanh(y)) / 2 is sigmoid(2 * y).
        case Epilogue::gelu_tanh: return x * sigmoid(sqrt_8_over_pi * (x + 0.044715f * x * x * x));
        case Epilogue::silu: return x * sigmoid(x);
        default: return x * sigmoid(QUICK_GELU_ALPHA * x);
    }
}

// Applies an activation to `count` vectors.
__attribute__((noinline)) inline void activate(Epilogue epilogue, Floats* vectors, size_t count) {
    const auto each = [&](Epilogue constant) {
        for (size_t i = 0; i < count; ++i) vectors[i] = activated(constant, vectors[i]);
    };
    switch (epilogue) {
        case Epilogue::gelu: return each(Epilogue::gelu);
        case Epilogue::gelu_tanh: return each(Epilogue::gelu_tanh);
        case Epilogue::silu: return each(Epilogue::silu);
        default: return each(Epilogue::quick_gelu);
    }
}

// Applies the activation of a matrix, if it has one, to a part of the destination. This is a second pass over numbers that are
// still in the cache, so that the activation does not need registers while products are summed.
__attribute__((noinline)) inline void activate(const Matmul& matmul, const PackedSrc& src, const DstRange& range,
                                               FloatData dst) {
    if (!is_activation(matmul.epilogue)) return;
    const size_t begin = range.block_begin * N_BLOCK, last = range.block_end * N_BLOCK, end = last < matmul.N ? last : matmul.N;
    const size_t last_row = range.tile_end * src.m_tile, end_row = last_row < src.M ? last_row : src.M;
    for (size_t row = range.tile_begin * src.m_tile; row < end_row; ++row) {
        float* numbers = (float*)dst.data + row * matmul.N;
        for (size_t i = begin; i < end; i += LANES)
            store_up_to(numbers + i, activated(matmul.epilogue, load_up_to(numbers + i, end - i)), end - i);
    }
}

// Applies the activation of a gated epilogue to the first half of the columns, `gate`, and multiplies the result by the second
// half, `up`.
inline Floats gated(Epilogue epilogue, Floats gate, Floats up) {
    if (epilogue == Epilogue::swiglu) return gate * sigmoid(gate) * up;
    // These comparisons propagate NaN.
    const Floats limit = Floats{} + CLAMPED_SWIGLU_LIMIT;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate * sigmoid(gate * CLAMPED_SWIGLU_ALPHA) * (up + 1.0f);
}

inline void add_bias(const Matmul& matmul, size_t block, size_t pair, Floats (&sums)[2]) {
    if (!matmul.bias) return;
    const float* bias = matmul.bias + block * N_BLOCK + pair * LANES;
    for (size_t v = 0; v < 2; ++v) sums[v] += load(bias + v * (N_BLOCK / 2));
}

template <typename T>
inline void store_row_as(const Matmul& matmul, const Floats (&sums)[2], size_t block, size_t pair, size_t row,
                         const T* residual, T* dst) {
    const size_t columns = dst_columns(matmul), block_columns = is_gated(matmul.epilogue) ? N_BLOCK / 2 : N_BLOCK;
    const size_t first = block * block_columns + pair * LANES;
    const size_t left = first < columns ? columns - first : 0;
    dst += row * columns + first;
    if (is_gated(matmul.epilogue)) return store_up_to(dst, gated(matmul.epilogue, sums[0], sums[1]), left);
    const bool adds = matmul.epilogue == Epilogue::residual;
    if (adds) residual += row * columns + first;
    for (size_t v = 0; v < 2; ++v) {
        const size_t skipped = v * (N_BLOCK / 2), count = left > skipped ? left - skipped : 0;
        store_up_to(dst + skipped, adds ? sums[v] + load_up_to(residual + skipped, count) : sums[v], count);
    }
}

// Applies the epilogue, unless it is an activation, to the sums of a row, which include the bias, and stores the results.
// Callers apply activations themselves. The type of the destination is not a template parameter of the kernels, because each
// kernel would then be compiled twice.
inline void store_row(const Matmul& matmul, const Floats (&sums)[2], size_t block, size_t pair, size_t row, FloatData residual,
                      FloatData dst) {
    if (dst.is_bf16) store_row_as(matmul, sums, block, pair, row, (const bf16*)residual.data, (bf16*)dst.data);
    else store_row_as(matmul, sums, block, pair, row, (const float*)residual.data, (float*)dst.data);
}

// Adds the bias to the sums of a row, applies the epilogue unless it is an activation, and stores the results.
inline void store_dst(const Matmul& matmul, const Floats (&sums)[2], size_t block, size_t pair, size_t row, FloatData residual,
                      FloatData dst) {
    Floats total[2] = {sums[0], sums[1]};
    add_bias(matmul, block, pair, total);
    store_row(matmul, total, block, pair, row, residual, dst);
}

}  // namespace
