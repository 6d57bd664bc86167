// The projection kernels under sanitizers: every instruction set of this machine, over bits, groups, widths, row counts and
// epilogues, with norms and adapters, compared with a product in f64.
#include "check.hpp"

#include <algorithm>

#include "projection/adapters.hpp"
#include "projection/pack.hpp"
#include "projection/run.hpp"

namespace {

using namespace ovfleet::projection;

constexpr size_t INPUTS[] = {32, 64, 96, 160, 576, 1024};
constexpr size_t OUTPUTS[] = {2, 16, 18, 30, 32, 34, 48, 50, 64, 96, 200};
constexpr size_t WEIGHT_GROUPS[] = {16, 32, 64};
constexpr size_t ROWS_MAX = 70;

// A weight as a graph has it, and as numbers.
struct RandomWeight {
    RandomWeight(Random& random, size_t outputs, size_t inputs, size_t group, size_t bits, bool is_signed)
        : values(outputs * inputs) {
        const size_t groups = inputs / group;
        const auto type = bits == 4 ? (is_signed ? ov::element::i4 : ov::element::u4)
                                    : (is_signed ? ov::element::i8 : ov::element::u8);
        std::vector<float> scales(outputs * groups), zeros(outputs * groups);
        for (auto& scale : scales) scale = float(random.below(15) + 1) / 16.0f;
        for (auto& zero : zeros) zero = float(random.below(16));
        ov::Tensor quants(type, {outputs, groups, group});
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
            return std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{outputs, groups, 1}, all);
        };
        weight = {std::make_shared<ov::op::v0::Constant>(quants), floats(zeros), floats(scales), outputs, inputs, group};
    }

    Weight weight;
    std::vector<double> values;
};

