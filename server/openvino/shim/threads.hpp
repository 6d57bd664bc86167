// How work is divided among the threads of the arena that runs the graph.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

namespace ovfleet {

inline size_t ceiling(size_t count, size_t part) { return (count + part - 1) / part; }

// Memory that begins at a vector, and is kept from step to step.
template <typename T>
class Buffer {
public:
    T* at_least(size_t count) {
        if (count > count_) {
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, ceiling(count * sizeof(T), 64) * 64)));
            if (!memory_) throw std::bad_alloc();
            count_ = count;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(T* memory) const { std::free(memory); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t count_ = 0;
};

// Threads of the arena that runs the graph.
inline size_t threads() { return size_t(std::max(1, tbb::this_task_arena::max_concurrency())); }

// Calls `body` for each number below `count`, on the threads of the arena that runs the graph, `at_once` after each other.
template <typename Body>
void share(size_t count, size_t at_once, bool alone, const Body& body) {
    const size_t used = std::min(ceiling(count, at_once), threads());
    if (alone || used < 2) {
        for (size_t index = 0; index < count; ++index) body(index);
        return;
    }
    std::atomic<size_t> next{0};
    tbb::parallel_for(
        size_t(0), used,
        [&](size_t) {
            for (size_t begin; (begin = next.fetch_add(at_once, std::memory_order_relaxed)) < count;)
                for (size_t index = begin; index < std::min(count, begin + at_once); ++index) body(index);
        },
        tbb::static_partitioner());
}

}  // namespace ovfleet
