// Dot products of 8-bit integers in plain C++. Only for dot.hpp.
#pragma once

namespace {

template <size_t BITS>
struct DotSum {
    Ints sums{};
    inline void add(Fours weights, int32_t four) {
        for (size_t i = 0; i < 4; ++i)
            for (size_t lane = 0; lane < LANES; ++lane) sums[lane] += weights[lane * 4 + i] * int8_t(four >> (8 * i));
    }
    inline void begin_term() { sums = (Ints)((Words)sums << TERM_BITS); }
    inline Ints total() const { return sums; }
};

}  // namespace
