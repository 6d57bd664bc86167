// The kernels of the projections, compiled once for each instruction set, by the name of which `OVFLEET_KERNELS` is.
//
// Products of integers are summed exactly within a group, and then scaled in f32: what a row gives depends on nothing but the
// row, not on how many there are beside it. Rows are rounded as in llama.cpp's Q8_0: 32 numbers by their largest.
//
// Nothing of the standard library is used but memcpy and memset: whatever is inlined here may not be taken for what others call.
#include "../vectors.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// Bytes of four inputs of 16 outputs.
constexpr size_t FOUR_BYTES = 64;
// Pairs of vectors of outputs that a panel has: one of its first 16 outputs, one of the others.
constexpr size_t PAIRS = PANEL / 2 / LANES;

typedef uint8_t Fours __attribute__((vector_size(LANES * 4)));

// A panel that is read next, fetched a few lines with each group of this one: no processor guesses it in time.
struct Ahead {
    const uint8_t *at, *end;
    size_t lines;
    inline void fetch() {
        for (size_t line = 0; line < lines && at < end; ++line, at += 64) __builtin_prefetch(at);
    }
};

// The sums of each lane's four weights of `BITS` bits, not negative, times four numbers of a row, over a group.
template <size_t BITS>
struct Sum {
    Ints ints{};
    inline void add(Fours weights, int32_t four) {
#if defined(__AVX512VNNI__)
        ints = (Ints)_mm512_dpbusd_epi32((__m512i)ints, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
        ints = (Ints)_mm256_dpbusd_avx_epi32((__m256i)ints, (__m256i)weights, _mm256_set1_epi32(four));
#elif defined(__AVX2__)
        // Sums of two products fit into 16 bits if the larger range is made signed: 128 times the row is added by itself.
        const __m256i row = _mm256_set1_epi32(four), half = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
        const __m256i moved = _mm256_xor_si256((__m256i)weights, half);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(moved), _mm256_sign_epi8(row, moved));
        const __m256i products = _mm256_madd_epi16(pairs, ones);
        ints += (Ints)products + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(half, row), ones);
#else
        for (size_t i = 0; i < 4; ++i)
            for (size_t lane = 0; lane < LANES; ++lane) ints[lane] += weights[lane * 4 + i] * int8_t(four >> (8 * i));
#endif
    }
    inline Ints total() const { return ints; }
};

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
// Sums of sixteen products of 4 bits fit into 16 bits.
template <>
struct Sum<4> {
    __m256i pairs = _mm256_setzero_si256();
    inline void add(Fours weights, int32_t four) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four)));
    }
    inline Ints total() const { return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};
#endif

inline Floats as_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Sums of the `R` rows of a tile by a pair of vectors of a panel.
template <size_t R, size_t BITS, size_t GROUP>
inline void multiply_tile(const Matrix& matrix, const uint8_t* panel, size_t pair, const int8_t* quants,
                          const float* scales, const float* sums, Ahead& ahead, Floats (&total)[R][2]) {
    constexpr size_t per_load = BITS == 4 ? 2 : 1, loads = GROUP / 4 / per_load;
    constexpr size_t bytes = PANEL * 2 * sizeof(f16) + PANEL * GROUP * BITS / 8;
    for (size_t r = 0; r < R; ++r) total[r][0] = total[r][1] = Floats{};
    for (size_t group = 0; group < groups(matrix); ++group, panel += bytes, sums += R) {
        const auto* halves = (const f16*)panel + pair * LANES;
        const uint8_t* weights = panel + PANEL * 2 * sizeof(f16) + pair * LANES * 4;
        ahead.fetch();
        Sum<BITS> sum[R][2];
        for (size_t at = 0; at < loads; ++at) {
            Fours fours[2];
            for (size_t v = 0; v < 2; ++v) fours[v] = read<Fours>(weights + (2 * at + v) * FOUR_BYTES);
            const int8_t* of_rows = quants + at * per_load * 4;
            if (BITS == 8) {
                for (size_t r = 0; r < R; ++r)
                    for (size_t v = 0; v < 2; ++v) sum[r][v].add(fours[v], read<int32_t>(of_rows + r * ROUNDED));
            } else {
                Fours low[2], high[2];
                for (size_t v = 0; v < 2; ++v) {
                    low[v] = fours[v] & 15;
                    high[v] = (Fours)((Words)fours[v] >> 4) & 15;
                }
                for (size_t r = 0; r < R; ++r) {
                    const int8_t* of_row = of_rows + r * ROUNDED;
                    for (size_t v = 0; v < 2; ++v) sum[r][v].add(low[v], read<int32_t>(of_row));
                    for (size_t v = 0; v < 2; ++v) sum[r][v].add(high[v], read<int32_t>(of_row + 4));
                }
            }
        }
        const Floats scale[2] = {load(halves), load(halves + PANEL / 2)};
        const Floats zero[2] = {load(halves + PANEL), load(halves + PANEL + PANEL / 2)};
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < 2; ++v)
                total[r][v] += (as_floats(sum[r][v].total()) - zero[v] * sums[r]) * (scale[v] * scales[r]);
        // Two groups of 16 share what they are rounded by.
        const bool is_half = GROUP < ROUNDED && group % 2 == 0;
        quants += is_half ? GROUP : R * ROUNDED - (ROUNDED - GROUP);
        scales += is_half ? 0 : R;
    }
}

