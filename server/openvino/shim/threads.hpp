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

// What memory begins at, so that no two threads' is in the same lines.
constexpr size_t ALIGNED = 128;

// Memory that is kept from step to step.
template <typename T>
class Buffer {
public:
    T* at_least(size_t count) {
#if defined(__SANITIZE_ADDRESS__)
        // Exactly as large as asked, and new each time: an access one byte beyond it is found.
        const size_t bytes = count * sizeof(T);
        const bool fits = false;
#else
        const size_t bytes = ceiling(count * sizeof(T), ALIGNED) * ALIGNED;
        const bool fits = count <= count_;
#endif
        if (!fits) {
            void* memory = nullptr;
            if (posix_memalign(&memory, ALIGNED, bytes) != 0) throw std::bad_alloc();
            memory_.reset(static_cast<T*>(memory));
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

// Rows for each thread from which on they belong to threads: with fewer, what a thread reads of the weights costs more than what it
// reads of others' rows.
constexpr size_t ROWS_OF_OWNER = 8;

// How many threads share so many rows of a step among them.
inline size_t owners(size_t rows) { return rows >= ROWS_OF_OWNER * threads() ? threads() : 1; }

// Calls `body` for numbers on the threads of the arena that runs the graph, `at_once` after each other. Owner `o` has those from
// `begin_of(o)` to `begin_of(o + 1)`, and those of the first begin at 0. A thread takes first what is its own, by its place in the arena, and then what is left of others'.
// What it wrote for the same owner before is in its processor's cache: to read it from that of another takes hundreds of nanoseconds
// where they have no cache in common.
template <typename Begin, typename Body>
void share_owned(size_t owners, const Begin& begin_of, size_t at_once, bool alone, const Body& body) {
    const size_t count = begin_of(owners);
    if (alone || count <= at_once || threads() < 2) {
        for (size_t index = 0; index < count; ++index) body(index);
        return;
    }
    struct alignas(ALIGNED) Next {
        std::atomic<size_t> at;
    };
    thread_local Buffer<Next> own_next;
    Next* next = own_next.at_least(owners);
    for (size_t owner = 0; owner < owners; ++owner) next[owner].at.store(begin_of(owner), std::memory_order_relaxed);
    tbb::parallel_for(
        size_t(0), std::min(ceiling(count, at_once), threads()),
        [&, next](size_t) {
            const size_t me = size_t(std::max(0, tbb::this_task_arena::current_thread_index()));
            for (size_t turn = 0; turn < owners; ++turn) {
                const size_t owner = (me + turn) % owners, end = begin_of(owner + 1);
                for (size_t begin; (begin = next[owner].at.fetch_add(at_once, std::memory_order_relaxed)) < end;)
                    for (size_t index = begin; index < std::min(end, begin + at_once); ++index) body(index);
            }
        },
        tbb::static_partitioner());
}

// The same for each number below `count`, which are nobody's.
template <typename Body>
void share(size_t count, size_t at_once, bool alone, const Body& body) {
    share_owned(1, [&](size_t owner) { return owner * count; }, at_once, alone, body);
}

}  // namespace ovfleet
