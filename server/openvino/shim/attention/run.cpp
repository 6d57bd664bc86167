// How the attention of a step is divided among threads.
#include "run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../threads.hpp"
#include "../vectors.hpp"

namespace {

using namespace ovfleet;

// New keys and values that a thread puts into the cache at once.
constexpr size_t TOKENS_STORED_AT_ONCE = 4 * BLOCK_TOKENS;

// Queries that go together, if a sequence has so many new tokens.
constexpr size_t ROWS_AT_ONCE = 96;

// Products of a number of a query and one of a key below which a second thread costs more than it helps.
constexpr size_t ALONE_PRODUCTS = 1 << 17;

// Items that a thread takes at once, where there are many: it knows which is next.
constexpr size_t ITEMS_AT_ONCE = 4;

// What belongs to owners, in the order of these.
template <typename T>
class Owned {
public:
    // Sorts what there is, of which `owner_of` tells the owners. What has the same one keeps its order.
    template <typename Owner>
    void sort(std::vector<T>& all, size_t owners, const Owner& owner_of) {
        bounds_.assign(owners + 2, 0);
        for (const T& one : all) ++bounds_[owner_of(one) + 2];
        for (size_t owner = 2; owner < bounds_.size(); ++owner) bounds_[owner] += bounds_[owner - 1];
        sorted_.resize(all.size());
        for (const T& one : all) sorted_[bounds_[owner_of(one) + 1]++] = one;
        std::swap(all, sorted_);
    }
    size_t begin_of(size_t owner) const { return bounds_[owner]; }

private:
    std::vector<size_t> bounds_;
    std::vector<T> sorted_;
};

// Adds up what the items have of each query.
void join(const Layer& layer, const std::vector<Item>& items, const Memory& memory) {
    const size_t group = layer.heads / layer.kv_heads, size = layer.value_size;
    for (size_t first = 0, last; first < items.size(); first = last) {
        const Item& item = items[first];
        last = first + 1;
        if (!item.part) continue;
        while (last < items.size() && items[last].sequence == item.sequence && items[last].kv_head == item.kv_head) ++last;
        for (size_t row = 0; row < group; ++row) {
            float sum[HEAD_SIZE_MAX] = {};
            const auto part = [&](size_t index) { return items[index].part + row * part_row(layer); };
            float maximum = part(first)[0], total = 0;
            for (size_t index = first + 1; index < last; ++index) maximum = std::max(maximum, part(index)[0]);
            for (size_t index = first; index < last; ++index) {
                const float factor = std::exp(part(index)[0] - maximum);
                total += part(index)[1] * factor;
                for (size_t i = 0; i < size; ++i) sum[i] += part(index)[2 + i] * factor;
            }
            const size_t to = (item.sequence->begin * layer.heads + item.kv_head * group + row) * size;
            for (size_t i = 0; i < size; ++i) {
                const float value = sum[i] / total;
                if (layer.is_bf16) convert(value, static_cast<bf16*>(memory.output)[to + i]);
                else static_cast<float*>(memory.output)[to + i] = value;
            }
            for (size_t index = first; layer.weighs && index < last; ++index) {
                const Item& one = items[index];
                float* weights = memory.weights + one.kv_head * memory.step_blocks + one.sequence->place;
                const float factor = std::exp(part(index)[0] - maximum) / total;
                for (size_t block = one.block_begin; block < one.block_end; ++block)
                    weights[block] += part(index)[2 + size + block - one.block_begin] * factor;
            }
        }
    }
}

}  // namespace

