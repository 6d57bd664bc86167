// Runs the projection kernels under sanitizers, and compares them with a product in f64: every instruction set of this machine,
// with one and two terms, various bits, groups, sizes, numbers of rows and epilogues, with norms and adapters.
#include "check.hpp"

#include <algorithm>

#include "projection/adapters.hpp"
#include "projection/pack.hpp"
#include "projection/run.hpp"

namespace {

using namespace ovfleet::projection;

constexpr size_t KS[] = {32, 64, 96, 160, 576, 1024};
constexpr size_t NS[] = {2, 16, 18, 30, 32, 34, 48, 50, 64, 96, 200};
constexpr size_t WEIGHT_GROUPS[] = {16, 32, 64};
constexpr size_t M_MAX = 70;

// A weight in the form of a graph, and its values.
struct RandomWeight {
    RandomWeight(Random& random, size_t N, size_t K, size_t group, size_t bits, bool is_signed) : values(N * K) {
        const size_t groups = K / group;
        const auto type =
            bits == 4 ? (is_signed ? ov::element::i4 : ov::element::u4) : (is_signed ? ov::element::i8 : ov::element::u8);
        std::vector<float> scales(N * groups), zeros(N * groups);
        for (auto& scale : scales) scale = float(random.below(15) + 1) / 16.0f;
        for (auto& zero : zeros) zero = float(random.below(16));
        ov::Tensor quants(type, {N, groups, group});
        auto* bytes = static_cast<uint8_t*>(quants.data());
        std::memset(bytes, 0, quants.get_byte_size());
        for (size_t i = 0; i < values.size(); ++i) {
            const auto quant = random.below(size_t(1) << bits), half = size_t(1) << (bits - 1);
            if (bits == 8) bytes[i] = uint8_t(quant);
            else bytes[i / 2] = uint8_t(bytes[i / 2] | quant << i % 2 * 4);
            const double number = double(quant) - (is_signed && quant >= half ? 2.0 * double(half) : 0.0);
            values[i] = (number - double(zeros[i / group])) * double(scales[i / group]);
        }
        const auto floats = [&](const std::vector<float>& all) {
            return std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{N, groups, 1}, all);
        };
        weight = {std::make_shared<ov::op::v0::Constant>(quants), floats(zeros), floats(scales), N, K, group};
    }

    GraphWeight weight;
    std::vector<double> values;
};

