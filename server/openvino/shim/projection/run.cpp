// Divides a projection among threads.
#include "run.hpp"

#include "../threads.hpp"
#include "adapters.hpp"

namespace ovfleet::projection {
namespace {

// The number of products that a thread computes at a time.
constexpr size_t GRAIN_PRODUCTS = 1 << 20;
// The count of numbers above which several threads pack the source faster than one thread; and the count of an adapter's
// products that take as long as packing one number.
constexpr size_t PARALLEL_NUMBERS = 1 << 14, PRODUCTS_PER_NUMBER = 2;
// The minimum number of parts of the weights for each thread, so that a late thread delays the others less.
constexpr size_t PARTS_PER_THREAD_MIN = 8;

}  // namespace

void run(const Kernels& kernels, const Matmul& matmul, size_t M, const int32_t* adapters, FloatData src, FloatData residual,
         FloatData dst) {
    if (M == 0) return;
    // These buffers belong to this thread, but other threads access them through the references.
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
    const bool is_small = M * matmul.K + adapter_products.products() / PRODUCTS_PER_NUMBER < PARALLEL_NUMBERS;
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

    // Each term of the source counts as a separate number.
    const size_t tile_numbers = packed.m_tile * matmul.K * matmul.terms, owner_tiles = div_up(tiles, owners);
    const size_t part_tiles =
        std::min(std::max(division.cached_numbers / tile_numbers, division.cached_tiles_min), owner_tiles);
    const size_t products = part_tiles * tile_numbers * N_BLOCK;
    // The number of threads among which the blocks of an owner are divided.
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
            // Other threads compute the parts in between.
            const size_t next = std::min(first + sharing * part_blocks, n_blocks - 1);
            const DstRange range{begin, std::min(end, begin + part_tiles), first, std::min(n_blocks, first + part_blocks),
                                 next};
            kernels.multiply(matmul, packed, range, residual, dst);
        });
}

}  // namespace ovfleet::projection
