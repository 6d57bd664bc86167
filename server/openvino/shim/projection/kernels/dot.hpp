// Dot products of 8-bit integers. Only for kernels.cpp.
//
// Each instruction set has a header that defines
//
//     // For each lane, the sum over a group of four weights of BITS bits, not negative, times four quants of a row, which are
//     // from -127 to 127.
//     template <size_t BITS> struct DotSum {
//         void add(Fours weights, int32_t four);
//         // Begins the next term: multiplies the sum by 2^TERM_BITS.
//         void begin_term();
//         Ints total() const;
//     };
#pragma once

#include "../../vectors.hpp"
#include "projection.hpp"

namespace {

using ovfleet::projection::E2M1_BITS;
using ovfleet::projection::TERM_BITS;

// Four weights for each lane.
typedef uint8_t Fours __attribute__((vector_size(LANES * 4)));

}  // namespace

#if defined(__AVX512VNNI__)
#include "dot_avx512_vnni.hpp"
#elif defined(__AVXVNNI__)
#include "dot_avx_vnni.hpp"
#elif defined(__AVX2__)
#include "dot_avx2.hpp"
#else
#include "dot_portable.hpp"
#endif
