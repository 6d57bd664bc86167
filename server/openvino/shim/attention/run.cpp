// Divides the attention of a step into work items, and runs them on several threads.
#include "run.hpp"

#include <algorithm>
#include <atomic>

#include "../threads.hpp"

namespace {

using namespace ovfleet;

// The number of new tokens whose keys and values one thread stores at a time.
constexpr size_t STORED_TOKENS = 4 * BLOCK_TOKENS;

// The number of scalar multiplications of queries by keys below which a second thread costs more time than it saves.
constexpr size_t SERIAL_PRODUCTS = 1 << 17;

// A thread takes `ITEM_GRAIN` consecutive items at a time, so that it can prefetch the blocks of the next item. If there are at
// most `GRAINS_PER_THREAD` such groups of items per thread, threads take single items instead.
constexpr size_t ITEM_GRAIN = 4, GRAINS_PER_THREAD = 8;

// A decode is divided into parts if its attention in one KV head is more than 1 / `UNDIVIDED_FRACTION` of the work that each
// thread has, on average, in the step.
constexpr size_t UNDIVIDED_FRACTION = 4;

// Sorts items by their owners, and stores where the items of each owner begin.
template <typename T>
class OwnerOrder {
public:
    // The sort is stable.
    template <typename Owner>
    void sort(std::vector<T>& items, size_t owners, const Owner& owner_of) {
        begins_.assign(owners + 2, 0);
        for (const T& item : items) ++begins_[owner_of(item) + 2];
        for (size_t owner = 2; owner < begins_.size(); ++owner) begins_[owner] += begins_[owner - 1];
        sorted_.resize(items.size());
        for (const T& item : items) sorted_[begins_[owner_of(item) + 1]++] = item;
        std::swap(items, sorted_);
    }
    size_t begin_of(size_t owner) const { return begins_[owner]; }

private:
    std::vector<size_t> begins_;
    std::vector<T> sorted_;
};

// The new keys and values of one KV head for a chunk of a prompt. They are stored before the work items run.
struct StoreItem {
    Sequence chunk;
    size_t kv_head;
};

// The work of a step. Its memory is reused in every step.
struct Work {
    std::vector<WorkItem> items;
    // Chunks of prompts. Their new keys and values are stored first, because several items may read them.
    std::vector<StoreItem> stored;
    size_t tokens, products, queries_max, blocks_max;
    // The number of items with a partial result.
    size_t partial_items;
    // The sum, over all new tokens, of the number of blocks in the token's sequence.
    size_t token_blocks;
    // The consecutive items with the partial results of one decode and KV head, which are merged. `merge_of_item` contains the
    // index of the merge of each item that has a partial result.
    struct Merge {
        size_t first, count;
    };
    std::vector<Merge> merges;
    std::vector<size_t> merge_of_item;
};

// The number of items of a merge that have been computed.
struct alignas(ALIGNMENT) Done {
    std::atomic<size_t> items;
};

// Divides the new tokens of a sequence into chunks, and adds an item for each chunk and KV head to `stored`. No two chunks
// write to the same block.
void add_stored(const Layer& layer, const Sequence& sequence, std::vector<StoreItem>& stored) {
    for (size_t begin = 0, end; begin < sequence.count; begin = end) {
        const size_t next = (sequence.past + begin) / STORED_TOKENS * STORED_TOKENS + STORED_TOKENS;
        end = std::min(next - sequence.past, sequence.count);
        const Sequence chunk{sequence.begin + begin, end - begin, sequence.past + begin, sequence.blocks, sequence.first_block};
        for (size_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) stored.push_back({chunk, kv_head});
    }
}

// Assigns each item to a slot of the arena, which is its owner. If the projections divide the rows among threads, the owner of
// a token's attention usually also owns the token's row in the projections. If there are several groups of threads, each group
// computes some of the KV heads, so that the cache of these heads is on the NUMA node of the group.
class Owners {
public:
    Owners(const Layer& layer, size_t tokens)
        : groups_(Groups::of_arena()), kv_heads_(layer.kv_heads), tokens_(tokens), has_rows_(num_owners(tokens) > 1) {}

