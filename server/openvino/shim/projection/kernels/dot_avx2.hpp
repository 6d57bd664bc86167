// Dot products of 8-bit integers with VPMADDUBSW of AVX2, whose sums of two products must fit into 16 bits. Only for dot.hpp.
#pragma once

namespace {

template <size_t BITS>
struct DotSum {
    Ints sums{};
    inline void add(Fours weights, int32_t four) {
        // Subtracting 128 from the weights makes them signed, so that sums of two products fit. The sum of 128 times the quants
        // is added separately.
        const __m256i row = _mm256_set1_epi32(four), half = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
        const __m256i moved = _mm256_xor_si256((__m256i)weights, half);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(moved), _mm256_sign_epi8(row, moved));
        const __m256i products = _mm256_madd_epi16(pairs, ones);
        sums += (Ints)products + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(half, row), ones);
    }
    inline void begin_term() { sums = (Ints)((Words)sums << TERM_BITS); }
    inline Ints total() const { return sums; }
};

// Sums of sixteen products with weights of 4 bits fit into 16 bits.
template <>
struct DotSum<4> {
    Ints before{};
    __m256i pairs = _mm256_setzero_si256();
    inline void add(Fours weights, int32_t four) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four)));
    }
    inline void begin_term() {
        before = (Ints)((Words)total() << TERM_BITS);
        pairs = _mm256_setzero_si256();
    }
    inline Ints total() const { return before + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};

// Sums of two products with quants of E2M1 fit into 16 bits, but those of sixteen do not.
template <>
struct DotSum<E2M1_BITS> {
    Ints sums{};
    inline void add(Fours weights, int32_t four) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four));
        sums += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    inline void begin_term() { sums = (Ints)((Words)sums << TERM_BITS); }
    inline Ints total() const { return sums; }
};

}  // namespace
