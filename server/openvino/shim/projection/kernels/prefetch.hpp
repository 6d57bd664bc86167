// Prefetches weights. Only for kernels.
#pragma once

#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// Prefetches the next block of weights, a few cache lines with each group of the current block, because the processor does not
// predict these reads in time.
struct Prefetch {
    const uint8_t *at, *end;
    size_t lines;
    inline void next() {
        for (size_t line = 0; line < lines && at < end; ++line, at += 64) __builtin_prefetch(at);
    }
};

}  // namespace
