// Weights in E2M1, a 4-bit floating-point format (OCP Microscaling Formats, 2023). Only for kernels.
#pragma once

#include "../../vectors.hpp"
#include "dot.hpp"
#include "projection.hpp"

namespace {

using ovfleet::projection::E2M1_BITS;
using ovfleet::projection::quant_of_e2m1;

// Replaces codes with their quants.
inline Fours quants_of_e2m1(Fours codes) {
#if defined(__AVX2__)
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#endif
#if defined(__AVX512BW__)
    return (Fours)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
    return (Fours)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#else
    for (size_t i = 0; i < sizeof(codes); ++i) codes[i] = quant_of_e2m1(codes[i]);
    return codes;
#endif
}

}  // namespace
