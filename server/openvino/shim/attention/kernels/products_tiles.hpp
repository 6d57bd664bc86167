// Computes the products of attention in bf16, either in the tile registers of AMX or in vectors, with bit-identical results.
// Only for kernels.cpp.
//
// A multiplication of two tile registers adds to each sum the products of 32 numbers of a row and 32 numbers of a column. For
// scores, the indices of these numbers are the dimensions of a group; for weighted values, they are the tokens of a block. The
// products with even indices are added one after another, each with one rounding. Those with odd indices are added in the same
// way to a second sum. Then the two sums are added, and the result is added to the previous sum. The functions for vectors add
// in the same order. Therefore tile registers and vectors yield the same result for a query, so the choice between them may
// depend on the number of queries that are computed together.
#pragma once

#include "products_f32.hpp"

#if defined(OVFLEET_TILES)

#include "../../tiles.hpp"

namespace {

// The number of columns of a tile register of sums, and the number of bf16 elements of each row and each column in a
// multiplication of two registers.
constexpr size_t TILE_COLUMNS = TILE_ROW_BYTES / sizeof(float), TILE_DEPTH = TILE_ROW_BYTES / sizeof(bf16);
static_assert(KEY_GROUP == TILE_DEPTH && BLOCK_TOKENS == TILE_DEPTH && TILE_COLUMNS % LANES == 0);
// The number of pairs of bf16 in a tile register of rows or columns.
constexpr size_t REGISTER_PAIRS = TILE_ROWS * TILE_COLUMNS;

#if defined(__x86_64__)

// The tile instructions treat subnormal numbers as zeros and round to nearest. While an object of this class exists, the vector
// instructions of this thread do the same.
class TileRounding {
public:
    TileRounding() {
        // Round to nearest, raise no exceptions, and treat subnormal results and operands as zeros.
        constexpr uint32_t masked_exceptions = 0x1f80, flush_to_zero = 0x8000, subnormals_are_zeros = 0x40;
        const uint32_t mode = masked_exceptions | flush_to_zero | subnormals_are_zeros;
        // The memory operands prevent the compiler from moving memory accesses across these instructions.
        asm volatile("stmxcsr %0" : "=m"(before_));
        asm volatile("ldmxcsr %0" : : "m"(mode) : "memory");
    }
    ~TileRounding() { asm volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }
    TileRounding(const TileRounding&) = delete;
    TileRounding& operator=(const TileRounding&) = delete;

private:
    uint32_t before_;
};

#else

// Other processors only run the model of the tiles, in tests that do not cover subnormal numbers.
struct TileRounding {
    TileRounding() {}
};

#endif

// ---- In tile registers ----

// Packed rows, which consist of `count` tiles of 16 rows. A tile contains the data of `capacity` tile registers, one for each
// step. The products of all steps are added to the same sums.
struct PackedRows {
    const uint32_t* data;
    size_t count, capacity;
    const uint32_t* at(size_t tile, size_t step) const { return data + (tile * capacity + step) * REGISTER_PAIRS; }
};

// The columns of each step, in the format `[pair][column]`, which is also the format of keys and values in a bf16 cache.
struct Columns {
    const uint32_t* steps[CHUNK_BLOCKS > HEAD_SIZE_MAX / KEY_GROUP ? CHUNK_BLOCKS : HEAD_SIZE_MAX / KEY_GROUP];
    // The number of columns, which is a multiple of `TILE_COLUMNS`.
    size_t count;
    const uint32_t* at(size_t tile, size_t step) const { return steps[step] + tile * TILE_COLUMNS; }
    size_t stride_bytes() const { return count * sizeof(uint32_t); }
};

enum class InitialSums { zero, stored };

// A multiplication of rows by columns: `steps` products of tile registers are added to each register of sums. The rows of
// `sums` are `stride` floats apart.
struct TileProduct {
    PackedRows rows;
    const Columns& columns;
    size_t steps;
    InitialSums initial;
    float* sums;
    size_t stride;
};

inline TileConfig attention_config() {
    TileConfig config;
    for (size_t tile = 0; tile < TILE_COUNT; ++tile) config.set(tile, TILE_ROWS, TILE_ROW_BYTES);
    return config;
}

// Computes `R` x `C` registers of sums, starting at a tile of rows and a tile of columns.
template <size_t R, size_t C>
inline void multiply_registers(TileRegisters& registers, const TileProduct& product, size_t row, size_t column) {
    auto& tiles = registers.tiles;
    const size_t bytes = product.stride * sizeof(float);
    float* first = product.sums + row * TILE_ROWS * product.stride + column * TILE_COLUMNS;
    float* second = first + TILE_ROWS * product.stride;
    if (product.initial == InitialSums::zero) {
        tiles.zero<SUMS_00>();
        if constexpr (C == 2) tiles.zero<SUMS_01>();
        if constexpr (R == 2) tiles.zero<SUMS_10>();
        if constexpr (R == 2 && C == 2) tiles.zero<SUMS_11>();
    } else {
        tiles.load<SUMS_00>(first, bytes);
        if constexpr (C == 2) tiles.load<SUMS_01>(first + TILE_COLUMNS, bytes);
        if constexpr (R == 2) tiles.load<SUMS_10>(second, bytes);
        if constexpr (R == 2 && C == 2) tiles.load<SUMS_11>(second + TILE_COLUMNS, bytes);
    }
    for (size_t step = 0; step < product.steps; ++step) {
        tiles.load<ROWS_0>(product.rows.at(row, step), TILE_ROW_BYTES);
        tiles.load<COLUMNS_0>(product.columns.at(column, step), product.columns.stride_bytes());
        if constexpr (C == 2) tiles.load<COLUMNS_1>(product.columns.at(column + 1, step), product.columns.stride_bytes());
        if constexpr (R == 2) tiles.load<ROWS_1>(product.rows.at(row + 1, step), TILE_ROW_BYTES);
        tiles.multiply<SUMS_00, ROWS_0, COLUMNS_0>();
        if constexpr (C == 2) tiles.multiply<SUMS_01, ROWS_0, COLUMNS_1>();
        if constexpr (R == 2) tiles.multiply<SUMS_10, ROWS_1, COLUMNS_0>();
        if constexpr (R == 2 && C == 2) tiles.multiply<SUMS_11, ROWS_1, COLUMNS_1>();
    }
    tiles.store<SUMS_00>(first, bytes);
    if constexpr (C == 2) tiles.store<SUMS_01>(first + TILE_COLUMNS, bytes);
    if constexpr (R == 2) tiles.store<SUMS_10>(second, bytes);
    if constexpr (R == 2 && C == 2) tiles.store<SUMS_11>(second + TILE_COLUMNS, bytes);
}

inline void multiply(TileRegisters& registers, const TileProduct& product) {
    const size_t rows = product.rows.count, columns = product.columns.count / TILE_COLUMNS;
    for (size_t column = 0; column < columns; column += 2)
        for (size_t row = 0; row < rows; row += 2) {
            auto* two_columns = row + 1 < rows ? multiply_registers<2, 2> : multiply_registers<1, 2>;
            auto* one_column = row + 1 < rows ? multiply_registers<2, 1> : multiply_registers<1, 1>;
            (column + 1 < columns ? two_columns : one_column)(registers, product, row, column);
        }
}

// Rounds a number of rows up to whole tile registers.
inline size_t whole_tiles(size_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

// Returns the address of the 16 pairs of bf16 that a row has in a step. Each tile has memory for `capacity` steps.
inline uint32_t* packed_row(uint32_t* tiles, size_t capacity, size_t row, size_t step) {
    return tiles + ((row / TILE_ROWS * capacity + step) * TILE_ROWS + row % TILE_ROWS) * TILE_COLUMNS;
}

// Stores numbers as bf16. The numbers must be exactly representable in bf16.
inline void store_high_halves(uint32_t* to, const Floats (&numbers)[BLOCK_VECTORS]) {
#if defined(__AVX512F__)
    static_assert(BLOCK_VECTORS == 2);
    const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                          21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)numbers[0], high, (__m512i)numbers[1]));