    size_t count() const { return has_rows_ || groups_.count > 1 ? groups_.threads : 1; }
    // The owner of the work for a token and a KV head.
    size_t of(size_t token, size_t kv_head) const {
        if (count() == 1) return 0;
        const size_t group = ((kv_head + 1) * groups_.count - 1) / kv_heads_, first = groups_.begin(group);
        const size_t members = groups_.begin(group + 1) - first;
        return first + (has_rows_ ? token * members / tokens_ : (token + kv_head) % members);
    }

private:
    Groups groups_;
    size_t kv_heads_, tokens_;
    // Whether each thread owns a part of the tokens of the step.
    bool has_rows_;
};

// Divides the attention of a sequence into items.
void add_items(const Kernels& kernels, const Layer& layer, const Sequence& sequence, Work& work) {
    const size_t group = layer.heads / layer.kv_heads, tile_tokens = std::max<size_t>(kernels.tile_queries / group, 1);
    // Marks items that have a partial result, until memory is allocated for this result.
    static float pending;
    // Start with the last tokens: in causal attention they have the most keys, and the items that run last should be small.
    for (size_t end = sequence.count, begin; end > 0; end = begin) {
        begin = (end - 1) / tile_tokens * tile_tokens;
        const size_t queries = (end - begin) * group;
        const size_t keys = sequence.past + (layer.is_bidirectional ? sequence.count : end),
                     blocks = div_up(keys, BLOCK_TOKENS);
        const size_t hidden =
            layer.window && sequence.past + begin + 1 > layer.window ? sequence.past + begin + 1 - layer.window : 0;
        const size_t first = hidden / (BLOCK_TOKENS * CHUNK_BLOCKS) * CHUNK_BLOCKS;
        // Usually, only large decodes are divided into one item for each part, because prompts and steps with many decodes have
        // enough items anyway. Two features require that every decode is divided. With block scores, a tile has memory for the
        // scores of only one part. With sparse attention, an item that is longer than a part could skip keys, but a decode must
        // attend to all keys. A sequence with draft tokens does not count as a decode here: like a prompt, it may skip keys.
        const bool is_decode = sequence.count == 1, needs_parts = layer.block_scores || layer.attention_mass > 0;
        const bool is_large = (blocks - first) * num_threads() * UNDIVIDED_FRACTION > work.token_blocks * layer.kv_heads;
        const bool is_divided = is_decode && (needs_parts || (num_threads() > 1 && is_large));
        const bool is_partial = is_divided && part_end(first) < blocks;
        work.queries_max = std::max(work.queries_max, queries);
        work.blocks_max = std::max(work.blocks_max, blocks - first);
        work.products += queries * (keys - first * BLOCK_TOKENS) * layer.key_size * layer.kv_heads;
        for (size_t head = 0; head < layer.kv_heads; ++head)
            for (size_t block = first, next; block < blocks; block = next) {
                next = is_divided ? std::min(blocks, part_end(block)) : blocks;
                const bool stores = is_decode && next == blocks;
                WorkItem item{&sequence, head, begin, end, stores, block, next, nullptr, nullptr};
                if (is_partial) item.part = &pending;
                work.partial_items += is_partial;
                work.items.push_back(item);
            }
    }
}

// Finds the items whose partial results are merged. The items of one decode and KV head are consecutive, so each item is only
// compared with the previous one.
void find_merges(Work& work) {
    const auto& items = work.items;
    work.merges.clear();
    work.merge_of_item.resize(items.size());
    for (size_t index = 0; index < items.size(); ++index) {
        const WorkItem& item = items[index];
        if (!item.part) continue;
        const WorkItem* before = index > 0 ? &items[index - 1] : nullptr;
        if (!before || before->sequence != item.sequence || before->kv_head != item.kv_head) work.merges.push_back({index, 0});
        ++work.merges.back().count;
        work.merge_of_item[index] = work.merges.size() - 1;
    }
}

// Computes an item. The thread that computes the last of the partial results of a decode and a KV head merges all of them, in
// the order of the parts.
void attend(const Kernels& kernels, const Layer& layer, const StepTensors& tensors, const Work& work, size_t index,
            size_t scratch_floats, Done* done) {
    thread_local Buffer<float> scratch;
    const WorkItem& item = work.items[index];
    kernels.attend(layer, item, tensors, scratch.at_least(scratch_floats));
    if (!item.part) return;
    const size_t merge = work.merge_of_item[index];
    const auto& [first, count] = work.merges[merge];
    if (done[merge].items.fetch_add(1, std::memory_order_acq_rel) + 1 == count)
        kernels.merge(layer, &work.items[first], count, tensors);
}

}  // namespace