template <typename T>
inline Floats load_up_to(const T* from, size_t count) {
    if (count >= LANES) return load(from);
    T part[LANES] = {};
    for (size_t i = 0; i < count; ++i) part[i] = from[i];
    return load(part);
}

inline void store_up_to(float* to, Floats values, size_t count) {
    if (count >= LANES) return ::store(to, values);
    for (size_t i = 0; i < count; ++i) to[i] = values[i];
}

inline void store_up_to(bf16* to, Floats values, size_t count) {
#if defined(__AVX512F__)
    if (count >= LANES) {
        const Words bits = (Words)values, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const auto is_nan = values != values;
        const Words kept = is_nan ? (bits | 0x400000) >> 16 : rounded;
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)kept));
        return;
    }
#endif
    for (size_t i = 0; i < count && i < LANES; ++i) convert(values[i], to[i]);
}

// x * sigmoid(x).
inline Floats swish(Floats x) {
    const Floats e = exponential(x < 0 ? x : -x), one = Floats{} + 1.0f;
    return x * ((x < 0 ? e : one) / (one + e));
}

template <typename T>
inline void write(const Matrix& matrix, const Floats (&total)[2], size_t panel, size_t pair, size_t row, const T* base, T* to) {
    const size_t width = results(matrix), in_panel = matrix.then == Then::gated ? PANEL / 2 : PANEL;
    const size_t first = panel * in_panel + pair * LANES;
    const size_t left = first < width ? width - first : 0;
    to += row * width + first;
    if (matrix.then == Then::gated) return store_up_to(to, swish(total[0]) * total[1], left);
    const bool is_added = matrix.then == Then::added;
    if (is_added) base += row * width + first;
    for (size_t v = 0; v < 2; ++v) {
        const size_t skipped = v * (PANEL / 2), count = left > skipped ? left - skipped : 0;
        store_up_to(to + skipped, is_added ? total[v] + load_up_to(base + skipped, count) : total[v], count);
    }
}

// Adds to the sums of rows what their adapter makes of them: in the order of its ranks, so that it is the same for a row whatever
// is beside it.
template <size_t R>
inline void add_up(const Matrix& matrix, size_t panel, size_t pair, const Lowered* of, Floats (*total)[2]) {
    const auto* halves = behind_adapters<Half>(matrix, of->adapter->halves) + panel * 2;
    const float* low[R];
    for (size_t r = 0; r < R; ++r) low[r] = of[r].low;
    for (size_t v = 0; v < 2; ++v) {
        const float* up = behind_adapters<float>(matrix, halves[v].up) + pair * LANES;
        Floats sum[R];
        for (size_t r = 0; r < R; ++r) sum[r] = total[r][v];
        for (size_t rank = halves[v].first; rank < halves[v].last; ++rank, up += PANEL / 2) {
            const Floats weights = load(up);
            for (size_t r = 0; r < R; ++r) sum[r] += weights * low[r][rank];
        }
        for (size_t r = 0; r < R; ++r) total[r][v] = sum[r];
    }
}

// The same for the rows of a tile. Apart, so that nothing of it is in the way where there are no adapters.
template <size_t R>
__attribute__((noinline)) void add_adapters(const Matrix& matrix, size_t panel, size_t pair, const Lowered* of, Floats (*total)[2]) {
    bool is_one = of->adapter;
    for (size_t r = 1; r < R; ++r) is_one = is_one && of[r].adapter == of->adapter;
    if (is_one) return add_up<R>(matrix, panel, pair, of, total);
    for (size_t r = 0; r < R; ++r)
        if (of[r].adapter) add_up<1>(matrix, panel, pair, of + r, total + r);
}

