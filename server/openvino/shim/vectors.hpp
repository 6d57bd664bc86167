// Vectors of floats in the registers of the instruction set. Only kernels include this header, because its functions are
// compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr size_t LANES = 16;
#elif defined(__AVX2__)
constexpr size_t LANES = 8;
#else
constexpr size_t LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// The score of a key to which a query does not attend.
constexpr float MASKED = -__builtin_inff();

template <typename T>
inline T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

inline Floats load(const float* from) { return read<Floats>(from); }

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline Floats load(const bf16* from) {
    const Words words = __builtin_convertvector(read<Halves>(from), Words) << 16;
    return (Floats)words;
}

inline Floats load(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Ints), Floats);
#endif
}

inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(__builtin_convertvector(read<SignedBytes>(from), Ints), Floats);
#endif
}

inline Floats load(const f16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    // Adjust the exponents with a multiplication, because it also converts subnormal numbers correctly.
    const Words half = __builtin_convertvector(read<Halves>(from), Words);
    const Words magnitude = (half & 0x7fff) << 13;
    const Floats scaled = (Floats)magnitude * 0x1p112f;
    const Words special = (Words)(magnitude >= Words{} + 0x0f800000u);
    return (Floats)((Words)scaled | (special & 0x7f800000u) | ((half & 0x8000) << 16));
#endif
}

inline float as_float(uint32_t bits) { return read<float>(&bits); }
inline uint32_t as_bits(float value) { return read<uint32_t>(&value); }

// Rounds to nearest, ties to even.
inline void convert(float value, float& to) { to = value; }
inline void convert(float value, bf16& to) {
    const uint32_t bits = as_bits(value);
    const bool is_nan = value != value;
    to.bits = uint16_t((is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void convert(float value, f16& to) {
#if defined(__F16C__)
    to.bits = uint16_t(_cvtss_sh(value, 0));
#else
    const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000) to.bits = uint16_t(sign | 0x7c00 | (magnitude > 0x7f800000 ? 0x200 : 0));
    else if (magnitude >= 0x477ff000) to.bits = uint16_t(sign | 0x7c00);
    else if (magnitude < 0x38800000) to.bits = uint16_t(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000));
    else to.bits = uint16_t(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - 0x1c000));
#endif
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

inline float horizontal_sum(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)values);
#else
    float sum = 0;
    for (size_t lane = 0; lane < LANES; ++lane) sum += values[lane];
    return sum;
#endif
}

// The sum of integers, which wraps around.
inline uint32_t horizontal_sum(Words values) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    // GCC implements _mm512_reduce_add_epi32 with additions of signed integers, which must not overflow.
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256((__m512i)values), _mm512_extracti64x4_epi64((__m512i)values, 1));
#else
    const __m256i half = (__m256i)values;
#endif
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1))));
#else
    uint32_t sum = 0;
    for (size_t lane = 0; lane < LANES; ++lane) sum += values[lane];
    return sum;
#endif
}

inline float largest(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)values);
#else
    float found = values[0];
    for (size_t lane = 1; lane < LANES; ++lane) found = values[lane] > found ? values[lane] : found;
    return found;
#endif
}

// Stores the low bytes of integers.
inline void store_bytes(void* to, Ints values) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values));
#elif defined(__AVX2__)
    const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i words = _mm256_shuffle_epi8((__m256i)values, low);
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i*)to, bytes);
#else
    for (size_t lane = 0; lane < LANES; ++lane) ((uint8_t*)to)[lane] = uint8_t(values[lane]);
#endif
}

// Returns a vector with `value` in all lanes. The compiler cannot omit the addition in `Floats{} + value`, because adding 0
// turns -0 into 0.
inline Floats broadcast(float value) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX2__)
    return (Floats)_mm256_set1_ps(value);
#else
    return Floats{value, value, value, value};
#endif
}

// Rounds to bf16, to nearest with ties away from zero, which takes fewer instructions than ties to even. The NaN that
// arithmetic operations produce remains NaN.
inline Floats rounded_to_bf16(Floats values) { return (Floats)(((Words)values + 0x8000) & 0xffff0000); }

