// Weights of 6 bits, in the layout of `Matmul`. Only for kernels.
#pragma once

#include "../../vectors.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// The size in bytes of one group of four bytes for each of the 32 columns of a block.
constexpr size_t SIX_BIT_FOUR_BYTES = N_BLOCK * 4;

// Returns the quants `4 * i` to `4 * i + 3` of 16 weights for each column of a vector, as the four bytes of a lane. `quants`
// points to the first bytes of the vector's columns. The compiler has to inline the function, so that the quants stay in
// registers.
__attribute__((always_inline)) inline Words six_bit_four(const uint8_t* quants, size_t i) {
    const auto packed = [&](size_t at) { return read<Words>(quants + at * SIX_BIT_FOUR_BYTES); };
    if (i < 3) return packed(i) & 0x3f3f3f3f;
    return (packed(0) >> 6 & 0x03030303) | (packed(1) >> 4 & 0x0c0c0c0c) | (packed(2) >> 2 & 0x30303030);
}

// Returns the scales of columns: the products of their super-scales and quantized scales. These products are exact in
// f32, because the factors have 11 and 8 significant bits.
inline Floats super_scaled(const uint8_t* super_scales, const uint8_t* quantized) {
    return load((const f16*)super_scales) * load((const int8_t*)quantized);
}

}  // namespace