void ovfleet::run(const Kernels& kernels, const Layer& layer, const std::vector<Sequence>& sequences,
                  const StepTensors& tensors) {
    // Other threads access this thread's objects through the references below. In a lambda, the name of a thread_local object
    // would refer to the object of the thread that runs the lambda.
    thread_local Work work_of_thread;
    thread_local Buffer<float> parts;
    thread_local Buffer<Done> done_of_thread;
    thread_local OwnerOrder<WorkItem> item_order_of_thread;
    thread_local OwnerOrder<StoreItem> stored_order_of_thread;
    auto& work = work_of_thread;
    auto& items = work.items;
    auto& stored = work.stored;
    auto& item_order = item_order_of_thread;
    auto& stored_order = stored_order_of_thread;
    items.clear();
    stored.clear();
    work.tokens = work.products = work.queries_max = work.blocks_max = work.partial_items = work.token_blocks = 0;
    for (const auto& sequence : sequences) {
        work.tokens += sequence.count;
        work.token_blocks += sequence.count * div_up(sequence.past + sequence.count, BLOCK_TOKENS);
    }
    for (const auto& sequence : sequences) {
        if (sequence.count > 1) add_stored(layer, sequence, stored);
        add_items(kernels, layer, sequence, work);
    }
    const Owners owners(layer, work.tokens);
    item_order.sort(items, owners.count(),
                    [&](const WorkItem& item) { return owners.of(item.sequence->begin + item.token_begin, item.kv_head); });
    stored_order.sort(stored, owners.count(), [&](const StoreItem& item) { return owners.of(item.chunk.begin, item.kv_head); });
    const size_t part_floats = layer.heads / layer.kv_heads * part_stride(layer);
    float* part = parts.at_least(work.partial_items * part_floats);
    for (size_t index = 0; index < items.size(); ++index) {
        items[index].next = &items[std::min(index + 1, items.size() - 1)];
        if (items[index].part) {
            items[index].part = part;
            part += part_floats;
        }
    }

    const Threading threading = work.products < SERIAL_PRODUCTS ? Threading::serial : Threading::parallel;
    const auto first_stored = [&](size_t owner) { return stored_order.begin_of(owner); };
    parallel_for_owned(owners.count(), first_stored, 1, threading, [&work = work, &kernels, &layer, &tensors](size_t index) {
        kernels.store(layer, work.stored[index].chunk, tensors, work.stored[index].kv_head);
    });
    find_merges(work);
    Done* const done = done_of_thread.at_least(work.merges.size());
    for (size_t merge = 0; merge < work.merges.size(); ++merge) done[merge].items.store(0, std::memory_order_relaxed);
    const size_t scratch_floats = kernels.scratch(layer, work.queries_max, work.blocks_max);
    const size_t grain = items.size() > ITEM_GRAIN * GRAINS_PER_THREAD * num_threads() ? ITEM_GRAIN : 1;
    const auto first_item = [&](size_t owner) { return item_order.begin_of(owner); };
    parallel_for_owned(owners.count(), first_item, grain, threading,
                       [&work = work, &kernels, &layer, &tensors, scratch_floats, done](size_t index) {
                           attend(kernels, layer, tensors, work, index, scratch_floats, done);
                       });
}
