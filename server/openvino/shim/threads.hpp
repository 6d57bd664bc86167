// Divides work among the threads of the arena that runs the graph.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "thread_groups.hpp"

namespace ovfleet {

inline size_t div_up(size_t count, size_t part) { return (count + part - 1) / part; }

// The alignment of buffers in bytes. It ensures that the buffers of two threads never share a cache line.
constexpr size_t ALIGNMENT = 128;

// Memory that is reused in every step.
template <typename T>
class Buffer {
public:
    T* at_least(size_t count) {
#if defined(__SANITIZE_ADDRESS__)
        // Allocate the exact size each time, so that the sanitizer detects an access one byte beyond it.
        const size_t bytes = count * sizeof(T);
        const bool fits = false;
#else
        const size_t bytes = div_up(count * sizeof(T), ALIGNMENT) * ALIGNMENT;
        const bool fits = count <= count_;
#endif
        if (!fits) {
            void* memory = nullptr;
            if (posix_memalign(&memory, ALIGNMENT, bytes) != 0) throw std::bad_alloc();
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

// The number of threads of the arena that runs the graph.
inline size_t num_threads() { return size_t(std::max(1, tbb::this_task_arena::max_concurrency())); }

// The groups of threads, each of which has consecutive slots of the arena. There are at most as many groups as threads.
struct Groups {
    size_t count, threads;
    static Groups of_arena() {
        const size_t threads = num_threads();
        return {std::min(num_thread_groups(), threads), threads};
    }
    // The first slot of a group.
    size_t begin(size_t group) const { return group * threads / count; }
    size_t of_slot(size_t slot) const { return ((slot + 1) * count - 1) / threads; }
    // If there are several groups, the blocks of a matrix are divided among the slots. Returns the first block of a slot.
    size_t first_block(size_t slot, size_t blocks) const { return slot * blocks / threads; }
};

// The default of `tokens_per_owner`. If a step has at least this many tokens per thread, each thread owns a part of the tokens
// and reads all weights for it. With fewer tokens, reading all weights in each thread would cost more than reading the results
// of other threads.
constexpr size_t TOKENS_PER_OWNER = 8;

// Returns the number of threads that each own a part of the tokens of a step, or 1 if all threads share the tokens.
inline size_t num_owners(size_t tokens, size_t tokens_per_owner = TOKENS_PER_OWNER) {
    return tokens >= tokens_per_owner * num_threads() ? num_threads() : 1;
}

// Whether a loop runs on several threads or only on the calling thread.
enum class Threading { parallel, serial };

// Calls `body` with each index and its owner on the threads of the arena that runs the graph, `grain` indices at a time. Owner
// `o` owns the indices from `begin_of(o)` to `begin_of(o + 1)`; those of the first owner begin at 0. A thread starts with the
// owner that corresponds to its slot in the arena, because the data that it wrote earlier for this owner is in the cache of its
// processor. Reading data from the cache of another processor takes hundreds of nanoseconds, unless the processors share a
// cache. When no indices of this owner remain, the thread processes those of the other owners. If each slot is an owner, the
// owners of the thread's group come first.
template <typename Begin, typename Body>
void for_each_owned(size_t owners, const Begin& begin_of, size_t grain, Threading threading, const Body& body) {
    const size_t count = begin_of(owners);
    if (threading == Threading::serial || count <= grain || num_threads() < 2) {
        for (size_t owner = 0; owner < owners; ++owner)
            for (size_t index = begin_of(owner); index < begin_of(owner + 1); ++index) body(index, owner);
        return;
    }
    const Groups groups = Groups::of_arena();
    struct alignas(ALIGNMENT) Next {
        std::atomic<size_t> at;
    };
    thread_local Buffer<Next> buffer;
    Next* next = buffer.at_least(owners);
    for (size_t owner = 0; owner < owners; ++owner) next[owner].at.store(begin_of(owner), std::memory_order_relaxed);
    tbb::parallel_for(
        size_t(0), std::min(div_up(count, grain), num_threads()),
        [&, next](size_t) {
            const size_t self = size_t(std::max(0, tbb::this_task_arena::current_thread_index()));
            const size_t group = groups.of_slot(self);
            bind_to_group(group);
            // The range of owners that this thread visits first: those in its group, or all of them if owners are not slots.
            const bool are_slots = owners == groups.threads;
            const size_t first = are_slots ? groups.begin(group) : 0, last = are_slots ? groups.begin(group + 1) : owners;
            for (size_t turn = 0; turn < owners; ++turn) {
                const size_t owner =
                    turn < last - first ? first + (self - first + turn) % (last - first) : (first + turn) % owners;
                const size_t end = begin_of(owner + 1);
                for (size_t begin; (begin = next[owner].at.fetch_add(grain, std::memory_order_relaxed)) < end;)
                    for (size_t index = begin; index < std::min(end, begin + grain); ++index) body(index, owner);
            }
        },
        tbb::static_partitioner());
}

// Calls `body` with each index, like `for_each_owned`, but without the owner of the index.
template <typename Begin, typename Body>
void parallel_for_owned(size_t owners, const Begin& begin_of, size_t grain, Threading threading, const Body& body) {
    for_each_owned(owners, begin_of, grain, threading, [&](size_t index, size_t) { body(index); });
}

// Calls `body` with each index below `count`, `grain` indices at a time, without owners.
template <typename Body>
void parallel_for(size_t count, size_t grain, const Body& body) {
    parallel_for_owned(1, [&](size_t owner) { return owner * count; }, grain, Threading::parallel, body);
}

// Calls `body` with each index below `count`, `grain` indices at a time, and binds no thread to its group. Loops that load a
// model use this function, because the thread that runs them also starts other threads, which would inherit its binding.
template <typename Body>
void parallel_for_unbound(size_t count, size_t grain, const Body& body) {
    tbb::parallel_for(size_t(0), div_up(count, grain), [&](size_t part) {
        const size_t begin = part * grain, end = std::min(count, begin + grain);
        for (size_t index = begin; index < end; ++index) body(index);
    });
}

}  // namespace ovfleet
