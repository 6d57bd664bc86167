#include "pack.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

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

// Returns the rows in the model's files from which a constant is read, or an empty list if the constant is in memory or any
// part of it is not read from a file.
std::vector<TensorRows> rows_in_files(const Constant& constant) {
    std::vector<TensorRows> rows;
    const auto* parts = deferred_parts(constant);
    for (size_t i = 0; parts && i < parts->size(); ++i) {
        if (!(*parts)[i].rows.source) return {};
        rows.push_back((*parts)[i].rows);
    }
    return rows;
}

// The number of rows that a thread reads or checks at a time.
constexpr size_t ROWS_AT_ONCE = 64;

constexpr size_t GROUPS_PER_SUPER_BLOCK = SUPER_BLOCK / SUPER_GROUP;

// The scales of 256 weights of a row.
struct SuperScales {
    ov::float16 super_scale;
    int8_t quantized[GROUPS_PER_SUPER_BLOCK];
};

// Splits the scales of 256 weights into a super-scale and quantized scales. Returns false if no such split is exact.
bool split_scales(const float* scales, SuperScales& to) {
    float largest = 0;
    for (size_t i = 0; i < GROUPS_PER_SUPER_BLOCK; ++i) {
        if (!std::isfinite(scales[i])) return false;
        if (std::abs(scales[i]) > std::abs(largest)) largest = scales[i];
    }
    // In most files, the scale with the largest magnitude is quantized to -128. In other files, it is quantized to an
    // integer with a smaller magnitude.
    for (int most = -128; most < 0; ++most) {
        to.super_scale = ov::float16(largest / float(most));
        const float step = float(to.super_scale), inverse = step == 0 ? 0 : 1 / step;
        const auto splits = [&](size_t i) {
            const float nearest = std::nearbyint(scales[i] * inverse);
            if (nearest * step != scales[i] || nearest < -128 || nearest > 127) return false;
            to.quantized[i] = int8_t(nearest);
            return true;
        };
        size_t split = 0;
        while (split < GROUPS_PER_SUPER_BLOCK && splits(split)) ++split;
        if (split == GROUPS_PER_SUPER_BLOCK) return true;
    }
    return false;
}

// Returns whether all rows of a constant that is read from the model's files have a property, or no value if `rows_in_files`
// returns no rows.
std::optional<bool> all_rows_in_files(const Constant& constant, bool TensorRows::* property) {
    const auto rows = rows_in_files(constant);
    if (rows.empty()) return {};
    return std::all_of(rows.begin(), rows.end(), [&](const TensorRows& part) { return part.*property; });
}

// Whether `fits` returns true for each row below `rows`. After a row that does not fit, the remaining rows are not checked.
template <typename Fits>
bool all_rows_fit(size_t rows, const Fits& fits) {
    std::atomic<bool> all{true};
    parallel_for_unbound(rows, ROWS_AT_ONCE, [&](size_t row) {
        if (all.load(std::memory_order_relaxed) && !fits(row)) all.store(false, std::memory_order_relaxed);
    });
    return all;
}

// Whether the quants of a weight fit into 6 bits. For a weight in memory, this function checks its content, because a graph
// that was read from the cache does not contain the tensor types of the GGUF file.
bool quants_fit_six_bits(const GraphWeight& weight) {
    const auto type = weight.quants->get_element_type();
    if (type != ov::element::i8 && type != ov::element::u8) return false;
    if (const auto in_files = all_rows_in_files(*weight.quants, &TensorRows::fits_six_bits)) return *in_files;
    if (deferred_parts(*weight.quants)) return false;
    const auto* quants = static_cast<const uint8_t*>(weight.quants->get_data_ptr());
    const uint8_t offset = type.is_signed() ? 32 : 0;
    return all_rows_fit(weight.N, [&](size_t row) {
        const uint8_t* first = quants + row * weight.K;
        return std::all_of(first, first + weight.K, [&](uint8_t quant) { return uint8_t(quant + offset) < 64; });
    });
}

