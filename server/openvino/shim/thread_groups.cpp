#include "thread_groups.hpp"

#include <atomic>
#include <cstdint>
#include <vector>

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

namespace ovfleet {
namespace {

struct Group {
    // If empty, the threads of the group are not bound.
    std::vector<uint32_t> processors;
    // If negative, memory is not placed on a node.
    int node;
};

// Null if there is only one group. Groups are never freed, because a thread may still be reading them.
std::atomic<const std::vector<Group>*> all_groups{nullptr};

// Returns a group, or null if there is only one group, or if the number of groups has been reduced since the caller
// read it.
const Group* group_at(size_t group) {
    const auto* groups = all_groups.load(std::memory_order_acquire);
    return groups && group < groups->size() ? &(*groups)[group] : nullptr;
}

// The largest number of NUMA nodes that a Linux kernel supports.
constexpr size_t NODES_MAX = 1024, WORD_BITS = 8 * sizeof(unsigned long);

}  // namespace

size_t num_thread_groups() {
    const auto* groups = all_groups.load(std::memory_order_acquire);
    return groups ? groups->size() : 1;
}

void bind_to_group(size_t number) {
    thread_local const Group* bound = nullptr;
    const Group* group = group_at(number);
    if (!group || bound == group) return;
    bound = group;
    if (bound->processors.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const auto processor : bound->processors)
        if (processor < CPU_SETSIZE) CPU_SET(processor, &set);
    // Ignore failures, because a thread that is not bound computes the same results.
    static_cast<void>(sched_setaffinity(0, sizeof(set), &set));
}

void place_on_group(const void* memory, size_t bytes, size_t number) {
    const Group* group = group_at(number);
    if (!group || group->node < 0 || size_t(group->node) >= NODES_MAX) return;
    // Only whole pages can be moved. Pages that also contain other data stay where they are.
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), begin = (uintptr_t(memory) + page - 1) / page * page;
    const size_t end = (uintptr_t(memory) + bytes) / page * page;
    if (begin >= end) return;
    unsigned long mask[NODES_MAX / WORD_BITS] = {};
    mask[size_t(group->node) / WORD_BITS] = 1ul << size_t(group->node) % WORD_BITS;
    // Pass one bit more than the mask has, because Linux reads one bit fewer than this argument specifies.
    static_cast<void>(syscall(SYS_mbind, begin, end - begin, MPOL_PREFERRED, mask, NODES_MAX + 1, MPOL_MF_MOVE));
}

}  // namespace ovfleet

extern "C" void ovfleet_set_thread_groups(const ovfleet_thread_group* groups, size_t count) {
    const std::vector<ovfleet::Group>* all = nullptr;
    if (count > 1) {
        auto* added = new std::vector<ovfleet::Group>();
        for (size_t i = 0; i < count; ++i)
            added->push_back({{groups[i].processors, groups[i].processors + groups[i].processor_count}, groups[i].node});
        all = added;
    }
    ovfleet::all_groups.store(all, std::memory_order_release);
}
