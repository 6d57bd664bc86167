// Divides a projection among threads.
#include "run.hpp"

#include <atomic>
#include <thread>

#include "../threads.hpp"
#include "adapters.hpp"

namespace ovfleet::projection {
namespace {

// The approximate number of multiplications that a thread computes at a time.
constexpr size_t GRAIN_PRODUCTS = 1 << 20;
// The smallest number of elements of the source that several threads pack faster than one thread, and the number of
// multiplications for adapters that take as long as packing one element.
constexpr size_t PARALLEL_ELEMENTS = 1 << 14, PRODUCTS_PER_ELEMENT = 2;
// The minimum number of parts into which the weights are divided for each thread, if there are enough blocks. With small parts,
// a late thread delays the others less.
constexpr size_t PARTS_PER_THREAD_MIN = 8;
// `K_PART_COST` is the cost of storing sums after one part of K and loading them, usually on another processor, for the next
// part. It is expressed as the number of columns that take as long to multiply. `K_PARTS_MAX` is the largest number of parts.
constexpr size_t K_PART_COST = 256, K_PARTS_MAX = 4;
// The number of times that a waiting thread checks whether a part has ended before it begins to yield to other threads.
constexpr size_t SPINS = 1000;

// The operands of a product.
struct Product {
    const Kernels& kernels;
    const Matmul& matmul;
    const PackedSrc& packed;
    FloatData residual, dst;
};

// Returns the number of parts of K that minimizes the work of the busiest thread.
size_t num_k_parts(const Kernels& kernels, const Matmul& matmul, size_t threads) {
    const size_t blocks = num_n_blocks(matmul);
    // Do not divide K if threads outnumber blocks, because a part of a block begins only when the previous part of the block
    // has ended. Do not divide it for many blocks either, because all threads then have almost the same amount of work anyway.
    if (!kernels.multiply_k_part || threads > blocks || blocks >= PARTS_PER_THREAD_MIN * threads) return 1;
    size_t best = 1, least = div_up(blocks, threads) * matmul.K;
    for (size_t parts = 2; parts <= K_PARTS_MAX; ++parts) {
        const size_t cost = div_up(blocks * parts, threads) * (matmul.K / parts + K_PART_COST);
        if (cost < least) least = cost, best = parts;
    }
    return best;
}

// Multiplies one row by each block. K is divided into several parts, which different threads may compute. A part continues the
// sums of the part before it, so the order of the additions is the same as without parts.
void multiply_in_parts(const Product& product, size_t parts) {
    struct alignas(ALIGNMENT) Block {
        float sums[N_BLOCK];
        std::atomic<size_t> parts;
    };
    // The loop below must use the pointer: in another thread, the name of the buffer refers to that thread's own buffer.
    thread_local Buffer<Block> buffer;
    const size_t unit = std::max(product.matmul.group, SRC_GROUP);
    const size_t count = num_n_blocks(product.matmul), columns = div_up(product.matmul.K / unit, parts) * unit;
    Block* const blocks = buffer.at_least(count);
    for (size_t block = 0; block < count; ++block) {
        std::fill_n(blocks[block].sums, N_BLOCK, 0.0f);
        blocks[block].parts.store(0, std::memory_order_relaxed);
    }
    // Threads begin items in ascending order, so another thread is computing the part that an item waits for.
    parallel_for(count * parts, 1, [&product, blocks, count, parts, columns](size_t item) {
        const auto& [kernels, matmul, packed, residual, dst] = product;
        const size_t number = item / count, begin = number * columns;
        const size_t block = item % count, next_block = std::min(block + num_threads(), count - 1);
        auto& [sums, done] = blocks[block];
        for (size_t turn = 0; done.load(std::memory_order_acquire) < number; ++turn)
            if (turn > SPINS) std::this_thread::yield();
        const KPart part{begin, std::min(begin + columns, matmul.K), block, next_block};
        if (part.begin < part.end) kernels.multiply_k_part(matmul, packed, part, sums);
        if (number + 1 == parts) kernels.finish(matmul, packed, block, sums, residual, dst);
        done.store(number + 1, std::memory_order_release);
    });
}

// Each group of threads multiplies all rows by the blocks of the group. Within a group, the threads divide the blocks among
// themselves. If there are many rows, they divide the rows instead, and each thread multiplies the rows that it owns by all
// blocks of the group.
void multiply_in_groups(const Product& product, const Groups& groups, bool owns_rows, size_t tiles_max) {
    const Matmul& matmul = product.matmul;
    const size_t n_blocks = num_n_blocks(matmul), tiles = num_tiles(product.packed), threads = groups.threads;
    const auto first_block = [&](size_t slot) { return groups.first_block(slot, n_blocks); };
    // An owner has an item for each combination of a part of its tiles and one of its blocks. All owners have the same number
    // of items, so some items may be empty.
    const size_t threads_min = threads / groups.count, threads_max = div_up(threads, groups.count);
    const size_t owner_tiles = owns_rows ? div_up(tiles, threads_min) : tiles, part_tiles = std::min(tiles_max, owner_tiles);
    const size_t owner_blocks = (owns_rows ? n_blocks * threads_max : n_blocks) / threads + 1;
    const size_t owner_items = div_up(owner_tiles, part_tiles) * owner_blocks;
    for_each_owned(
        threads, [&](size_t slot) { return slot * owner_items; }, 1, Threading::parallel,
        [&](size_t item, size_t slot) {
            const size_t group = groups.of_slot(slot), first_slot = groups.begin(group), last_slot = groups.begin(group + 1);
            const size_t members = last_slot - first_slot, member = slot - first_slot;
            const size_t block = first_block(owns_rows ? first_slot : slot) + item % owner_blocks;
            const size_t last_block = first_block(owns_rows ? last_slot : slot + 1);
            const size_t first_tile = owns_rows ? member * tiles / members : 0;
            const size_t last_tile = owns_rows ? (member + 1) * tiles / members : tiles;
            const size_t tile = first_tile + item % owner_items / owner_blocks * part_tiles;
            if (block >= last_block || tile >= last_tile) return;
            const size_t next = std::min(block + 1, n_blocks - 1);
            const DstRange range{tile, std::min(last_tile, tile + part_tiles), block, block + 1, next};
            product.kernels.multiply(matmul, product.packed, range, product.residual, product.dst);
        });
}

}  // namespace

void place(const Matmul& matmul) {
    const Groups groups = Groups::of_arena();
    const size_t n_blocks = num_n_blocks(matmul), bytes = n_block_bytes(matmul);
    for (size_t group = 0; group < groups.count; ++group) {
        const size_t first = groups.first_block(groups.begin(group), n_blocks);
        const size_t last = groups.first_block(groups.begin(group + 1), n_blocks);
        place_on_group(matmul.weights + first * bytes, (last - first) * bytes, group);
    }
}

void run(const Kernels& kernels, const Matmul& matmul, size_t M, const int32_t* adapters, FloatData src, FloatData residual,
         FloatData dst) {
    if (M == 0) return;
    // Other threads use these buffers of this thread through pointers and references: in a lambda, the name of a thread_local
    // object refers to the object of the thread that runs the lambda.
    thread_local Buffer<uint8_t> src_buffer;
    thread_local AdapterProducts adapter_products_of_thread;
    auto& adapter_products = adapter_products_of_thread;
    const auto& division = kernels.division;
    PackedSrc packed{};
    packed.M = M;
    packed.m_tile = division.rows_per_tile(M);
    const size_t tiles = num_tiles(packed), n_blocks = num_n_blocks(matmul), padded = tiles * packed.m_tile;
    packed.data = src_buffer.at_least(kernels.src_bytes(matmul, padded));
    adapter_products.plan(matmul, M, padded, adapters);
    packed.lora = adapter_products.rows();
    const bool is_small = M * matmul.K + adapter_products.products() / PRODUCTS_PER_ELEMENT < PARALLEL_ELEMENTS;
    const size_t owners = num_owners(M, division.rows_per_owner);
    const auto begin_of = [&](size_t owner) { return owner * tiles / owners; };
    // The items of the adapters' products follow those of the tile parts, and have a separate owner.
    const size_t tile_parts = div_up(packed.m_tile, division.packed_rows), parts_of_tiles = tiles * tile_parts;
    const size_t items = parts_of_tiles + adapter_products.items();
    parallel_for_owned(
        owners + 1, [&](size_t owner) { return owner <= owners ? begin_of(owner) * tile_parts : items; }, 1,
        is_small ? Threading::serial : Threading::parallel,
        [&](size_t item) {
            if (item < parts_of_tiles) kernels.pack_src(matmul, src, item / tile_parts, item % tile_parts, packed);
            else adapter_products.compute(kernels, matmul, src, item - parts_of_tiles);
        });

    // Each term of the source counts as a separate element.
    const size_t tile_elements = packed.m_tile * matmul.K * matmul.terms, owner_tiles = div_up(tiles, owners);
    const size_t part_tiles =
        std::min(std::max(division.cached_elements / tile_elements, division.cached_tiles_min), owner_tiles);
    const Product product{kernels, matmul, packed, residual, dst};
    if (num_thread_groups() > 1) return multiply_in_groups(product, Groups::of_arena(), owners > 1, part_tiles);
    const size_t k_parts = M == 1 && num_threads() > 1 ? num_k_parts(kernels, matmul, num_threads()) : 1;
    if (k_parts > 1) return multiply_in_parts(product, k_parts);
    const size_t products = part_tiles * tile_elements * N_BLOCK;
    // The number of threads that divide the blocks of an owner among themselves.
    const size_t sharing = owners == 1 ? num_threads() : 1;
    const size_t part_blocks =
        std::max<size_t>(std::min(GRAIN_PRODUCTS / products, n_blocks / (PARTS_PER_THREAD_MIN * sharing)), 1);
    const size_t parts = div_up(n_blocks, part_blocks), owner_items = div_up(owner_tiles, part_tiles) * parts;
    parallel_for_owned(
        owners, [&](size_t owner) { return owner * owner_items; }, 1, Threading::parallel,
        [&](size_t item) {
            const size_t owner = item / owner_items, first = item % parts * part_blocks;
            const size_t end = begin_of(owner + 1), begin = begin_of(owner) + item % owner_items / parts * part_tiles;
            if (begin >= end) return;
            // Other threads probably compute the parts between this part and `next`.
            const size_t next = std::min(first + sharing * part_blocks, n_blocks - 1);
            const DstRange range{begin, std::min(end, begin + part_tiles), first, std::min(n_blocks, first + part_blocks),
                                 next};
            kernels.multiply(matmul, packed, range, residual, dst);
        });
}

}  // namespace ovfleet::projection
