// Prefetches weights. Only for kernels.
#pragma once

#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// Prefetches the next block of weights while the current block is read, because the processor does not predict these reads in
// time. The prefetches are spread evenly over the calls to `next`, because a processor has buffers for only a few reads at a
// time. `LOCALITY` is that of `__builtin_prefetch`: 3 for the first-level cache, and 2 for the second-level cache.
template <int LOCALITY>
class Prefetch {
public:
    // `calls` is the number of calls to `next` over which the memory from `begin` to `end` is prefetched.
    Prefetch(const uint8_t* begin, const uint8_t* end, size_t calls)
        : at_(begin), end_(end), bytes_(size_t(end - begin) / calls + 1) {}
    inline void next() {
        for (due_ += bytes_; due_ >= LINE && at_ < end_; due_ -= LINE, at_ += LINE) __builtin_prefetch(at_, 0, LOCALITY);
    }

private:
    static constexpr size_t LINE = 64;
    const uint8_t *at_, *end_;
    size_t bytes_, due_ = 0;
};

}  // namespace