// Whether a weight has signed 8-bit quants in groups of 16 without zero points, and its scales are products of super-scales and
// integers.
bool scales_are_super_scaled(const GraphWeight& weight) {
    if (weight.quants->get_element_type() != ov::element::i8 || weight.zeros) return false;
    if (weight.group != SUPER_GROUP || weight.K % SUPER_BLOCK != 0 || size_of(*weight.scales) == 1) return false;
    if (const auto in_files = all_rows_in_files(*weight.scales, &TensorRows::has_super_scales)) return *in_files;
    if (deferred_parts(*weight.scales)) return false;
    const auto scales = weight.scales->cast_vector<float>();
    const size_t groups = weight.K / SUPER_GROUP;
    return all_rows_fit(weight.N, [&](size_t row) {
        SuperScales split;
        const float* first = scales.data() + row * groups;
        for (size_t group = 0; group < groups; group += GROUPS_PER_SUPER_BLOCK)
            if (!split_scales(first + group, split)) return false;
        return true;
    });
}

// Returns the largest magnitude among a weight's scales.
float largest_scale(const GraphWeight& weight) {
    std::vector<float> largest{0};
    const auto add = [](float& most, const std::vector<float>& scales) {
        for (const float scale : scales) most = std::max(most, std::abs(scale));
    };
    const size_t groups = weight.K / weight.group;
    const auto file_rows = rows_in_files(*weight.scales);
    for (const auto& rows : file_rows) {
        const size_t first = largest.size(), parts = div_up(rows.count, ROWS_AT_ONCE);
        largest.resize(first + parts);
        parallel_for_unbound(parts, 1, [&](size_t part) {
            thread_local std::vector<float> scales;
            const size_t at = part * ROWS_AT_ONCE, count = std::min(ROWS_AT_ONCE, rows.count - at);
            scales.resize(count * groups);
            rows.source->read(rows.tensor, rows.first + at, count, nullptr, scales.data(), nullptr);
            add(largest[first + part], scales);
        });
    }
    if (file_rows.empty()) {
        fill(*weight.scales);
        add(largest[0], weight.scales->cast_vector<float>());
    }
    return *std::max_element(largest.begin(), largest.end());
}

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
    // The weight is a matrix or a stack of matrices. The rows may be divided into groups.
    if (whole.size() < 2 || whole.size() > 3 || parts.size() < whole.size() || parts.size() > whole.size() + 1) return {};
    if (!std::equal(whole.begin(), whole.end() - 1, parts.begin())) return {};
    weight.K = whole.back();
    weight.N = ov::shape_size(whole) / std::max<size_t>(weight.K, 1);
    weight.group = parts.back();
    if (weight.group == 0 || size_of(*weight.quants) != weight.N * weight.K) return {};
    // Each scale and zero point must belong to a group of a row, and not to a column. A single scale or zero point applies to
    // all groups.
    auto of_groups = parts;
    of_groups.back() = 1;
    for (const auto& each : {weight.scales, weight.zeros}) {
        if (!each) continue;
        const bool is_real = each->get_element_type().is_real();
        if (size_of(*each) != 1 && each->get_shape() != of_groups) return {};
        if (!is_real && (each == weight.scales || !is_integers(*each))) return {};
    }
    if (is_e2m1(*weight.quants) && (weight.zeros || weight.group % SRC_GROUP != 0)) return {};
    if (weight.group != 16 && weight.group % SRC_GROUP != 0) return {};
    return weight.K % SRC_GROUP == 0 ? std::make_optional(weight) : std::nullopt;
}

void describe(const GraphWeight& weight, Matmul& matmul) {
    describe_form({&weight}, matmul);
    set_scale_factor({&weight}, matmul);
    matmul.N = weight.N;
}

