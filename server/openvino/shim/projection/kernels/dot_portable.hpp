// Only for dot.hpp: without instructions for integers of 8 bits, all quants are multiplied as numbers of 16 bits.
#pragma once

namespace {

constexpr size_t M_TILE_MAX = 4;
constexpr bool has_pairs(size_t, size_t) { return true; }

}  // namespace
