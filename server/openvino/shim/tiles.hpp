// The eight tile registers of AMX, as one interface with two implementations: `HardwareTiles` executes the instructions of the
// processor, and `ModelTiles` computes the same bits in plain C++ on any processor. Only kernels include this header, because
// its functions are compiled once for each instruction set.
//
// A tile has up to 16 rows of up to 64 bytes. Multiplying two tiles, A and B, adds the dot product of row `m` of A and column
// `n` of B to the f32 sum in row `m` and column `n` of a third tile. A row of A has up to 32 bf16 numbers. B has one row for
// each pair of them: row `k` of B contains the elements 2 * k and 2 * k + 1 of each column, next to each other.
//
//     TileConfig config;
//     config.set(0, 16, 64);      // and the other tiles
//     Tiles tiles(config);        // configures the registers of this thread, and releases them at the end of the scope
//     tiles.zero<0>();
//     tiles.load<1>(a, stride), tiles.load<2>(b, 64);
//     tiles.multiply<0, 1, 2>();
//     tiles.store<0>(sums, 64);
//
// Each file of kernels that uses tiles is compiled separately for each implementation. `OVFLEET_TILES` is defined as the name
// of the implementation, which the kernels use through `TileRegisters`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t TILE_COUNT = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64;

// The operand of LDTILECFG. It is loaded in each call of a kernel, because other libraries use other configurations on the same
// threads. Products of fewer than 16 rows take less time if the tiles are configured with fewer rows.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    inline void set(size_t tile, size_t tile_rows, size_t bytes) {
        rows[tile] = uint8_t(tile_rows);
        row_bytes[tile] = uint16_t(bytes);
    }
};

static_assert(sizeof(TileConfig) == 64);

#if defined(__x86_64__)

// The AMX instructions. They fault unless `has_isa(Isa::amx)`, which also requests permission from the operating system, has
// returned true. The class uses inline assembly, because the intrinsics of GCC 12 have no memory clobber: the compiler may move
// a store after the load of a tile from the same memory. At least one tile should be stored every half microsecond: a store
// that follows a longer pause takes 300 ns.
class HardwareTiles {
public:
    explicit inline HardwareTiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
    // Without this release, each context switch would save the tiles as part of the thread's state.
    inline ~HardwareTiles() { asm volatile("tilerelease" : :); }
    HardwareTiles(const HardwareTiles&) = delete;
    HardwareTiles& operator=(const HardwareTiles&) = delete;

    template <int TILE>
    inline void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
    }
    // `stride` is the number of bytes from a row to the next one in memory.
    template <int TILE>
    inline void load(const void* from, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    // Adds A * B to the sums.
    template <int SUMS, int A, int B>
    inline void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
    }
    template <int TILE>
    inline void store(void* to, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
    }
};

#endif

// A model of the instructions in plain C++, for tests. It traps where the processor faults: on invalid configurations, on tiles
// that are not configured, and on shapes that do not match.
class ModelTiles {
public:
    explicit inline ModelTiles(const TileConfig& config) : config_(config) {
        check(config.palette == 1 && config.start_row == 0);
        for (size_t tile = 0; tile < 16; ++tile) {
            const size_t rows = config.rows[tile], bytes = config.row_bytes[tile];
            check((rows == 0) == (bytes == 0) && rows <= TILE_ROWS && bytes <= TILE_ROW_BYTES);
            check(rows == 0 || tile < TILE_COUNT);
        }
    }
    ModelTiles(const ModelTiles&) = delete;
    ModelTiles& operator=(const ModelTiles&) = delete;