#else
    for (size_t v = 0; v < BLOCK_VECTORS; ++v) {
        const auto halves = __builtin_convertvector((Words)numbers[v] >> 16, Halves);
        std::memcpy((bf16*)to + v * LANES, &halves, sizeof(halves));
    }
#endif
}

// Packs queries that have been rounded to bf16, followed by padding rows of zeros.
inline void pack_queries(const Layer& layer, const float* queries, size_t count, uint32_t* to) {
    const size_t groups = layer.key_size / KEY_GROUP;
    for (size_t row = 0; row < whole_tiles(count); ++row)
        for (size_t group = 0; group < groups; ++group) {
            bf16 numbers[KEY_GROUP] = {};
            for (size_t i = 0; row < count && i < KEY_GROUP; ++i)
                numbers[i].bits = uint16_t(as_bits(queries[row * layer.key_size + group * KEY_GROUP + i]) >> 16);
            std::memcpy(packed_row(to, groups, row, group), numbers, sizeof(numbers));
        }
}

// Converts the keys of a block to the format of a bf16 cache.
template <typename T>
inline void pack_keys(const Layer& layer, const uint8_t* block, uint32_t* to, Prefetch prefetch) {
    for (size_t group = 0; group < layer.key_size / KEY_GROUP; ++group) {
        const KeyGroup<T> keys(layer, block, group);
        for (size_t i = 0; i < KEY_GROUP; i += 2, to += BLOCK_TOKENS) {
            prefetch.next();
            prefetch.next();
            for (size_t v = 0; v < BLOCK_VECTORS; ++v) {
                const Words pairs = bf16_pairs(keys.key(i, v), keys.key(i + 1, v));
                std::memcpy(to + v * LANES, &pairs, sizeof(pairs));
            }
        }
    }
}

// Converts the values of a block to the format of a bf16 cache.
template <typename T>
inline void pack_values(const Layer& layer, const uint8_t* block, uint32_t* to, Prefetch prefetch) {
    for (size_t token = 0; token < BLOCK_TOKENS; token += 2, to += layer.value_size) {
        prefetch.next();
        prefetch.next();
        const TokenValue<T> first(layer, block, token), second(layer, block, token + 1);
        for (size_t i = 0; i < layer.value_size; i += LANES) {
            const Words pairs = bf16_pairs(first.value(i), second.value(i));
            std::memcpy(to + i, &pairs, sizeof(pairs));
        }
    }
}

