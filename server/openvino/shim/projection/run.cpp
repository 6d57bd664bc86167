// How a projection is divided among threads.
#include "run.hpp"

#include "../threads.hpp"
#include "adapters.hpp"

namespace ovfleet::projection {
namespace {

// Bytes of rounded rows that stay in a processor's own cache while panels pass by.
constexpr size_t ROWS_BYTES = 256 << 10;
// Products that a thread takes at a time, and numbers that it rounds. A number that is rounded takes as long as so many products
// of an adapter.
constexpr size_t PRODUCTS_AT_ONCE = 1 << 20, NUMBERS_AT_ONCE = 1 << 13, PRODUCTS_OF_NUMBER = 2;
// Parts of a matrix for each thread at least, so that one that is late holds up the others for no longer.
constexpr size_t PARTS_AT_LEAST = 8;

// Rows of a tile: what it costs to read a panel, as much as a row does, and rows that are not there.
size_t rows_per_tile(size_t count) {
    size_t best = std::min(count, TILE_ROWS);
    const auto cost = [&](size_t rows) { return ceiling(count, rows) * (rows + 1); };
    for (size_t rows = best - 1; rows > 0; --rows)
        if (cost(rows) < cost(best)) best = rows;
    return best;
}

}  // namespace

void run(const Kernels& kernels, const Matrix& matrix, size_t count, const int32_t* adapters, Numbers from, Numbers base,
         Numbers to) {
    if (count == 0) return;
    // Of this thread, also where others read them.
    thread_local Buffer<int8_t> quants;
    thread_local Buffer<float> scales, sums;
    thread_local Lowering lowering_of_thread;
    auto& lowering = lowering_of_thread;
    Rows rows{};
    rows.count = count;
    rows.per_tile = rows_per_tile(count);
    const size_t all_tiles = tiles(rows), all_panels = panels(matrix), padded = all_tiles * rows.per_tile;
    rows.quants = quants.at_least(padded * matrix.inputs);
    rows.scales = scales.at_least(padded * (matrix.inputs / ROUNDED));
    rows.sums = sums.at_least(padded * groups(matrix));
    lowering.plan(matrix, count, padded, adapters);
    rows.lowered = lowering.rows();
    const bool alone = count * matrix.inputs + lowering.products() / PRODUCTS_OF_NUMBER < 2 * NUMBERS_AT_ONCE;
    const size_t owners = ovfleet::owners(count);
    const auto begin_of = [&](size_t owner) { return owner * all_tiles / owners; };
    // What adapters need is nobody's, or one owner's more.
    const size_t items = all_tiles + lowering.items();
    share_owned(owners + 1, [&](size_t owner) { return owner <= owners ? begin_of(owner) : items; }, 1, alone, [&](size_t item) {
        if (item < all_tiles) kernels.round(matrix, from, item, rows);
        else lowering.compute(kernels, matrix, from, item - all_tiles);
    });

    const size_t tile_numbers = rows.per_tile * matrix.inputs, own_tiles = ceiling(all_tiles, owners);
    const size_t tiles_at_once = std::min(std::max<size_t>(ROWS_BYTES / tile_numbers, 4), own_tiles);
    const size_t products = tiles_at_once * tile_numbers * PANEL;
    // Threads among which the panels of an owner are divided.
    const size_t takers = owners == 1 ? threads() : 1;
    const size_t panels_at_once =
        std::max<size_t>(std::min(PRODUCTS_AT_ONCE / products, all_panels / (PARTS_AT_LEAST * takers)), 1);
    const size_t parts = ceiling(all_panels, panels_at_once), own_items = ceiling(own_tiles, tiles_at_once) * parts;
    share_owned(owners, [&](size_t owner) { return owner * own_items; }, 1, false, [&](size_t item) {
        const size_t owner = item / own_items, first = item % parts * panels_at_once;
        const size_t end = begin_of(owner + 1), begin = begin_of(owner) + item % own_items / parts * tiles_at_once;
        if (begin >= end) return;
        // The parts in between are other threads'.
        const size_t after = std::min(first + takers * panels_at_once, all_panels - 1);
        kernels.multiply(matrix, rows, begin, std::min(end, begin + tiles_at_once), first,
                         std::min(all_panels, first + panels_at_once), after, base, to);
    });
}

}  // namespace ovfleet::projection