    template <int TILE>
    inline void zero() {
        check(config_.rows[TILE] > 0);
        std::memset(bytes_[TILE], 0, sizeof(bytes_[TILE]));
    }
    template <int TILE>
    inline void load(const void* from, size_t stride) {
        zero<TILE>();
        for (size_t row = 0; row < config_.rows[TILE]; ++row)
            std::memcpy(bytes_[TILE][row], (const uint8_t*)from + row * stride, config_.row_bytes[TILE]);
    }
    template <int SUMS, int A, int B>
    inline void multiply() {
        static_assert(SUMS != A && SUMS != B && A != B, "the tiles of a product must differ");
        const size_t rows = config_.rows[SUMS], columns = config_.row_bytes[SUMS] / 4, pairs = config_.row_bytes[A] / 4;
        check(rows > 0 && config_.rows[A] == rows && config_.rows[B] == pairs);
        check(config_.row_bytes[B] == columns * 4 && config_.row_bytes[SUMS] % 4 == 0 && config_.row_bytes[A] % 4 == 0);
        Number b[TILE_ROWS][2][TILE_ROWS] = {};
        for (size_t pair = 0; pair < pairs; ++pair)
            for (size_t i = 0; i < 2; ++i)
                for (size_t column = 0; column < columns; ++column)
                    b[pair][i][column] = number(bytes_[B][pair] + column * 4 + i * 2);
        for (size_t row = 0; row < rows; ++row) {
            float even[TILE_ROWS] = {}, odd[TILE_ROWS] = {}, sums[TILE_ROWS];
            for (size_t pair = 0; pair < pairs; ++pair) {
                add_products(even, number(bytes_[A][row] + pair * 4), b[pair][0]);
                add_products(odd, number(bytes_[A][row] + pair * 4 + 2), b[pair][1]);
            }
            std::memcpy(sums, bytes_[SUMS][row], sizeof(sums));
            for (size_t column = 0; column < columns; ++column)
                sums[column] = normal(normal(sums[column]) + normal(even[column] + odd[column]));
            std::memset(bytes_[SUMS][row], 0, sizeof(bytes_[SUMS][row]));
            std::memcpy(bytes_[SUMS][row], sums, columns * 4);
        }
        if (rows < TILE_ROWS) std::memset(bytes_[SUMS][rows], 0, (TILE_ROWS - rows) * TILE_ROW_BYTES);
    }
    template <int TILE>
    inline void store(void* to, size_t stride) {
        check(config_.rows[TILE] > 0);
        for (size_t row = 0; row < config_.rows[TILE]; ++row)
            std::memcpy((uint8_t*)to + row * stride, bytes_[TILE][row], config_.row_bytes[TILE]);
    }

private:
    static inline void check(bool holds) {
        if (!holds) __builtin_trap();
    }
    // Treats subnormal numbers as zeros.
    static inline float normal(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        return bits & 0x7f800000 ? value : 0.0f;  // without a comparison of floats, the compiler can use vector instructions
    }
    // The type in which products are computed. The product of two bf16 numbers is exact in f64, and the fused
    // operation in f32 does not round it.
#if defined(__FMA__)
    using Number = float;
#else
    using Number = double;
#endif
    static inline Number number(const uint8_t* bf16) {
        uint16_t half;
        std::memcpy(&half, bf16, sizeof(half));
        const uint32_t bits = uint32_t(half) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        return Number(normal(value));
    }
    // Multiplication and addition are fused. Without an instruction for this, the sum of the product and an f32 number is
    // computed in f64. A sum that f64 cannot represent exactly is never near the midpoint between two f32 numbers, so rounding
    // the f64 sum to f32 produces the same bits as a single rounding.
    static inline void add_products(float (&sums)[TILE_ROWS], Number a, const Number (&b)[TILE_ROWS]) {
        for (size_t column = 0; column < TILE_ROWS; ++column)
#if defined(__FMA__)
            sums[column] = normal(__builtin_fmaf(a, b[column], sums[column]));
#else
            sums[column] = normal(float(a * b[column] + double(sums[column])));
#endif
    }

    TileConfig config_;
    uint8_t bytes_[TILE_COUNT][TILE_ROWS][TILE_ROW_BYTES] = {};
};

#if defined(OVFLEET_TILES)

// The tile registers of a product of 2 x 2 tiles: those of the sums, of the rows and of the columns.
constexpr int SUMS_00 = 0, SUMS_01 = 1, SUMS_10 = 2, SUMS_11 = 3, ROWS_0 = 4, ROWS_1 = 5, COLUMNS_0 = 6, COLUMNS_1 = 7;

// The tile registers, and a buffer for dummy stores. These stores prevent long pauses between stores: a store takes 300 ns if
// the previous one was more than half a microsecond earlier.
struct TileRegisters {
    explicit inline TileRegisters(const TileConfig& config) : tiles(config) {}
    inline void keep_storing() { tiles.store<SUMS_00>(unused, TILE_ROW_BYTES); }

    OVFLEET_TILES tiles;
    alignas(64) uint8_t unused[TILE_ROWS * TILE_ROW_BYTES];
};

#endif

}  // namespace
