// Computes dot products of 8-bit integers with the instruction VPDPBUSD of AVX-VNNI. Only for dot.hpp.
#pragma once

namespace {

constexpr size_t M_TILE_MAX = 6;
constexpr bool has_pairs(size_t, size_t) { return false; }

template <size_t BITS>
struct DotSum {
    Ints sums;
    // In a loop, GCC would otherwise reserve a register for a vector of zeros, which leaves too few registers for the sums.
    DotSum() { asm volatile("vpxor %0, %0, %0" : "=x"(sums)); }
    inline void add(Fours weights, int32_t four) {
        sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(four));
    }
    inline void add_two(Fours first, int32_t first_four, Fours second, int32_t second_four) {
        add(first, first_four);
        add(second, second_four);
    }
    inline void begin_term() { sums = (Ints)((Words)sums << TERM_BITS); }
    inline Ints total() const { return sums; }
};

}  // namespace