void check_case(size_t set, const Kernels& kernels, size_t i) {
    Random random(i);
    const size_t inputs = INPUTS[(i + i / 6) % 6], outputs = OUTPUTS[(i + i / 11) % 11], bits = i % 2 ? 8 : 4;
    size_t group = WEIGHT_GROUPS[(i / 2 + i / 3) % 3];
    if (inputs % group != 0) group = 32;
    const size_t rows = 1 + (i * 37 + i / ROWS_MAX) % ROWS_MAX;
    const auto then = Then(i / 2 % 3);
    const bool is_bf16 = then != Then::added && i % 5 == 2, has_norm = i % 4 == 1;
    const RandomWeight weight(random, outputs, inputs, group, bits, i % 3 == 0);
    Matrix matrix{};
    measure(weight.weight, matrix);
    matrix.then = then;
    matrix.epsilon = 1e-5f;
    if (const char* fault = unsupported(matrix)) FAIL("%s", fault);
    Exact<float> norm(inputs);
    for (size_t k = 0; k < inputs; ++k) norm[k] = float(random.below(9)) / 4.0f;
    if (has_norm) matrix.norm = norm.data();
    Exact<uint8_t> panels(ovfleet::projection::panels(matrix) * panel_bytes(matrix));
    pack(weight.weight, matrix, panels.data());
    matrix.panels = panels.data();
    std::vector<std::shared_ptr<ovfleet::LowRank>> parts;
    for (int32_t adapter = 1; adapter <= int32_t(i % 3); ++adapter) {
        auto part = std::make_shared<ovfleet::LowRank>();
        part->adapter = adapter;
        part->first = random.below(outputs / 2);
        part->rows = 1 + random.below(outputs - part->first);
        part->ranks = 1 + random.below(21);
        for (size_t k = 0; k < part->ranks * inputs; ++k) part->down.push_back(random.number() / 8);
        for (size_t k = 0; k < part->ranks * part->rows; ++k) part->up.push_back(random.number());
        parts.push_back(part);
    }
    const auto packed = pack_adapters(parts, matrix.norm, matrix);
    Exact<uint8_t> adapters(packed.size());
    if (!packed.empty()) std::memcpy(adapters.data(), packed.data(), packed.size());
    matrix.adapters = reinterpret_cast<const Adapter*>(adapters.data());
    Exact<int32_t> owners(rows);
    for (size_t row = 0; row < rows; ++row) owners[row] = int32_t(random.below(3));
    const size_t width = results(matrix), number = is_bf16 ? 2 : 4;
    Exact<uint8_t> from(rows * inputs * number), to(rows * width * number), base(then == Then::added ? rows * width * 4 : 0);
    std::vector<double> numbers(rows * inputs);
    for (size_t k = 0; k < numbers.size(); ++k) {
        // One number of 32 is the largest, so that rounding to 8 bits is exact.
        const float value = k % 32 == 7 ? 127.0f : float(random.below(255)) - 127.0f;
        numbers[k] = double(value);
        if (is_bf16) reinterpret_cast<uint16_t*>(from.data())[k] = to_bf16(value);
        else reinterpret_cast<float*>(from.data())[k] = value;
    }
    for (size_t k = 0; k < base.size() / 4; ++k) reinterpret_cast<float*>(base.data())[k] = random.number();
    const bool adapts = !parts.empty();
    run(kernels, matrix, rows, adapts ? owners.data() : nullptr, {from.data(), is_bf16},
        {then == Then::added ? base.data() : nullptr, false}, {to.data(), is_bf16});

    for (size_t row = 0; row < rows; ++row) {
        if (row > 1 && row + 2 < rows && row % 9 != 0) continue;
        std::vector<double> x(numbers.begin() + long(row * inputs), numbers.begin() + long((row + 1) * inputs));
        double squares = 0;
        for (const double value : x) squares += value * value;
        const double root = std::sqrt(squares / double(inputs) + 1e-5);
        for (size_t k = 0; has_norm && k < inputs; ++k) x[k] = x[k] / root * double(norm[k]);
        // A product, and how far it may be off.
        const auto product = [&](size_t output, double& off) {
            double sum = 0;
            for (size_t k = 0; k < inputs; ++k) {
                const double weight_at = weight.values[output * inputs + k];
                sum += x[k] * weight_at;
                double most = 0;
                for (size_t one = k / 32 * 32; one < k / 32 * 32 + 32; ++one) most = std::max(most, std::abs(x[one]));
                off += std::abs(x[k] * weight_at) * 1e-5 + (has_norm ? std::abs(weight_at) * most / 254 : 0.0);
            }
            for (const auto& part : parts) {
                if (part->adapter != owners[row] || output < part->first || output >= part->first + part->rows) continue;
                for (size_t rank = 0; rank < part->ranks; ++rank) {
                    double low = 0, size = 0;
                    for (size_t k = 0; k < inputs; ++k) {
                        low += double(part->down[rank * inputs + k]) * x[k];
                        size += std::abs(double(part->down[rank * inputs + k]) * x[k]);
                    }
                    const double up = double(part->up[(output - part->first) * part->ranks + rank]);
                    sum += up * low;
                    off += std::abs(up) * size * 1e-5;
                }
            }
            return sum;
        };
        for (size_t result = 0; result < width; ++result) {
            double off = 1e-30, expected = product(result, off);
            if (then == Then::added) {
                const double old = double(reinterpret_cast<const float*>(base.data())[row * width + result]);
                expected += old;
                off += std::abs(old) * 1e-6;
            } else if (then == Then::gated) {
                double off_up = 0;
                const double up = product(result + width, off_up), gate = expected / (1 + std::exp(-expected));
                off = off * 1.1 * (std::abs(up) + off_up) + std::abs(gate) * off_up + 1e-30;
                expected = gate * up;
            }
            off += std::abs(expected) * (is_bf16 ? 1.0 / 128 : 1e-5);
            const size_t at = row * width + result;
            const float found = is_bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(to.data())[at])
                                        : reinterpret_cast<const float*>(to.data())[at];
            if (!(std::abs(double(found) - expected) <= off))
                FAIL("set %zu, case %zu: %zu to %zu of %zu bits by %zu, then %d, row %zu of %zu, result %zu: %g, not %g (by %g)", set,
                     i, inputs, outputs, bits, group, int(then), row, rows, result, double(found), expected, off);
        }
    }
}

}  // namespace

size_t check_projections() {
    size_t tried = 0;
    for (size_t set = 0; set < KERNEL_SETS; ++set) {
        const auto* kernels = kernels_of(set);
        if (!kernels) continue;
        for (size_t i = 0; i < 2 * 210; ++i, ++tried) check_case(set, *kernels, i);
    }
    return tried;
}