// Rounds two vectors to bf16 as `rounded_to_bf16` does, and interleaves them: each 32-bit lane has the element of `first` in
// its low half and that of `second` in its high half.
inline Words bf16_pairs(Floats first, Floats second) {
    return ((Words)first + 0x8000) >> 16 | (((Words)second + 0x8000) & 0xffff0000);
}

// Interleaves two vectors as `bf16_pairs` does, but without rounding. bf16 must be able to represent their elements exactly.
inline Words exact_bf16_pairs(Floats first, Floats second) { return (Words)first >> 16 | ((Words)second & 0xffff0000); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Computes a * b + c, with a single rounding if the instruction set supports that. Kernels call this function where the
// compiler could fuse operations in one copy of a function and not in another, so that all copies have the same results.
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Computes exp(x) for x <= 0, with an error of at most 2 units in the last place. For x < -87, the result is 0. The function
// uses the polynomial of Cephes over [-ln 2 / 2, ln 2 / 2].
inline Floats exponential(Floats x) {
    constexpr float low = -87.0f, log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const auto is_tiny = x < low;
    x = larger(x, Floats{} + low);
    // The addition rounds to the nearest integer, which is then in the low bits of the result.
    const auto all = [](float value) { return Floats{} + value; };
    const Floats shifted = fused_multiply_add(x, all(log2_e), all(12582912.0f));
    const Floats whole = shifted - 12582912.0f;
    x = fused_multiply_add(whole, all(-ln2_low), fused_multiply_add(whole, all(-ln2_high), x));
    Floats sum = fused_multiply_add(x, all(1.9875691500e-4f), all(1.3981999507e-3f));
    sum = fused_multiply_add(sum, x, all(8.3334519073e-3f));
    sum = fused_multiply_add(sum, x, all(4.1665795894e-2f));
    sum = fused_multiply_add(sum, x, all(1.6666665459e-1f));
    sum = fused_multiply_add(sum, x, all(5.0000001201e-1f));
    sum = fused_multiply_add(sum, x * x, x) + 1.0f;
    const Words exponent = ((Words)shifted - 0x4b400000u + 127u) << 23;
    const Floats result = sum * (Floats)exponent;
    return is_tiny ? Floats{} : result;
}

constexpr float LOG2_E = 1.44269504f;

// Computes 2^x for x <= 126, with a relative error of up to 3e-6, which is small enough for results that are rounded to
// 15 bits or less. For x < -126, the result is 0 or a subnormal number. The function takes half as many instructions as
// `exponential`. The polynomial minimizes the maximum relative error over [-1/2, 1/2] (Remez).
inline Floats power_of_two(Floats x) {
    // Without this limit, `x - whole` would be NaN for x = -infinity.
    x = larger(x, broadcast(-200.0f));
    // The addition rounds to the nearest integer, which is then in the low bits of the result.
    const Floats shifted = x + 12582912.0f, whole = shifted - 12582912.0f, rest = x - whole;
    Floats sum = fused_multiply_add(rest, broadcast(9.57010221e-3f), broadcast(5.59178591e-2f));
    sum = fused_multiply_add(sum, rest, broadcast(2.40247443e-1f));
    sum = fused_multiply_add(sum, rest, broadcast(6.93121791e-1f));
    sum = fused_multiply_add(sum, rest, broadcast(9.99999285e-1f));
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
    const Words exponent = ((Words)shifted - 0x4b400000u + 127u) << 23;
    return x < -126.0f ? Floats{} : sum * (Floats)exponent;
#endif
}

// Computes 1 / x for normal numbers whose inverse is normal, with a relative error of up to 2^-23.
inline Floats inverse(Floats x) {
#if defined(__AVX512F__)
    // A division takes twice as long as an estimate with 14 bits and a Newton step.
    const Floats estimate = (Floats)_mm512_rcp14_ps((__m512)x);
    return fused_multiply_add(fused_multiply_add(-x, estimate, broadcast(1.0f)), estimate, estimate);
#else
    return 1.0f / x;
#endif
}

}  // namespace
