// Without dot-product instructions for 8-bit integers, all quants are multiplied as 16-bit numbers. Only for dot.hpp.
#pragma once

namespace {

constexpr size_t M_TILE_MAX = 4;
constexpr bool has_pairs(size_t, size_t) { return true; }

}  // namespace
