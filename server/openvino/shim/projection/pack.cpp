#include "pack.hpp"

#include <cmath>
#include <cstring>

#include <openvino/core/type/float16.hpp>
#include <openvino/op/ops.hpp>

#include "../graph/weights.hpp"
#include "../threads.hpp"

namespace ovfleet::projection {
namespace {

namespace op = ov::op;
using Constant = op::v0::Constant;

size_t size_of(const Constant& constant) { return ov::shape_size(constant.get_shape()); }

bool is_integers(const Constant& constant) {
    const auto type = constant.get_element_type();
    return type == ov::element::u4 || type == ov::element::i4 || type == ov::element::u8 || type == ov::element::i8;
}

bool is_e2m1(const Constant& constant) { return constant.get_element_type() == ov::element::f4e2m1; }

}  // namespace

std::optional<GraphWeight> weight_of(const std::shared_ptr<ov::Node>& node) {
    auto at = node;
    if (ov::is_type<op::v0::Convert>(at)) at = at->get_input_node_shared_ptr(0);
    if (ov::is_type<op::v1::Reshape>(at)) at = at->get_input_node_shared_ptr(0);
    auto scaled = ov::as_type_ptr<op::v1::Multiply>(at);
    if (!scaled || node->get_output_partial_shape(0).is_dynamic()) return {};
    GraphWeight weight;
    weight.scales = constant_of(scaled->get_input_node_shared_ptr(1));
    at = scaled->get_input_node_shared_ptr(0);
    if (ov::is_type<op::v1::Subtract>(at)) {
        weight.zeros = constant_of(at->get_input_node_shared_ptr(1));
        if (!weight.zeros) return {};
        at = at->get_input_node_shared_ptr(0);
    }
    if (!ov::is_type<op::v0::Convert>(at)) return {};
    weight.quants = constant_of(at);
    if (!weight.quants || !weight.scales || !(is_integers(*weight.quants) || is_e2m1(*weight.quants))) return {};
    const auto whole = node->get_output_shape(0), parts = weight.quants->get_shape();
    // A matrix or a stack of matrices, whose rows may be divided into groups.
    if (whole.size() < 2 || whole.size() > 3 || parts.size() < whole.size() || parts.size() > whole.size() + 1) return {};
    if (!std::equal(whole.begin(), whole.end() - 1, parts.begin())) return {};
    weight.K = whole.back();
    weight.N = ov::shape_size(whole) / std::max<size_t>(weight.K, 1);
    weight.group = parts.back();
    if (weight.group == 0 || size_of(*weight.quants) != weight.N * weight.K) return {};
    const size_t groups = weight.K / weight.group;
    for (const auto& each : {weight.scales, weight.zeros}) {
        if (!each) continue;
        const bool is_real = each->get_element_type().is_real();
        if (size_of(*each) != 1 && size_of(*each) != weight.N * groups) return {};
        if (!is_real && (each == weight.scales || !is_integers(*each))) return {};
    }
    if (is_e2m1(*weight.quants) && (weight.zeros || weight.group % SRC_GROUP != 0)) return {};
    if (weight.group != 16 && weight.group % SRC_GROUP != 0) return {};
    return weight.K % SRC_GROUP == 0 ? std::make_optional(weight) : std::nullopt;
}

void describe(const GraphWeight& weight, Matmul& matmul) {
    describe(std::vector<const GraphWeight*>{&weight}, matmul);
    matmul.N = weight.N;
}

void describe(const std::vector<const GraphWeight*>& weights, Matmul& matmul) {
    matmul.K = weights.front()->K;
    matmul.bits = 0;
    matmul.group = SRC_GROUP;
    float most = 0;
    size_t in_e2m1 = 0;
    for (const auto* weight : weights) {
        matmul.bits = std::max(matmul.bits, weight->quants->get_element_type().bitwidth());
        matmul.group = std::min(matmul.group, weight->group);
        in_e2m1 += is_e2m1(*weight->quants) ? 1 : 0;
        for (const auto scale : weight->scales->cast_vector<float>()) most = std::max(most, std::abs(scale));
    }
    // Together with integers, the quants of E2M1 have 8 bits.
    if (in_e2m1 > 0) matmul.bits = in_e2m1 == weights.size() ? E2M1_BITS : 8;
    int exponent = 0;
    std::frexp(most, &exponent);
    // With this factor, the largest scale is below 2^15.
    matmul.scale_factor = std::ldexp(1.0f, most > 0 && std::isfinite(most) ? exponent - 15 : 0);
}

WeightReader::WeightReader(const GraphWeight& weight)
    : constant_(weight.quants),
      quants_(static_cast<const uint8_t*>(constant_->get_data_ptr())),
      bits_(constant_->get_element_type().bitwidth()),
      is_e2m1_(is_e2m1(*constant_)),
      N_(weight.N),
      K_(weight.K),
      group_(weight.group),
      offset_(!is_e2m1_ && constant_->get_element_type().is_signed() ? 1u << (bits_ - 1) : 0),
      scales_(weight.scales->cast_vector<float>()) {
    if (weight.zeros) zeros_ = weight.zeros->cast_vector<float>();
    if (!is_e2m1_) return;
    zeros_ = {E2M1_ZERO};
    for (auto& scale : scales_) scale /= 2;
}

float WeightReader::zero(size_t row, size_t column) const {
    const float zero = zeros_.empty() ? 0 : zeros_[zeros_.size() == 1 ? 0 : group_at(row, column)];
    // The offset is added whatever type the zero points have.
    return zero + float(offset_);
}

float WeightReader::scale(size_t row, size_t column) const { return scales_[scales_.size() == 1 ? 0 : group_at(row, column)]; }

void pack(const GraphWeight& weight, const Matmul& matmul, uint8_t* to) {
    const WeightReader reader(weight);
    pack({{&reader, 0, reader.N()}}, matmul, to);
}

void pack_bias(const Matmul& matmul, const float* bias, float* to) {
    for (size_t i = 0; i < num_n_blocks(matmul) * N_BLOCK; ++i) {
        const auto row = weight_row(matmul, i / N_BLOCK, i % N_BLOCK);
        to[i] = row ? bias[*row] : 0;
    }
}

void pack(const std::vector<WeightRows>& parts, const Matmul& matmul, uint8_t* to) {
    const size_t half = N_BLOCK / 2;
    parallel_for(num_n_blocks(matmul), 1, [&](size_t block) {
        uint8_t* at = to + block * n_block_bytes(matmul);
        std::memset(at, 0, n_block_bytes(matmul));
        for (size_t group = 0; group < num_groups(matmul); ++group, at += group_bytes(matmul)) {
            for (size_t in_block = 0; in_block < N_BLOCK; ++in_block) {
                auto row = weight_row(matmul, block, in_block);
                if (!row) continue;
                auto part = parts.begin();
                for (; *row >= part->count; ++part) *row -= part->count;
                const auto& weight = *part->weight;
                const size_t from = part->first + *row, column = group * matmul.group;
                auto* halves = reinterpret_cast<ov::float16*>(at);
                halves[in_block] = ov::float16(weight.scale(from, column) / matmul.scale_factor);
                halves[N_BLOCK + in_block] = ov::float16(weight.zero(from, column));
                uint8_t* fours = at + N_BLOCK * 2 * sizeof(uint16_t);
                for (size_t i = 0; i < matmul.group; ++i) {
                    const auto quant =
                        uint8_t(matmul.bits == E2M1_BITS ? weight.stored(from, column + i) : weight.quant(from, column + i));
                    // The fours of the first 16 columns come before those of the other columns. Two fours of 4-bit weights
                    // share bytes.
                    const size_t bits = stored_bits(matmul.bits);
                    const size_t four = i / 4 / (8 / bits), at_four = in_block % half * 4 + i % 4;
                    const size_t shift = bits == 4 && i / 4 % 2 == 1 ? 4 : 0;
                    fours[(four * 2 + in_block / half) * half * 4 + at_four] |= uint8_t(quant << shift);
                }
            }
        }
    });
}

}  // namespace ovfleet::projection