void check_case(ovfleet::Isa isa, const Kernels& kernels, size_t i) {
    Random random(i);
    const size_t K = KS[(i + i / 6) % 6], N = NS[(i + i / 11) % 11], bits = i % 2 ? 8 : 4;
    size_t group = WEIGHT_GROUPS[(i / 2 + i / 3) % 3];
    if (K % group != 0) group = 32;
    const size_t M = 1 + (i * 37 + i / M_MAX) % M_MAX;
    const auto epilogue = Epilogue(i / 2 % 3);
    const size_t terms = 1 + i / 3 % 2;
    const float most_quant = terms == 1 ? 127 : 127 << TERM_BITS;
    const bool is_bf16 = epilogue != Epilogue::residual && i % 5 == 2, has_norm = i % 4 == 1;
    const RandomWeight weight(random, N, K, group, bits, i % 3 == 0);
    Matmul matmul{};
    describe(weight.weight, matmul);
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
        // One number of 32 is the largest, so that quantization is exact. In bf16, only the first term is not 0.
        const size_t range = is_bf16 ? 127 : size_t(most_quant);
        const float step = most_quant / float(range);
        const float value = step * (k % 32 == 7 ? float(range) : float(random.below(2 * range + 1)) - float(range));
        numbers[k] = double(value);
        if (is_bf16) reinterpret_cast<uint16_t*>(src.data())[k] = to_bf16(value);
        else reinterpret_cast<float*>(src.data())[k] = value;
    }
    for (size_t k = 0; k < residual.size() / 4; ++k) reinterpret_cast<float*>(residual.data())[k] = random.number();
    const bool adapts = !parts.empty();
    run(kernels, matmul, M, adapts ? row_adapters.data() : nullptr, {src.data(), is_bf16},
        {epilogue == Epilogue::residual ? residual.data() : nullptr, false}, {dst.data(), is_bf16});

    for (size_t row = 0; row < M; ++row) {
        if (row > 1 && row + 2 < M && row % 9 != 0) continue;
        std::vector<double> x(numbers.begin() + long(row * K), numbers.begin() + long((row + 1) * K));
        double squares = 0;
        for (const double value : x) squares += value * value;
        const double root = std::sqrt(squares / double(K) + 1e-5);
        for (size_t k = 0; has_norm && k < K; ++k) x[k] = x[k] / root * double(norm[k]);
        // A product and its tolerance.
        const auto product = [&](size_t n, double& off) {
            double sum = 0;
            for (size_t k = 0; k < K; ++k) {
                const double weight_at = weight.values[n * K + k];
                sum += x[k] * weight_at;
                double most = 0;
                for (size_t one = k / 32 * 32; one < k / 32 * 32 + 32; ++one) most = std::max(most, std::abs(x[one]));
                off +=
                    std::abs(x[k] * weight_at) * 1e-5 + (has_norm ? std::abs(weight_at) * most / double(2 * most_quant) : 0.0);
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
            }
            off += std::abs(expected) * (is_bf16 ? 1.0 / 128 : 1e-5);
            const size_t at = row * columns + column;
            const float found = is_bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(dst.data())[at])
                                        : reinterpret_cast<const float*>(dst.data())[at];
            if (!(std::abs(double(found) - expected) <= off))
                FAIL(
                    "%s, case %zu: K %zu, N %zu, %zu terms, %zu bits by %zu, epilogue %d, row %zu of %zu, column %zu: %g, not "
                    "%g (by %g)",
                    name_of(isa), i, K, N, terms, bits, group, int(epilogue), row, M, column, double(found), expected, off);
        }
    }
}

// Rows of zeros, of subnormal numbers, and with numbers that are not finite, between ordinary rows of various magnitudes: no
// row changes another, and what is not finite stays so.
void check_special_rows(ovfleet::Isa isa, const Kernels& kernels, size_t i) {
    Random random(i);
    constexpr size_t K = 96, N = 34, M = 13;
    constexpr size_t ZEROS = 2, NOT_A_NUMBER = 4, INFINITE = 6, NEGATIVE_INFINITE = 8, SUBNORMAL = 10;
    const size_t bits = i % 2 ? 8 : 4, group = i / 2 % 2 ? 16 : 32, terms = 1 + i / 4 % 2;
    const RandomWeight weight(random, N, K, group, bits, false);
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
    run(kernels, matmul, M, nullptr, {src.data(), false}, {}, {dst.data(), false});
    for (size_t row = 0; row < M; ++row) {
        const float* found = dst.data() + row * N;
        run(kernels, matmul, 1, nullptr, {src.data() + row * K, false}, {}, {alone.data(), false});
        for (size_t n = 0; n < N; ++n) {
            const auto fail = [&](const char* fault, double expected) {
                FAIL("%s, %zu terms, %zu bits by %zu: row %zu, column %zu is %g, %s %g", name_of(isa), terms, bits, group, row,
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
                off += std::abs(weight_at) * most * (0.5 / double(terms == 1 ? 127 : 127 << TERM_BITS) + 1e-5);
            }
            if (is_finite && !(std::abs(double(found[n]) - expected) <= off)) fail("not", expected);
        }
    }
}

}  // namespace

size_t check_projections() {
    size_t tried = 0;
    for (const auto isa : ISAS) {
        const auto* kernels = projection_kernels(isa);
        if (!kernels) continue;
        for (size_t i = 0; i < 2 * 210; ++i, ++tried) check_case(isa, *kernels, i);
        for (size_t i = 0; i < 32; ++i, ++tried) check_special_rows(isa, *kernels, i);
    }
    return tried;
}