// ---- In vectors ----

// Each result is computed from two sums: one of the products with even indices, and one of those with odd indices. Returns 2 if
// one loop computes both sums, and 1 if each sum has its own loop. Computing both sums in one loop hides the latency of the
// additions, but with more than 3 queries, the sums do not fit into the registers.
constexpr size_t chains_at_once(size_t queries) { return queries <= 3 ? 2 : 1; }

// Computes the scores of `R` queries with the keys of a block.
template <typename T, size_t R>
inline void score_rows(const Layer& layer, const uint8_t* block, const float* queries, float* scores, Prefetch& prefetch) {
    constexpr size_t V = BLOCK_VECTORS, CHAINS = chains_at_once(R);
    const size_t size = layer.key_size;
    Floats total[R][V] = {};
    for (size_t group = 0; group < size / KEY_GROUP; ++group) {
        const KeyGroup<T> keys(layer, block, group);
        Floats sums[2][R][V];
        for (size_t first = 0; first < 2; first += CHAINS) {
            Floats chains[CHAINS][R][V] = {};
            for (size_t i = first; i < KEY_GROUP; i += 2)
                for (size_t c = 0; c < CHAINS; ++c) {
                    prefetch.next();
                    Floats key[V];
                    for (size_t v = 0; v < V; ++v) key[v] = rounded_to_bf16(keys.key(i + c, v));
                    for (size_t r = 0; r < R; ++r) {
                        const Floats query = broadcast(queries[r * size + group * KEY_GROUP + i + c]);
                        for (size_t v = 0; v < V; ++v) chains[c][r][v] = fused_multiply_add(key[v], query, chains[c][r][v]);
                    }
                }
            std::memcpy(&sums[first], &chains, sizeof(chains));
        }
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < V; ++v) total[r][v] += sums[0][r][v] + sums[1][r][v];
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) ::store(scores + r * CHUNK_KEYS + v * LANES, total[r][v]);
}

template <typename T, size_t R = SCORE_QUERIES>
inline void score_in_tile_order(const Layer& layer, const uint8_t* block, const float* queries, float* scores, size_t count,
                                Prefetch prefetch) {
    for (; count >= R; count -= R) {
        score_rows<T, R>(layer, block, queries, scores, prefetch);
        queries += R * layer.key_size;
        scores += R * CHUNK_KEYS;
    }
    if constexpr (R > 1)
        if (count) score_in_tile_order<T, R - 1>(layer, block, queries, scores, count, prefetch);
}

// Adds the weighted values of a block to the sums of `R` queries, for the elements in `V` vectors, starting at element `begin`.
template <typename T, size_t R, size_t V>
inline void accumulate_rows(const Layer& layer, const uint8_t* block, size_t begin, const float* weights, float* sums,
                            Prefetch& prefetch) {
    const size_t size = layer.value_size;
    constexpr size_t CHAINS = chains_at_once(R);
    Floats totals[2][R][V];
    for (size_t first = 0; first < 2; first += CHAINS) {
        Floats chains[CHAINS][R][V] = {};
        for (size_t token = first; token < BLOCK_TOKENS; token += 2)
            for (size_t c = 0; c < CHAINS; ++c) {
                prefetch.next();
                const TokenValue<T> of_token(layer, block, token + c);
                Floats value[V];
                for (size_t v = 0; v < V; ++v) value[v] = rounded_to_bf16(of_token.value(begin + v * LANES));
                for (size_t r = 0; r < R; ++r) {
                    const Floats weight = broadcast(weights[r * CHUNK_KEYS + token + c]);
                    for (size_t v = 0; v < V; ++v) chains[c][r][v] = fused_multiply_add(value[v], weight, chains[c][r][v]);
                }
            }
        std::memcpy(&totals[first], &chains, sizeof(chains));
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) {
            float* to = sums + r * size + begin + v * LANES;
            ::store(to, load(to) + (totals[0][r][v] + totals[1][r][v]));
        }
}

template <typename T, size_t R = VALUE_QUERIES>
inline void accumulate_in_tile_order(const Layer& layer, const uint8_t* block, const float* weights, float* sums, size_t count,
                                     Prefetch prefetch) {
    constexpr size_t V = VALUE_VECTORS;
    const size_t size = layer.value_size;
    for (; count >= R; count -= R) {
        size_t at = 0;
        for (; at + V * LANES <= size; at += V * LANES) accumulate_rows<T, R, V>(layer, block, at, weights, sums, prefetch);
        for (; at < size; at += LANES) accumulate_rows<T, R, 1>(layer, block, at, weights, sums, prefetch);
        weights += R * CHUNK_KEYS;
        sums += R * size;
    }
    if constexpr (R > 1)
        if (count) accumulate_in_tile_order<T, R - 1>(layer, block, weights, sums, count, prefetch);
}

}  // namespace

#endif
