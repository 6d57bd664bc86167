// Divides a projection among threads.
#include "run.hpp"

#include "../threads.hpp"
#include "adapters.hpp"

namespace ovfleet::projection {
namespace {

// Bytes of quantized rows that stay in the cache of a processor while blocks of weights pass by.
constexpr size_t CACHED_SRC_BYTES = 256 << 10;
// Products that a thread computes at a time.
constexpr size_t GRAIN_PRODUCTS = 1 << 20;
// Numbers from which on a second thread helps to quantize the source. Quantizing a number takes as long as this many products
// of an adapter.
constexpr size_t PARALLEL_NUMBERS = 1 << 14, PRODUCTS_PER_NUMBER = 2;
// The smallest number of parts of the weights for each thread, so that a late thread delays the others less.
constexpr size_t PARTS_PER_THREAD_MIN = 8;

// The number of rows of a tile that minimizes the cost: reading a block of weights costs as much as a row, and so does a row of
// padding.
size_t rows_per_tile(size_t M) {
    size_t best = std::min(M, M_TILE_MAX);
    const auto cost = [&](size_t rows) { return div_up(M, rows) * (rows + 1); };
    for (size_t rows = best - 1; rows > 0; --rows)
        if (cost(rows) < cost(best)) best = rows;
    return best;
}

}  // namespace

void run(const Kernels& kernels, const Matmul& matmul, size_t M, const int32_t* adapters, FloatData src, FloatData residual,
         FloatData dst) {
    if (M == 0) return;
    // These belong to this thread, but other threads read them through the references.
    thread_local Buffer<int8_t> quants;
    thread_local Buffer<float> scales, sums;
    thread_local AdapterProducts adapter_products_of_thread;
    auto& adapter_products = adapter_products_of_thread;
    QuantizedSrc quantized{};
    quantized.M = M;
    quantized.m_tile = rows_per_tile(M);
    const size_t tiles = num_tiles(quantized), n_blocks = num_n_blocks(matmul), padded = tiles * quantized.m_tile;
    quantized.quants = quants.at_least(padded * matmul.K * matmul.terms);
    quantized.scales = scales.at_least(padded * (matmul.K / SRC_GROUP));
    quantized.sums = sums.at_least(padded * num_groups(matmul));
    adapter_products.plan(matmul, M, padded, adapters);
    quantized.lora = adapter_products.rows();
    const bool is_small = M * matmul.K + adapter_products.products() / PRODUCTS_PER_NUMBER < PARALLEL_NUMBERS;
    const size_t owners = num_owners(M);
    const auto begin_of = [&](size_t owner) { return owner * tiles / owners; };
    // The products of adapters come behind the tiles, as those of one more owner.
    const size_t items = tiles + adapter_products.items();
    parallel_for_owned(
        owners + 1, [&](size_t owner) { return owner <= owners ? begin_of(owner) : items; }, 1,
        is_small ? Threading::serial : Threading::parallel,
        [&](size_t item) {
            if (item < tiles) kernels.quantize(matmul, src, item, quantized);
            else adapter_products.compute(kernels, matmul, src, item - tiles);
        });

    const size_t tile_bytes = quantized.m_tile * matmul.K * matmul.terms, owner_tiles = div_up(tiles, owners);
    const size_t part_tiles = std::min(std::max<size_t>(CACHED_SRC_BYTES / tile_bytes, 4), owner_tiles);
    const size_t products = part_tiles * tile_bytes * N_BLOCK;
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
            kernels.multiply(matmul, quantized, range, residual, dst);
        });
}

}  // namespace ovfleet::projection
