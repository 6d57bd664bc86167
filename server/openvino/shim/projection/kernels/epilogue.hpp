// The operations that are fused after a multiplication. Only for kernels.
#pragma once

#include "../../vectors.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// The number of pairs of vectors of a block of columns. In each pair, one vector covers some of the first 16 columns, and the
// other one some of the last 16.
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

// Rounds to nearest, ties to even.
inline void store(bf16* to, Floats values) {
#if defined(__AVX512F__)
    const Words bits = (Words)values, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const auto is_nan = values != values;
    const Words result = is_nan ? (bits | 0x400000) >> 16 : rounded;
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)result));
#else
    for (size_t i = 0; i < LANES; ++i) convert(values[i], to[i]);
#endif
}

inline void store_up_to(bf16* to, Floats values, size_t count) {
    if (count >= LANES) return store(to, values);
    for (size_t i = 0; i < count; ++i) convert(values[i], to[i]);
}

// Computes sigmoid(x).
inline Floats sigmoid(Floats x) {
    const Floats e = exponential(x < 0 ? x : -x), one = Floats{} + 1.0f;
    return (x < 0 ? e : one) / (one + e);
}

// Computes erf(x) with an error of up to 1.5e-7: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26.
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

template <typename T>
inline void store_dst_as(const Matmul& matmul, const Floats (&sums)[2], size_t block, size_t pair, size_t row,
                         const T* residual, T* dst) {
    Floats total[2] = {sums[0], sums[1]};
    if (matmul.bias) {
        const float* bias = matmul.bias + block * N_BLOCK + pair * LANES;
        for (size_t v = 0; v < 2; ++v) total[v] += load(bias + v * (N_BLOCK / 2));
    }
    const size_t columns = dst_columns(matmul), block_columns = is_gated(matmul.epilogue) ? N_BLOCK / 2 : N_BLOCK;
    const size_t first = block * block_columns + pair * LANES;
    const size_t left = first < columns ? columns - first : 0;
    dst += row * columns + first;
    if (is_gated(matmul.epilogue)) return store_up_to(dst, gated(matmul.epilogue, total[0], total[1]), left);
    const bool adds = matmul.epilogue == Epilogue::residual;
    if (adds) residual += row * columns + first;
    for (size_t v = 0; v < 2; ++v) {
        const size_t skipped = v * (N_BLOCK / 2), count = left > skipped ? left - skipped : 0;
        store_up_to(dst + skipped, adds ? total[v] + load_up_to(residual + skipped, count) : total[v], count);
    }
}

// Applies the bias and the epilogue to the sums of a row, and stores them. The type of the destination is not a template
// parameter of the kernels, because each kernel would then be compiled twice.
inline void store_dst(const Matmul& matmul, const Floats (&sums)[2], size_t block, size_t pair, size_t row, FloatData residual,
                      FloatData dst) {
    if (dst.is_bf16) store_dst_as(matmul, sums, block, pair, row, (const bf16*)residual.data, (bf16*)dst.data);
    else store_dst_as(matmul, sums, block, pair, row, (const float*)residual.data, (float*)dst.data);
}

}  // namespace
