// Runs the experts of a layer under sanitizers, and compares their results with a computation in f64. The cases cover various
// numbers of experts, numbers of rows, matrix sizes and weight formats. They run with every instruction set that this machine
// supports. On every machine, the AMX kernels also run on the software model of the tiles.
#include <algorithm>
#include <numeric>

#include "experts/run.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::experts;
using namespace ovfleet::projection;

constexpr size_t COUNTS[] = {1, 2, 4, 7, 33}, COLUMNS[] = {32, 64, 96, 160, 256}, WEIGHT_GROUPS[] = {16, 32, 64},
                 BITS[] = {4, 6, 8};

// Values, and the largest allowed error of each.
struct Bounded {
    std::vector<double> values, off;
};

// How the kernels round the numbers of a row: to integers, with one scale for every 32 consecutive numbers, or to bf16, like
// the weights.
struct RowRounding {
    Rounding rounding;
    double most_quant;

    double off(const Bounded& row, size_t k) const {
        if (rounding == Rounding::to_bf16) return (std::abs(row.values[k]) + row.off[k]) * 2.01 / 256;
        double most = 0;
        for (size_t one = k / 32 * 32; one < k / 32 * 32 + 32; ++one)
            most = std::max(most, std::abs(row.values[one]) + row.off[one]);
        return most / (2 * most_quant);
    }
};

// The dot products of `row` with `rows` rows of a weight, starting at row `first`, plus `bias` unless it is null.
Bounded product(const RandomWeight& weight, size_t first, size_t rows, const float* bias, const Bounded& row,
                const RowRounding& rounding) {
    const size_t K = row.values.size();
    std::vector<double> off(K);
    for (size_t k = 0; k < K; ++k) off[k] = row.off[k] + rounding.off(row, k) + std::abs(row.values[k]) * 1e-5;
    Bounded result{std::vector<double>(rows), std::vector<double>(rows)};
    for (size_t n = 0; n < rows; ++n) {
        if (bias) result.values[n] = double(bias[n]);
        for (size_t k = 0; k < K; ++k) {
            const double weight_at = weight.values[(first + n) * K + k];
            result.values[n] += weight_at * row.values[k];
            result.off[n] += std::abs(weight_at) * off[k];
        }
    }
    return result;
}

Bounded swiglu(const Bounded& gates, const Bounded& ups, Epilogue epilogue) {
    Bounded result = gates;
    const bool is_clamped = epilogue == Epilogue::clamped_swiglu;
    for (size_t i = 0; i < gates.values.size(); ++i) {
        const double x = is_clamped ? std::min(gates.values[i], 7.0) : gates.values[i];
        const double gate = x / (1 + std::exp(is_clamped ? -1.702 * x : -x));
        const double up = is_clamped ? std::clamp(ups.values[i], -7.0, 7.0) + 1 : ups.values[i];
        result.values[i] = gate * up;
        result.off[i] =
            gates.off[i] * 1.1 * (std::abs(up) + ups.off[i]) + std::abs(gate) * ups.off[i] + std::abs(result.values[i]) * 1e-5;
    }
    return result;
}