void describe_form(const std::vector<const GraphWeight*>& weights, Matmul& matmul) {
    matmul.K = weights.front()->K;
    matmul.bits = 0;
    matmul.group = SRC_GROUP;
    matmul.scale_factor = 1;
    size_t in_e2m1 = 0;
    for (const auto* weight : weights) {
        matmul.bits = std::max(matmul.bits, weight->quants->get_element_type().bitwidth());
        matmul.group = std::min(matmul.group, weight->group);
        in_e2m1 += is_e2m1(*weight->quants) ? 1 : 0;
    }
    // If only some of the weights are in E2M1, all quants of the matrix have 8 bits.
    if (in_e2m1 > 0) matmul.bits = in_e2m1 == weights.size() ? E2M1_BITS : 8;
    const auto all = [&](bool (*holds)(const GraphWeight&)) {
        return std::all_of(weights.begin(), weights.end(), [&](const GraphWeight* weight) { return holds(*weight); });
    };
    const bool is_supported = matmul.group != SUPER_GROUP || all(scales_are_super_scaled);
    if (matmul.bits == 8 && is_supported && all(quants_fit_six_bits)) matmul.bits = SIX_BITS;
    // Zero points must have the same type as the quants, so that the difference between a quant and its zero point has at most
    // 8 bits and a sign.
    const auto is_per_channel = [](const GraphWeight& weight) {
        const bool has_zeros_of_type = weight.zeros && weight.zeros->get_element_type() == weight.quants->get_element_type();
        return weight.group == weight.K && (!weight.zeros || has_zeros_of_type);
    };
    matmul.per_channel = (matmul.bits == 4 || matmul.bits == 8) && in_e2m1 == 0 && all(is_per_channel);
    const auto has_wide_groups = [](const GraphWeight& weight) { return weight.group % WIDE_GROUP == 0; };
    if ((matmul.bits == 4 || matmul.bits == 8) && all(has_wide_groups)) matmul.group = WIDE_GROUP;
}

void set_scale_factor(const std::vector<const GraphWeight*>& weights, Matmul& matmul) {
    if (has_super_scales(matmul)) return;
    float most = 0;
    for (const auto* weight : weights) most = std::max(most, largest_scale(*weight));
    int exponent = 0;
    std::frexp(most, &exponent);
    // Divided by this factor, the largest scale is below 2^15.
    matmul.scale_factor = std::ldexp(1.0f, most > 0 && std::isfinite(most) ? exponent - 15 : 0);
}

uint32_t WeightRows::four_quants(size_t row, size_t four, size_t bits) const {
    const uint8_t* at = quants_ + row * quant_bytes_per_row_;
    uint32_t quants = 0;
    if (bits_ == 8) {
        std::memcpy(&quants, at + four * 4, 4);
    } else {
        uint16_t halves;
        std::memcpy(&halves, at + four * 2, 2);
        quants = (halves | uint32_t(halves) << 8) & 0x00ff00ff;
        quants = (quants | quants << 4) & 0x0f0f0f0f;
    }
    // Add 32 to signed quants, modulo 64.
    if (bits == SIX_BITS) return (quants ^ (flipped_ ? 0x20202020 : 0)) & 0x3f3f3f3f;
    if (!is_e2m1_) return quants ^ flipped_;
    if (bits == E2M1_BITS) return quants;
    uint32_t integers = 0;
    for (size_t shift = 0; shift < 32; shift += 8) integers |= uint32_t(quant_of_e2m1(quants >> shift & 15)) << shift;
    return integers;
}

WeightReader::WeightReader(const GraphWeight& weight)
    : weight_(weight), groups_(weight.K / weight.group), bits_(weight.quants->get_element_type().bitwidth()) {
    file_rows_ = rows_in_files(*weight.quants);
    if (!file_rows_.empty()) return;
    for (const auto& constant : {weight.quants, weight.scales, weight.zeros})
        if (constant) fill(*constant);
    scales_ = weight.scales->cast_vector<float>();
    if (weight.zeros) zeros_ = weight.zeros->cast_vector<float>();
}

void WeightReader::read(size_t first, size_t count, WeightRows& rows) const {
    rows.is_e2m1_ = is_e2m1(*weight_.quants);
    const bool is_signed = !rows.is_e2m1_ && weight_.quants->get_element_type().is_signed();
    rows.bits_ = bits_;
    rows.quant_bytes_per_row_ = weight_.K * bits_ / 8;
    rows.offset_ = rows.is_e2m1_ ? E2M1_ZERO : is_signed ? float(1 << (bits_ - 1)) : 0;
    rows.step_ = rows.is_e2m1_ ? 0.5f : 1;
    rows.flipped_ = is_signed ? (bits_ == 8 ? 0x80808080 : 0x08080808) : 0;
    if (!file_rows_.empty()) return read_file(first, count, rows);
    rows.quants_ = static_cast<const uint8_t*>(weight_.quants->get_data_ptr()) + first * rows.quant_bytes_per_row_;
    // A single scale or zero point applies to all groups.
    rows.scales_per_row_ = scales_.size() == 1 ? 0 : groups_;
    rows.scales_ = scales_.data() + first * rows.scales_per_row_;
    rows.zeros_per_row_ = zeros_.size() == 1 ? 0 : groups_;
    rows.zeros_ = zeros_.empty() ? nullptr : zeros_.data() + first * rows.zeros_per_row_;
}