void ovfleet::run(const Kernels& kernels, const Layer& layer, const std::vector<Sequence>& sequences,
                  const Memory& memory) {
    const size_t group = layer.heads / layer.kv_heads, part_floats = group * part_row(layer);
    const size_t tokens_at_once = std::max<size_t>(ROWS_AT_ONCE / group, 1);
    // Of this thread, also where others read them.
    thread_local std::vector<Item> own_items;
    thread_local Buffer<float> parts;
    auto& items = own_items;
    items.clear();
    // Parts of prompts, whose new keys are read by many items.
    thread_local std::vector<Sequence> own_stored;
    auto& stored = own_stored;
    stored.clear();
    float somewhere;
    size_t parted = 0, products = 0, rows_max = 0, blocks_max = 0, tokens = 0;
    for (const auto& sequence : sequences) {
        tokens += sequence.count;
        for (size_t begin = 0, end; sequence.count > 1 && begin < sequence.count; begin = end) {
            // No two write to the same block.
            const size_t next = (sequence.past + begin) / TOKENS_STORED_AT_ONCE * TOKENS_STORED_AT_ONCE + TOKENS_STORED_AT_ONCE;
            end = std::min(next - sequence.past, sequence.count);
            stored.push_back({sequence.begin + begin, end - begin, sequence.past + begin, sequence.blocks, sequence.place});
        }
        // The last first: they have the most keys, and what is left at the end should be little.
        for (size_t end = sequence.count, begin; end > 0; end = begin) {
            begin = (end - 1) / tokens_at_once * tokens_at_once;
            const size_t rows = (end - begin) * group;
            const size_t seen = sequence.past + end, blocks = ceiling(seen, BLOCK_TOKENS);
            const size_t unseen = layer.window && sequence.past + begin + 1 > layer.window
                                      ? sequence.past + begin + 1 - layer.window
                                      : 0;
            const size_t first = unseen / (BLOCK_TOKENS * BLOCKS_AT_ONCE) * BLOCKS_AT_ONCE;
            // Where many tokens attend to the keys there are items enough.
            const size_t part = sequence.count == 1 ? PART_BLOCKS : blocks;
            const bool is_parted = blocks - first > part;
            rows_max = std::max(rows_max, rows);
            blocks_max = std::max(blocks_max, std::min(part, blocks - first));
            products += rows * (seen - first * BLOCK_TOKENS) * layer.key_size * layer.kv_heads;
            for (size_t head = 0; head < layer.kv_heads; ++head)
                for (size_t block = first; block < blocks; block += part) {
                    const bool stores = sequence.count == 1 && block + part >= blocks;
                    Item item{&sequence, head, begin, end, stores, block, std::min(blocks, block + part), nullptr, nullptr};
                    // Where it is, is known when there are all.
                    if (is_parted) item.part = &somewhere;
                    parted += is_parted;
                    items.push_back(item);
                }
        }
    }
    // A token is whose its row is among those of the step.
    const size_t owners = ovfleet::owners(tokens);
    const auto owner_of = [&](size_t token) { return token * owners / tokens; };
    thread_local Owned<Item> own_items_of;
    thread_local Owned<Sequence> own_stored_of;
    auto& items_of = own_items_of;
    auto& stored_of = own_stored_of;
    items_of.sort(items, owners, [&](const Item& item) { return owner_of(item.sequence->begin + item.token_begin); });
    stored_of.sort(stored, owners, [&](const Sequence& one) { return owner_of(one.begin); });
    float* part = parts.at_least(parted * part_floats);
    for (size_t index = 0; index < items.size(); ++index) {
        items[index].next = &items[std::min(index + 1, items.size() - 1)];
        if (items[index].part) {
            items[index].part = part;
            part += part_floats;
        }
    }

    const bool alone = products < ALONE_PRODUCTS;
    share_owned(owners, [&](size_t owner) { return stored_of.begin_of(owner) * layer.kv_heads; }, 1, alone, [&](size_t index) {
        kernels.store(layer, stored[index / layer.kv_heads], memory, index % layer.kv_heads);
    });
    const size_t scratch_floats = kernels.scratch(layer, rows_max, blocks_max);
    const size_t at_once = items.size() > ITEMS_AT_ONCE * 16 ? ITEMS_AT_ONCE : 1;
    share_owned(owners, [&](size_t owner) { return items_of.begin_of(owner); }, at_once, alone, [&](size_t index) {
        thread_local Buffer<float> scratch;
        kernels.attend(layer, items[index], memory, scratch.at_least(scratch_floats));
    });
    if (parted) join(layer, items, memory);
}