template <size_t R, size_t BITS, size_t GROUP, typename T>
void multiply_as(const Matrix& matrix, const Rows& rows, size_t begin, size_t end, size_t first, size_t last, size_t after,
                 const T* base, T* to) {
    const size_t bytes = panel_bytes(matrix), times = (end - begin) * PAIRS * groups(matrix);
    for (size_t panel = first; panel < last; ++panel) {
        const uint8_t* next = matrix.panels + (panel + 1 < last ? panel + 1 : after) * bytes;
        Ahead ahead{next, next + bytes, (bytes / 64 + times - 1) / times};
        for (size_t tile = begin; tile < end; ++tile)
            for (size_t pair = 0; pair < PAIRS; ++pair) {
                Floats total[R][2];
                multiply_tile<R, BITS, GROUP>(matrix, matrix.panels + panel * bytes, pair,
                                              rows.quants + tile * R * matrix.inputs,
                                              rows.scales + tile * R * (matrix.inputs / ROUNDED),
                                              rows.sums + tile * R * groups(matrix), ahead, total);
                if (rows.lowered) {
                    // By a copy, so that sums stay in registers.
                    Floats adapted[R][2];
                    std::memcpy(adapted, total, sizeof(total));
                    add_adapters<R>(matrix, panel, pair, rows.lowered + tile * R, adapted);
                    std::memcpy(total, adapted, sizeof(total));
                }
                for (size_t r = 0; r < R && tile * R + r < rows.count; ++r)
                    write(matrix, total[r], panel, pair, tile * R + r, base, to);
            }
    }
}

template <size_t R, typename T>
void multiply_by(const Matrix& matrix, const Rows& rows, size_t begin, size_t end, size_t first, size_t last,
                 size_t after, const void* base, void* to) {
    auto* of = matrix.bits == 4 ? matrix.group == 16 ? multiply_as<R, 4, 16, T> : multiply_as<R, 4, 32, T>
               : matrix.group == 16 ? multiply_as<R, 8, 16, T> : multiply_as<R, 8, 32, T>;
    of(matrix, rows, begin, end, first, last, after, (const T*)base, (T*)to);
}

template <typename T>
void multiply_to(const Matrix& matrix, const Rows& rows, size_t begin, size_t end, size_t first, size_t last,
                 size_t after, const void* base, void* to) {
    static constexpr decltype(&multiply_by<1, T>) by[TILE_ROWS] = {multiply_by<1, T>, multiply_by<2, T>, multiply_by<3, T>,
                                                                   multiply_by<4, T>, multiply_by<5, T>, multiply_by<6, T>};
    by[rows.per_tile - 1](matrix, rows, begin, end, first, last, after, base, to);
}

void multiply(const Matrix& matrix, const Rows& rows, size_t begin, size_t end, size_t first, size_t last, size_t after,
              Numbers base, Numbers to) {
    (to.is_bf16 ? multiply_to<bf16> : multiply_to<float>)(matrix, rows, begin, end, first, last, after, base.data, to.data);
}

inline Floats magnitude(Floats values) { return (Floats)((Words)values & 0x7fffffff); }

// One divided by the root mean square of a row.
template <typename T>
inline float inverse_root(const Matrix& matrix, const T* from) {
    Floats squares{};
    for (size_t i = 0; i < matrix.inputs; i += LANES) {
        const Floats value = load(from + i);
        squares += value * value;
    }
    return 1 / __builtin_sqrtf(horizontal_sum(squares) / float(matrix.inputs) + matrix.epsilon);
}

// Rounds a row into its places of a tile of `stride` rows.
template <typename T>
void round_row(const Matrix& matrix, const T* from, size_t stride, int8_t* quants, float* scales, float* sums) {
    constexpr size_t vectors = ROUNDED / LANES;
    const float by = matrix.norm ? inverse_root(matrix, from) : 1;
    for (size_t at = 0; at < matrix.inputs; at += ROUNDED, quants += stride * ROUNDED, scales += stride) {
        Floats values[vectors], most{};
        for (size_t v = 0; v < vectors; ++v) {
            values[v] = load(from + at + v * LANES);
            if (matrix.norm) values[v] = values[v] * by * load(matrix.norm + at + v * LANES);
            most = larger(most, magnitude(values[v]));
        }
        const float top = largest(most), down = top > 0 ? 127 / top : 0;
        *scales = top / 127 * matrix.factor;
        // Without a sign, since sums of what NaN becomes overflow.
        Words sum{};
        for (size_t v = 0; v < vectors; ++v) {
            // To the nearest whole number, which is in the low bits then.
            const Words whole = (Words)(values[v] * down + 12582912.0f) - 0x4b400000u;
            store_bytes(quants + v * LANES, (Ints)whole);
            sum += whole;
            if ((v + 1) * LANES % matrix.group == 0) {
                *sums = horizontal_sum(as_floats((Ints)sum));
                sums += stride;
                sum = Words{};
            }
        }
    }
}

