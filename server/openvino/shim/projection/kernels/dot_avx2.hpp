// Computes dot products of 8-bit integers with the AVX2 instruction VPMADDUBSW, whose sums of two products must fit into 16
// bits. Only for dot.hpp.
#pragma once

namespace {

// Each row has two vectors of sums, so 4 rows leave 8 of the 16 registers for products and unpacked weights.
constexpr size_t M_TILE_MAX = 4;
// VPMADDWD multiplies half as many numbers at a time as VPMADDUBSW. It is used for quants that would need two 8-bit terms,
// because it multiplies them as one number, and for 8-bit weights, because its sums have 32 bits.
constexpr bool has_pairs(size_t bits, size_t terms) { return terms == 2 || bits == 8; }

// Sums of two products fit into 16 bits if the weights have fewer than 8 bits.
template <size_t BITS>
struct DotSum {
    Ints sums{};
    inline void add(Fours weights, int32_t four) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four));
        sums += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        keep_in_register(sums);
    }
    inline Ints total() const { return sums; }
};

// Sums of sixteen products with 4-bit weights fit into 16 bits.
template <>
struct DotSum<4> {
    __m256i pairs = _mm256_setzero_si256();
    inline void add(Fours weights, int32_t four) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four)));
        keep_in_register(pairs);
    }
    inline Ints total() const { return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};

// Sums of four products with 6-bit weights fit into 16 bits.
template <>
struct DotSum<SIX_BITS> {
    Ints sums{};
    inline void add_two(Fours first, int32_t first_four, Fours second, int32_t second_four) {
        const __m256i first_pairs = _mm256_maddubs_epi16((__m256i)first, _mm256_set1_epi32(first_four));
        const __m256i second_pairs = _mm256_maddubs_epi16((__m256i)second, _mm256_set1_epi32(second_four));
        sums += (Ints)_mm256_madd_epi16(_mm256_add_epi16(first_pairs, second_pairs), _mm256_set1_epi16(1));
        keep_in_register(sums);
    }
    inline Ints total() const { return sums; }
};

}  // namespace
