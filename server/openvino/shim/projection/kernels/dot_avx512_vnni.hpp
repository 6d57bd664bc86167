// Computes dot products of 8-bit integers with the instruction VPDPBUSD of AVX-512 VNNI. Only for dot.hpp.
#pragma once

namespace {

constexpr size_t M_TILE_MAX = 6;
constexpr bool has_pairs(size_t, size_t) { return false; }

template <size_t BITS>
struct DotSum {
    Ints sums{};
    inline void add(Fours weights, int32_t four) {
        sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
    }
    inline void add_two(Fours first, int32_t first_four, Fours second, int32_t second_four) {
        add(first, first_four);
        add(second, second_four);
    }
    inline void begin_term() { sums = (Ints)((Words)sums << TERM_BITS); }
    inline Ints total() const { return sums; }
};

}  // namespace