template <typename T>
void round_from(const Matrix& matrix, const void* from, size_t tile, const Rows& to) {
    const size_t stride = to.per_tile, begin = tile * stride;
    int8_t* quants = to.quants + begin * matrix.inputs;
    float *scales = to.scales + begin * (matrix.inputs / ROUNDED), *sums = to.sums + begin * groups(matrix);
    if (begin + stride > to.count) {
        std::memset(quants, 0, stride * matrix.inputs);
        std::memset(scales, 0, stride * (matrix.inputs / ROUNDED) * sizeof(float));
        std::memset(sums, 0, stride * groups(matrix) * sizeof(float));
    }
    for (size_t r = 0; r < stride && begin + r < to.count; ++r)
        round_row(matrix, (const T*)from + (begin + r) * matrix.inputs, stride, quants + r * ROUNDED, scales + r, sums + r);
}

void round(const Matrix& matrix, Numbers from, size_t tile, const Rows& to) {
    (from.is_bf16 ? round_from<bf16> : round_from<float>)(matrix, from.data, tile, to);
}

// Multiplies `R` rows, numbers of each by `by`, by ranks of an adapter, as many as registers hold the sums of.
template <size_t R, typename T>
void lower_tile(const Matrix& matrix, const float* down, size_t count, const T* const* from, const float* by, float* const* to) {
    constexpr size_t at_once = LANES == 16 || R < 3 ? RANKS : RANKS / 2;
    for (size_t rank = 0; rank < count; rank += at_once, down += at_once * matrix.inputs) {
        Floats sum[R][at_once];
        for (size_t r = 0; r < R; ++r)
            for (size_t k = 0; k < at_once; ++k) sum[r][k] = Floats{};
        for (size_t at = 0; at < matrix.inputs; at += LANES) {
            Floats row[R];
            for (size_t r = 0; r < R; ++r) row[r] = load(from[r] + at);
            for (size_t k = 0; k < at_once; ++k) {
                const Floats weights = load(down + k * matrix.inputs + at);
                for (size_t r = 0; r < R; ++r) sum[r][k] += row[r] * weights;
            }
        }
        for (size_t r = 0; r < R; ++r)
            for (size_t k = 0; k < at_once; ++k) to[r][rank + k] = horizontal_sum(sum[r][k]) * by[r];
    }
}

template <typename T>
void lower_from(const Matrix& matrix, const void* all, const Owned& owned, size_t first, size_t last) {
    constexpr size_t tile = 4;
    static constexpr decltype(&lower_tile<1, T>) by_rows[tile] = {lower_tile<1, T>, lower_tile<2, T>, lower_tile<3, T>,
                                                                  lower_tile<4, T>};
    const float* down = behind_adapters<float>(matrix, owned.adapter->down) + first * matrix.inputs;
    for (size_t begin = 0; begin < owned.count; begin += tile) {
        const size_t count = owned.count - begin < tile ? owned.count - begin : tile;
        const T* from[tile];
        float by[tile], *to[tile];
        for (size_t r = 0; r < count; ++r) {
            from[r] = (const T*)all + owned.rows[begin + r] * matrix.inputs;
            by[r] = matrix.norm ? inverse_root(matrix, from[r]) : 1;
            to[r] = owned.low + (begin + r) * owned.adapter->ranks + first;
        }
        by_rows[count - 1](matrix, down, last - first, from, by, to);
    }
}

void lower(const Matrix& matrix, Numbers from, const Owned& owned, size_t first, size_t last) {
    (from.is_bf16 ? lower_from<bf16> : lower_from<float>)(matrix, from.data, owned, first, last);
}

}  // namespace

const Kernels ovfleet::projection::OVFLEET_KERNELS = {round, multiply, lower};
