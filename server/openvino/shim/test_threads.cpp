// Runs tests on a given number of threads.
#include <atomic>
#include <chrono>
#include <thread>

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "shim.h"
#include "threads.hpp"

extern "C" int ovfleet_test_on_threads(size_t threads, void (*body)(void* context), void* context) {
    constexpr size_t threads_max = 16;
    if (threads == 0 || threads > threads_max) return 0;
    // Without this setting, oneTBB starts at most one thread for each processor.
    static const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, threads_max);
    tbb::task_arena arena{int(threads)};
    bool has_threads = false;
    arena.execute([&] {
        // Each task occupies its thread until all tasks have started, so that every task runs on a separate thread.
        std::atomic<size_t> arrived{0};
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
        const auto wait = [&](size_t) {
            ++arrived;
            while (arrived < threads && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
            if (arrived < threads) arrived = 2 * threads_max;
        };
        tbb::parallel_for(size_t(0), threads, wait, tbb::static_partitioner());
        has_threads = arrived == threads && ovfleet::num_threads() == threads;
        if (has_threads) body(context);
    });
    return has_threads;
}