void check_case(const TestedKernels& tested, size_t i) {
    Random random(i);
    Experts experts{};
    auto& [count, used, has_biases, gate_up, down] = experts;
    count = COUNTS[i % 5], used = 1 + random.below(std::min<size_t>(count, 4));
    const size_t K = COLUMNS[i / 2 % 5], inner = COLUMNS[i / 3 % 5], M = 1 + random.below(i % 7 == 0 ? 150 : 20);
    const auto weight = [&](size_t rows, size_t columns) {
        const size_t group = WEIGHT_GROUPS[random.below(3)], bits = BITS[random.below(3)];
        if (i % 4 > 1) return RandomWeight::in_e2m1(random, count * rows, columns);
        if (columns % SUPER_BLOCK == 0 && i % 4 == 1) return RandomWeight::with_super_scales(random, count * rows, columns);
        return RandomWeight(random, count * rows, columns, columns % group == 0 ? group : 32, bits, random.below(2) == 0);
    };
    const RandomWeight gate = weight(inner, K), up = weight(inner, K), second = weight(K, inner);
    describe_form({&gate.weight, &up.weight}, gate_up);
    set_scale_factor({&gate.weight, &up.weight}, gate_up);
    describe_form({&second.weight}, down);
    set_scale_factor({&second.weight}, down);
    gate_up.N = 2 * inner, down.N = K;
    gate_up.epilogue = i % 5 < 3 ? Epilogue::swiglu : Epilogue::clamped_swiglu;
    has_biases = i % 2 == 0;
    gate_up.terms = down.terms = 1 + i % 2;
    if (const char* fault = unsupported(experts)) FAIL("%s", fault);

    Exact<uint8_t> memory(memory_bytes(experts));
    auto* router = reinterpret_cast<float*>(memory.data());
    for (size_t k = 0; k < router_rows(experts) * K; ++k) router[k] = k < count * K ? random.number() / 4 : 0;
    const WeightReader gates(gate.weight), ups(up.weight), seconds(second.weight);
    for (size_t expert = 0; expert < count; ++expert) {
        pack({{&gates, expert * inner, inner}, {&ups, expert * inner, inner}}, gate_up,
             memory.data() + gate_up_at(experts) + expert * matrix_bytes(gate_up));
        pack({{&seconds, expert * K, K}}, down, memory.data() + down_at(experts) + expert * matrix_bytes(down));
    }

    // The biases of the router, followed by those of each expert's gate, up and down projections.
    std::vector<float> biases(has_biases ? count * (1 + 2 * inner + K) : 0);
    for (auto& one : biases) one = random.number();
    const auto biases_of = [&](size_t expert, size_t part) -> const float* {
        return has_biases ? biases.data() + count + expert * (2 * inner + K) + part * inner : nullptr;
    };
    if (has_biases) {
        std::copy_n(biases.begin(), count, reinterpret_cast<float*>(memory.data() + router_bias_at(experts)));
        const auto write = [&](const Matmul& matmul, size_t at, size_t expert, size_t part) {
            auto* to = reinterpret_cast<float*>(memory.data() + at) + expert * bias_size(matmul);
            pack_bias(matmul, biases_of(expert, part), to);
        };
        for (size_t expert = 0; expert < count; ++expert) {
            write(gate_up, gate_up_bias_at(experts), expert, 0);
            write(down, down_bias_at(experts), expert, 2);
        }
    }

    const bool is_bf16 = i % 3 == 1, gives_bf16 = i % 4 == 1;
    const size_t from_bytes = is_bf16 ? 2 : 4, to_bytes = gives_bf16 ? 2 : 4;
    Exact<uint8_t> src(M * K * from_bytes), dst(M * K * to_bytes), alone(K * to_bytes);
    std::vector<double> numbers(M * K);
    // In about half of the cases, one row contains an infinite number, which must not affect the results of the other rows.
    const size_t not_finite = random.below(2 * M);
    for (size_t k = 0; k < numbers.size(); ++k) {
        const float value = k == not_finite * K + 5 ? INFINITY : random.number() * 4;
        numbers[k] = double(value);
        if (is_bf16) reinterpret_cast<uint16_t*>(src.data())[k] = to_bf16(value);
        else reinterpret_cast<float*>(src.data())[k] = value;
    }
    run(*tested.kernels, experts, memory.data(), M, {src.data(), is_bf16}, {dst.data(), gives_bf16});

    const RowRounding rounding{tested.rounding, double(gate_up.terms == 1 ? 127 : 127 << TERM_BITS)};
    for (size_t row = 0; row < M; ++row) {
        const auto found = [&](size_t column) {
            const size_t at = row * K + column;
            return double(gives_bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(dst.data())[at])
                                     : reinterpret_cast<const float*>(dst.data())[at]);
        };
        if (row == not_finite) {
            // The clamped activation can turn infinite numbers into finite ones, so its results are not checked.
            for (size_t column = 0; column < K && gate_up.epilogue == Epilogue::swiglu; ++column)
                if (std::isfinite(found(column)))
                    FAIL("%s, case %zu: a row with an infinite number has a finite result", tested.name, i);
            continue;
        }
        run(*tested.kernels, experts, memory.data(), 1, {src.data() + row * K * from_bytes, is_bf16},
            {alone.data(), gives_bf16});
        if (std::memcmp(alone.data(), dst.data() + row * alone.size(), alone.size()) != 0)
            FAIL("%s, case %zu: row %zu of %zu depends on other rows", tested.name, i, row, M);
        if (row > 3 && row % 9 != 0) continue;

        const Bounded x{{numbers.begin() + long(row * K), numbers.begin() + long((row + 1) * K)}, std::vector<double>(K)};
        std::vector<double> logits(count);
        for (size_t expert = 0; expert < count; ++expert)
            for (size_t k = 0; k < K; ++k) logits[expert] += double(router[expert * K + k]) * x.values[k];
        for (size_t expert = 0; has_biases && expert < count; ++expert) logits[expert] += double(biases[expert]);
        std::vector<size_t> order(count);
        std::iota(order.begin(), order.end(), size_t(0));
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
        double sum = 0;
        for (size_t one = 0; one < used; ++one) sum += std::exp(logits[order[one]] - logits[order[0]]);
        std::vector<double> expected(K), off(K);
        for (size_t one = 0; one < used; ++one) {
            const size_t expert = order[one];
            const auto gates = product(gate, expert * inner, inner, biases_of(expert, 0), x, rounding);
            const auto activated =
                swiglu(gates, product(up, expert * inner, inner, biases_of(expert, 1), x, rounding), gate_up.epilogue);
            const auto result = product(second, expert * K, K, biases_of(expert, 2), activated, rounding);
            const double share = std::exp(logits[expert] - logits[order[0]]) / sum;
            for (size_t column = 0; column < K; ++column) {
                expected[column] += share * result.values[column];
                off[column] += share * (result.off[column] + std::abs(result.values[column]) * 1e-4);
            }
        }
        for (size_t column = 0; column < K; ++column) {
            const double allowed = off[column] + std::abs(expected[column]) * (gives_bf16 ? 1.0 / 128 : 1e-5) + 1e-30;
            if (!(std::abs(found(column) - expected[column]) <= allowed))
                FAIL(
                    "%s, case %zu: %zu of %zu experts, K %zu, inner %zu, row %zu of %zu, column %zu: %g, not %g (tolerance: "
                    "%g)",
                    tested.name, i, used, count, K, inner, row, M, column, found(column), expected[column], allowed);
        }
    }
}

}  // namespace

size_t check_experts() {
    size_t tried = 0;
    for (const auto& tested : tested_kernels()) {
        if (!tested.kernels) continue;
        for (size_t i = 0; i < 120; ++i, ++tried) check_case(tested, i);
    }
    return tried;
}
