// Products of the quants of the source and integer weights. Only for kernels.cpp.
//
// Each instruction set has a header that defines
//
//     // The largest number of rows of a tile. The sums of this many rows fit into registers.
//     constexpr size_t M_TILE_MAX;
//     // Whether quants are multiplied as 16-bit numbers. Otherwise they are multiplied as 8-bit terms.
//     constexpr bool has_pairs(size_t bits, size_t terms);
//     // For each lane, the sum of the products of unsigned weights of BITS bits and 8-bit quants or terms of a row, which are
//     // from -127 to 127. `add` adds four products to each lane. Used only where `has_pairs` returns false.
//     template <size_t BITS> struct DotSum {
//         void add(Fours weights, int32_t four);
//         // Adds eight products, for weights of 6 bits.
//         void add_two(Fours first, int32_t first_four, Fours second, int32_t second_four);
//         // Begins the next term: multiplies the sum by 2^TERM_BITS.
//         void begin_term();
//         Ints total() const;
//     };
#pragma once

#include "../../vectors.hpp"
#include "projection.hpp"

namespace {

using ovfleet::projection::E2M1_BITS;
using ovfleet::projection::SIX_BITS;
using ovfleet::projection::TERM_BITS;

// Four weights for each lane.
typedef uint8_t Fours __attribute__((vector_size(LANES * 4)));

// Forces a sum into a register. Otherwise, GCC adds products to each other before it adds them to the sums, which needs more
// registers than the processor has.
template <typename Sum>
inline void keep_in_register(Sum& sum) {
#if defined(__x86_64__)
    asm("" : "+x"(sum));
#endif
}

// For each lane, the sum of the products of 16-bit weights and 16-bit quants.
struct PairSum {
    Ints total{};
    // Adds two products to each lane. `weights` contains two 16-bit weights in each 32-bit lane, and `pair` the two quants of a
    // row by which the weights of all lanes are multiplied.
    inline void add(Words weights, int32_t pair) {
#if defined(__AVX512F__)
        total += (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
        total += (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
#elif defined(__x86_64__)
        total += (Ints)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(pair));
#else
        total += (Ints)(weights & 0xffff) * int16_t(pair) + (Ints)(weights >> 16) * int16_t(pair >> 16);
#endif
        keep_in_register(total);
    }
};

// Stores quants as 16-bit numbers. Each group of four quants is stored in the order first, third, second, fourth, because masks
// and shifts unpack four weights as the same two pairs: the first and the third, and the second and the fourth.
inline void store_pairs(int8_t* to, Ints quants) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                           0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)quants, order), 8);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(pairs));
#else
    constexpr size_t order[4] = {0, 2, 1, 3};
    for (size_t lane = 0; lane < LANES; ++lane) {
        const int16_t quant = int16_t(quants[lane / 4 * 4 + order[lane % 4]]);
        std::memcpy(to + lane * sizeof(quant), &quant, sizeof(quant));
    }
#endif
}

// Instruction sets without a definition of this class always multiply quants as 16-bit numbers.
template <size_t BITS>
struct DotSum;

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
