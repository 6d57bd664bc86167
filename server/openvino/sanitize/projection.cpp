// Runs the projection kernels under sanitizers, and compares their results with a product in f64. The cases cover one and two
// terms, and various bit widths, group sizes, matrix sizes, numbers of rows, epilogues, norms and adapters. They run with every
// instruction set that this machine supports. On every machine, the AMX kernels also run on the software model of the tiles.
#include "projection.hpp"

#include <algorithm>

#include "projection/adapters.hpp"
#include "projection/run.hpp"

namespace {

using namespace ovfleet::projection;

constexpr size_t KS[] = {32, 64, 128, 160, 384, 576, 1024};
constexpr size_t NS[] = {2, 16, 18, 30, 32, 34, 48, 50, 64, 96, 200};
// 0 stands for groups that are as long as a row.
constexpr size_t WEIGHT_GROUPS[] = {16, 32, 64, WIDE_GROUP, 0};
constexpr size_t M_MAX = 70;

struct Case {
    size_t i, M, K, N, bits, group;
    Epilogue epilogue;
};

Epilogue epilogue_of(size_t i) {
    constexpr Epilogue all[] = {Epilogue::none,      Epilogue::residual, Epilogue::swiglu,    Epilogue::gelu,
                                Epilogue::gelu_tanh, Epilogue::silu,     Epilogue::quick_gelu};
    return all[i % std::size(all)];
}

double activated(Epilogue epilogue, double x) {
    const auto sigmoid = [](double y) { return 1 / (1 + std::exp(-y)); };
    switch (epilogue) {
        case Epilogue::gelu: return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
        case Epilogue::gelu_tanh: return x * sigmoid(std::sqrt(8 / M_PI) * (x + 0.044715 * x * x * x));
        case Epilogue::silu: return x * sigmoid(x);
        default: return x * sigmoid(1.702 * x);
    }
}

Case with_few_rows(size_t i) {
    return {i,
            1 + (i * 37 + i / M_MAX) % M_MAX,
            KS[(i + i / 7) % 7],
            NS[(i + i / 11) % 11],
            i % 2 ? size_t(8) : 4,
            WEIGHT_GROUPS[(i / 2 + i / 3) % 5],
            epilogue_of(i / 2)};
}

// Sizes around the thresholds at which the AMX kernels change how they divide rows and weights.
constexpr size_t LARGE_MS[] = {64, 65, 96, 255, 256, 257, 512}, LARGE_KS[] = {256, 288, 2048, 2080, 4128};

Case with_large_sizes(size_t i) {
    return {i,
            LARGE_MS[i % 7],
            LARGE_KS[i % 5],
            NS[(i + i / 11) % 7],
            i % 2 ? size_t(8) : 4,
            WEIGHT_GROUPS[i / 2 % 5],
            epilogue_of(i / 3)};
}

// The magnitude above which an element of a row is certainly an outlier.
double outlier_limit(const std::vector<double>& row) {
    double squares = 0;
    for (const double number : row) squares += number * number;
    return double(OUTLIER_RATIO) * std::sqrt(squares / double(row.size())) * (1 + 1e-5);
}

void check_case(const TestedKernels& tested, Case test) {
    auto [i, M, K, N, bits, group, epilogue] = test;
    Random random(i);
    if (group == 0) group = K;
    if (K % group != 0) group = 32;
    const bool has_super_scales = K % SUPER_BLOCK == 0 && i / 2 % 2 == 0;
    if (has_super_scales) bits = SIX_BITS, group = SUPER_GROUP;
    else if (bits == 8 && group != SUPER_GROUP && i / 2 % 3 == 0) bits = SIX_BITS;
    const size_t terms = 1 + i / 3 % 2;
    const float most_quant = terms == 1 ? 127 : 127 << TERM_BITS;
    const bool is_bf16 = epilogue != Epilogue::residual && !is_activation(epilogue) && i % 5 == 2, has_norm = i % 4 == 1;
    const RandomWeight weight =
        has_super_scales ? RandomWeight::with_super_scales(random, N, K) : RandomWeight(random, N, K, group, bits, i % 3 == 0);
    Matmul matmul{};
    describe(weight.weight, matmul);
    if (matmul.bits != bits) FAIL("case %zu: %zu bits, not %zu", i, matmul.bits, bits);
    matmul.terms = terms;
    matmul.epilogue = epilogue;
    matmul.epsilon = 1e-5f;
    if (const char* fault = unsupported(matmul)) FAIL("%s", fault);
    Exact<float> norm(K);
    for (size_t k = 0; k < K; ++k) norm[k] = float(random.below(9)) / 4.0f;
    if (has_norm) matmul.norm = norm.data();
    Exact<uint8_t> weights(num_n_blocks(matmul) * n_block_bytes(matmul));
    pack(weight.weight, matmul, weights.data());
    matmul.weights = weights.data();
    std::vector<std::shared_ptr<ovfleet::LoraPart>> parts;
    for (int32_t adapter = 1; adapter <= int32_t(i % 3); ++adapter) {
        auto part = std::make_shared<ovfleet::LoraPart>();
        part->adapter = adapter;
        part->first = random.below(N / 2);
        part->rows = 1 + random.below(N - part->first);
        part->ranks = 1 + random.below(21);
        for (size_t k = 0; k < part->ranks * K; ++k) part->down.push_back(random.number() / 8);
        for (size_t k = 0; k < part->ranks * part->rows; ++k) part->up.push_back(random.number());
        parts.push_back(part);
    }
    const auto packed = pack_adapters(parts, matmul.norm, matmul);
    Exact<uint8_t> adapters(packed.size());
    if (!packed.empty()) std::memcpy(adapters.data(), packed.data(), packed.size());
    matmul.adapters = reinterpret_cast<const LoraAdapter*>(adapters.data());
    Exact<int32_t> row_adapters(M);
    for (size_t row = 0; row < M; ++row) row_adapters[row] = int32_t(random.below(3));
    const size_t columns = dst_columns(matmul), number = is_bf16 ? 2 : 4;
    Exact<uint8_t> src(M * K * number), dst(M * columns * number),
        residual(epilogue == Epilogue::residual ? M * columns * 4 : 0);
    std::vector<double> numbers(M * K);
    for (size_t k = 0; k < numbers.size(); ++k) {
        // One of every 32 numbers has the magnitude of the largest quant, so that quantization is exact. If the source is bf16
        // and has two terms, the second terms are 0. Outliers of neighboring rows are in different columns.
        const size_t range = is_bf16 ? 127 : size_t(most_quant), row = k / K, column = k % K;
        const float step = most_quant / float(range);
        float value = step * (k % 32 == 7 ? float(range) : float(random.below(2 * range + 1)) - float(range));
        if (terms == 1 && row % 3 != 0 && k % 32 != 7 && (column * 7 + row) % 40 == 3)
            value = std::copysign(127.0f * 128, value);
        numbers[k] = double(value);
        if (is_bf16) reinterpret_cast<uint16_t*>(src.data())[k] = to_bf16(value);
        else reinterpret_cast<float*>(src.data())[k] = value;
    }
    for (size_t k = 0; k < residual.size() / 4; ++k) reinterpret_cast<float*>(residual.data())[k] = random.number();
    const bool adapts = !parts.empty();
    const auto run_rows = [&](size_t first, size_t count, uint8_t* to) {
        uint8_t* residual_rows = epilogue == Epilogue::residual ? residual.data() + first * columns * 4 : nullptr;
        run(*tested.kernels, matmul, count, adapts ? row_adapters.data() + first : nullptr,
            {src.data() + first * K * number, is_bf16}, {residual_rows, false}, {to, is_bf16});
    };
    run_rows(0, M, dst.data());

    for (size_t row = 0; row < M; ++row) {
        if (row > 1 && row + 2 < M && row % (M > M_MAX ? 61 : 9) != 0) continue;
        Exact<uint8_t> alone(columns * number);
        run_rows(row, 1, alone.data());
        if (std::memcmp(alone.data(), dst.data() + row * alone.size(), alone.size()) != 0)
            FAIL("%s, case %zu: row %zu of %zu depends on other rows", tested.name, i, row, M);
        std::vector<double> x(numbers.begin() + long(row * K), numbers.begin() + long((row + 1) * K));
        double squares = 0;
        for (const double value : x) squares += value * value;
        const double root = std::sqrt(squares / double(K) + 1e-5);
        for (size_t k = 0; has_norm && k < K; ++k) x[k] = x[k] / root * double(norm[k]);
        const double limit = terms == 1 ? outlier_limit(x) : HUGE_VAL;
        // Returns the expected value of column `n` of this row before the epilogue, including adapters, and adds its tolerance
        // to `off`.
        const auto product = [&](size_t n, double& off) {
            double sum = 0;
            for (size_t k = 0; k < K; ++k) {
                const double weight_at = weight.values[n * K + k];
                sum += x[k] * weight_at;
                double most = 0;
                for (size_t one = k / 32 * 32; one < k / 32 * 32 + 32; ++one)
                    if (std::abs(x[one]) <= limit) most = std::max(most, std::abs(x[one]));
                const double size = std::abs(x[k] * weight_at);
                // Without a norm, quantization is exact. Rounding to bf16 is also exact if the source has one term or is bf16.
                const bool is_exact = !has_norm && (tested.rounding == Rounding::to_integers || terms == 1 || is_bf16);
                // The AMX kernels do not round per-channel weights.
                const double roundings = (is_exact ? 0 : 1.01) + (matmul.per_channel ? 0 : 1);
                if (tested.rounding == Rounding::to_bf16) off += size * roundings / 256;
                else if (!is_exact && std::abs(x[k]) <= limit) off += std::abs(weight_at) * most / double(2 * most_quant);
                off += size * 1e-5;
            }
            for (const auto& part : parts) {
                if (part->adapter != row_adapters[row] || n < part->first || n >= part->first + part->rows) continue;
                for (size_t rank = 0; rank < part->ranks; ++rank) {
                    double low = 0, size = 0;
                    for (size_t k = 0; k < K; ++k) {
                        low += double(part->down[rank * K + k]) * x[k];
                        size += std::abs(double(part->down[rank * K + k]) * x[k]);
                    }
                    const double up = double(part->up[(n - part->first) * part->ranks + rank]);
                    sum += up * low;
                    off += std::abs(up) * size * 1e-5;
                }
            }
            return sum;
        };
        for (size_t column = 0; column < columns; ++column) {
            double off = 1e-30, expected = product(column, off);
            if (epilogue == Epilogue::residual) {
                const double old = double(reinterpret_cast<const float*>(residual.data())[row * columns + column]);
                expected += old;
                off += std::abs(old) * 1e-6;
            } else if (epilogue == Epilogue::swiglu) {
                double off_up = 0;
                const double up = product(column + columns, off_up), gate = expected / (1 + std::exp(-expected));
                off = off * 1.1 * (std::abs(up) + off_up) + std::abs(gate) * off_up + 1e-30;
                expected = gate * up;
            } else if (is_activation(epilogue)) {
                // The slopes of the activations are below 1.2, and the kernels approximate erf with an error of up to 1.5e-7.
                off = off * 1.2 + std::abs(expected) * 1e-6;
                expected = activated(epilogue, expected);
            }
            off += std::abs(expected) * (is_bf16 ? 1.0 / 128 : 1e-5);
            const size_t at = row * columns + column;
            const float found = is_bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(dst.data())[at])
                                        : reinterpret_cast<const float*>(dst.data())[at];
            if (!(std::abs(double(found) - expected) <= off))
                FAIL(
                    "%s, case %zu: K %zu, N %zu, %zu terms, %zu bits by %zu, epilogue %d, row %zu of %zu, column %zu: %g, "
                    "not %g (tolerance: %g)",
                    tested.name, i, K, N, terms, bits, group, int(epilogue), row, M, column, double(found), expected, off);
        }
    }
}