void WeightReader::read_file(size_t first, size_t count, WeightRows& rows) const {
    const size_t zero_bits = weight_.zeros ? weight_.zeros->get_element_type().bitwidth() : 0;
    rows.quants_read_.resize(count * rows.quant_bytes_per_row_);
    rows.scales_read_.resize(count * groups_);
    rows.zeros_converted_.resize(weight_.zeros ? count * groups_ : 0);
    size_t done = 0, skipped = first;
    for (const auto& part : file_rows_) {
        if (skipped >= part.count) {
            skipped -= part.count;
            continue;
        }
        const size_t now = std::min(part.count - skipped, count - done);
        rows.zeros_read_.resize((now * groups_ * zero_bits + 7) / 8);
        part.source->read(part.tensor, part.first + skipped, now, rows.quants_read_.data() + done * rows.quant_bytes_per_row_,
                          rows.scales_read_.data() + done * groups_, weight_.zeros ? rows.zeros_read_.data() : nullptr);
        float* zeros = rows.zeros_converted_.data() + done * groups_;
        for (size_t i = 0; i < now * groups_ && weight_.zeros; ++i) {
            if (zero_bits == 4) {
                zeros[i] = float(rows.zeros_read_[i / 2] >> i % 2 * 4 & 15);
            } else {
                ov::float16 half;
                std::memcpy(static_cast<void*>(&half), rows.zeros_read_.data() + i * sizeof(half), sizeof(half));
                zeros[i] = float(half);
            }
        }
        done += now;
        skipped = 0;
        if (done == count) break;
    }
    OPENVINO_ASSERT(done == count, "the files of the model contain only ", done, " of ", count, " rows of a weight");
    rows.quants_ = rows.quants_read_.data();
    rows.scales_ = rows.scales_read_.data();
    rows.zeros_ = weight_.zeros ? rows.zeros_converted_.data() : nullptr;
    rows.scales_per_row_ = rows.zeros_per_row_ = groups_;
}

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

namespace {

// Consecutive rows of a part, starting at `first`, that are packed at consecutive positions of a block, starting at `in_block`.
struct PackedRows {
    const WeightPart* part;
    size_t first, count, in_block;
};

// The rows that are packed in a block, in runs that are as long as possible.
std::vector<PackedRows> rows_of_block(const std::vector<WeightPart>& parts, const Matmul& matmul, size_t block) {
    std::vector<PackedRows> runs;
    for (size_t in_block = 0; in_block < N_BLOCK; ++in_block) {
        auto row = weight_row(matmul, block, in_block);
        if (!row) continue;
        auto part = parts.data();
        for (; *row >= part->count; ++part) *row -= part->count;
        if (!runs.empty()) {
            auto& last = runs.back();
            const bool follows = last.part == part && last.first + last.count == *row && last.in_block + last.count == in_block;
            if (follows) {
                ++last.count;
                continue;
            }
        }
        runs.push_back({part, *row, 1, in_block});
    }
    return runs;
}

// Writes 16 quants of 6 bits: the group of four quants with the index `first`, and the three groups after it.
void pack_six_bits(const WeightRows& rows, size_t row, size_t first, uint8_t* to) {
    const uint32_t last = rows.four_quants(row, first + 3, SIX_BITS);
    for (size_t i = 0; i < 3; ++i, to += N_BLOCK * 4) {
        const uint32_t packed = rows.four_quants(row, first + i, SIX_BITS) | (last >> 2 * i & 0x03030303) << 6;
        std::memcpy(to, &packed, sizeof(packed));
    }
}

// Writes a row at its position in a block of columns.
void pack_row(const WeightRows& rows, size_t row, size_t weight_group, const Matmul& matmul, size_t in_block, uint8_t* at) {
    const size_t bits = stored_bits(matmul.bits), four_columns = bits == 4 ? 8 : 4;
    const size_t bytes = group_bytes(matmul);
    for (size_t column = 0; column < matmul.K; column += matmul.group, at += bytes) {
        auto* halves = reinterpret_cast<ov::float16*>(at);
        const size_t group = column / weight_group;
        halves[in_block] = ov::float16(rows.scale(row, group) / matmul.scale_factor);
        halves[N_BLOCK + in_block] = ov::float16(rows.zero(row, group, matmul.bits));
        // A block contains four consecutive weights of each of its columns, then the next four of each column, and so on. With
        // 4 bits, eight consecutive weights of a column share four bytes.
        uint8_t* four = at + N_BLOCK * 2 * sizeof(uint16_t) + in_block * 4;
        if (matmul.bits == SIX_BITS) {
            for (size_t i = 0; i < matmul.group; i += 16, four += SIX_BIT_BYTES)
                pack_six_bits(rows, row, (column + i) / 4, four);
            continue;
        }
        for (size_t i = 0; i < matmul.group; i += four_columns, four += N_BLOCK * 4) {
            uint32_t quants = rows.four_quants(row, (column + i) / 4, matmul.bits);
            if (bits == 4) quants |= rows.four_quants(row, (column + i) / 4 + 1, matmul.bits) << 4;
            std::memcpy(four, &quants, sizeof(quants));
        }
    }
}

// Writes a row with super-scales at its position in a block of columns.
void pack_row_with_super_scales(const WeightRows& rows, size_t row, const Matmul& matmul, size_t in_block, uint8_t* block) {
    uint8_t* groups = block + super_scale_bytes(matmul.K);
    for (size_t first = 0; first < num_groups(matmul); first += GROUPS_PER_SUPER_BLOCK) {
        float scales[GROUPS_PER_SUPER_BLOCK];
        SuperScales split;
        for (size_t i = 0; i < GROUPS_PER_SUPER_BLOCK; ++i) scales[i] = rows.scale(row, first + i);
        // The split fails only for scales that are not finite. The products with these weights are not finite either, so NaN
        // can replace the super-scale.
        if (!split_scales(scales, split)) {
            split.super_scale = std::numeric_limits<ov::float16>::quiet_NaN();
            std::fill_n(split.quantized, GROUPS_PER_SUPER_BLOCK, int8_t(1));
        }
        auto* super_scales = reinterpret_cast<ov::float16*>(block + super_scale_bytes(first * SUPER_GROUP));
        super_scales[in_block] = split.super_scale;
        for (size_t i = 0; i < GROUPS_PER_SUPER_BLOCK; ++i) {
            const size_t group = first + i;
            groups[quantized_scales_at(group) + in_block] = uint8_t(split.quantized[i]);
            pack_six_bits(rows, row, group * SUPER_GROUP / 4, groups + super_quants_at(group) + in_block * 4);
        }
    }
}

void pack_block(const std::vector<WeightPart>& parts, const Matmul& matmul, size_t block, uint8_t* to) {
    thread_local WeightRows rows;
    std::memset(to, 0, n_block_bytes(matmul));
    for (const auto& run : rows_of_block(parts, matmul, block)) {
        const auto& weight = *run.part->weight;
        weight.read(run.part->first + run.first, run.count, rows);
        for (size_t row = 0; row < run.count; ++row)
            if (has_super_scales(matmul)) pack_row_with_super_scales(rows, row, matmul, run.in_block + row, to);
            else pack_row(rows, row, weight.group(), matmul, run.in_block + row, to);
    }
}

}  // namespace

void pack(const std::vector<WeightPart>& parts, const Matmul& matmul, uint8_t* to) {
    const auto pack_nth = [&](size_t block) { pack_block(parts, matmul, block, to + block * n_block_bytes(matmul)); };
    parallel_for_unbound(num_n_blocks(matmul), 1, pack_nth);
}

}  // namespace ovfleet::projection