// Computes a row of zeros, a row of subnormal numbers, and rows with a number that is not finite, between ordinary rows of
// various magnitudes. No row may affect the outputs of another, and the outputs of a row with a number that is not finite must
// not be finite either.
void check_special_rows(const TestedKernels& tested, size_t i) {
    Random random(i);
    constexpr size_t N = 34, M = 13;
    constexpr size_t ZEROS = 2, NOT_A_NUMBER = 4, INFINITE = 6, NEGATIVE_INFINITE = 8, SUBNORMAL = 10;
    const bool has_super_scales = i / 8 == 3;
    const size_t K = has_super_scales ? 256 : 96, bits = has_super_scales ? SIX_BITS : i % 2 ? 8 : 4;
    const size_t plain_group = i / 8 == 2 ? K : 32, group = has_super_scales || i / 2 % 2 ? 16 : plain_group,
                 terms = 1 + i / 4 % 2;
    const RandomWeight weight =
        has_super_scales ? RandomWeight::with_super_scales(random, N, K) : RandomWeight(random, N, K, group, bits, false);
    Matmul matmul{};
    describe(weight.weight, matmul);
    matmul.terms = terms;
    Exact<uint8_t> weights(num_n_blocks(matmul) * n_block_bytes(matmul));
    pack(weight.weight, matmul, weights.data());
    matmul.weights = weights.data();
    Exact<float> src(M * K), dst(M * N), alone(N);
    for (size_t row = 0; row < M; ++row) {
        const float scale = row == ZEROS ? 0 : row == SUBNORMAL ? 1e-40f : std::ldexp(1.0f, int(row) * 4 - 24);
        for (size_t k = 0; k < K; ++k) src[row * K + k] = random.number() * scale;
    }
    const size_t at = random.below(K);
    src[NOT_A_NUMBER * K + at] = NAN;
    src[INFINITE * K + at] = INFINITY;
    src[NEGATIVE_INFINITE * K + at] = -INFINITY;
    run(*tested.kernels, matmul, M, nullptr, {src.data(), false}, {}, {dst.data(), false});
    for (size_t row = 0; row < M; ++row) {
        const float* found = dst.data() + row * N;
        run(*tested.kernels, matmul, 1, nullptr, {src.data() + row * K, false}, {}, {alone.data(), false});
        for (size_t n = 0; n < N; ++n) {
            const auto fail = [&](const char* fault, double expected) {
                FAIL("%s, %zu terms, %zu bits by %zu: row %zu, column %zu is %g, %s %g", tested.name, terms, bits, group, row,
                     n, double(found[n]), fault, expected);
            };
            const bool is_finite = row != NOT_A_NUMBER && row != INFINITE && row != NEGATIVE_INFINITE;
            if (is_finite && std::memcmp(&found[n], &alone[n], sizeof(float)) != 0) fail("alone", double(alone[n]));
            if (std::isfinite(found[n]) != is_finite) fail("finite:", double(is_finite));
            if (row == NOT_A_NUMBER && !std::isnan(found[n])) fail("not", NAN);
            if (row == ZEROS && found[n] != 0) fail("not", 0);
            double expected = 0, off = 1e-25;
            for (size_t k = 0; is_finite && k < K; ++k) {
                double most = 0;
                for (size_t one = k / 32 * 32; one < k / 32 * 32 + 32; ++one)
                    most = std::max(most, double(std::abs(src[row * K + one])));
                const double weight_at = weight.values[n * K + k];
                expected += weight_at * double(src[row * K + k]);
                const double size = std::abs(weight_at * double(src[row * K + k]));
                off += tested.rounding == Rounding::to_bf16
                           ? size * (2.01 / 256 + 1e-5)
                           : std::abs(weight_at) * most * (0.5 / double(terms == 1 ? 127 : 127 << TERM_BITS) + 1e-5);
            }
            if (is_finite && !(std::abs(double(found[n]) - expected) <= off)) fail("not", expected);
        }
    }
}

}  // namespace

size_t check_projections() {
    size_t tried = 0;
    for (const auto& tested : tested_kernels()) {
        if (!tested.kernels) continue;
        for (size_t i = 0; i < 2 * 210; ++i, ++tried) check_case(tested, with_few_rows(i));
        for (size_t i = 0; i < 35; ++i, ++tried) check_case(tested, with_large_sizes(i));
        for (size_t i = 0; i < 32; ++i, ++tried) check_special_rows(tested, i);
    }
    return tried;
}
