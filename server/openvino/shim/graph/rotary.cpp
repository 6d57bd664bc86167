// Rewrites rotary embeddings. GGUF models of the llama family rotate adjacent pairs (x0, x1), (x2, x3) …. In the graph, this
// rotation is a chain of Reshape, Split and Concat, which no plugin fuses: it is slow, and inaccurate in bf16. Rotating halves
// (x0, xd/2), (x1, xd/2+1) … is equivalent if the rows of the projection before the rotation are permuted: attention scores do
// not change if q and k are permuted in the same way.
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "nodes.hpp"
#include "rotary.hpp"
#include "weights.hpp"

namespace {

using ovfleet::integer_constant;
namespace op = ov::op;
using NodePtr = std::shared_ptr<ov::Node>;

using ovfleet::as;

// Matches Reshape(Broadcast(Unsqueeze(table))), with a table whose rows have half the size of a head.
bool pairwise_table(const ov::Output<ov::Node>& value, ov::Output<ov::Node>& table) {
    auto reshape = as<op::v1::Reshape>(value);
    if (!reshape) return false;
    auto broadcast = reshape->input_value(0);
    if (!as<op::v3::Broadcast>(broadcast) && !as<op::v1::Broadcast>(broadcast)) return false;
    auto unsqueeze = as<op::v0::Unsqueeze>(broadcast.get_node()->input_value(0));
    if (!unsqueeze) return false;
    table = unsqueeze->input_value(0);
    return true;
}

// A rotation of pairs: Add(x * cos, rotated(x) * sin).
struct PairRotation {
    NodePtr add;
    ov::Output<ov::Node> x, cos, sin;
    std::string tensor;
    size_t head_size;
};

// Matches Reshape(Concat(-Split(Reshape(x)).1, Split.0)).
bool rotated_pairs(const ov::Output<ov::Node>& value, ov::Output<ov::Node>& x) {
    auto reshape = as<op::v1::Reshape>(value);
    auto concat = reshape ? as<op::v0::Concat>(reshape->input_value(0)) : nullptr;
    if (!concat || concat->get_input_size() != 2) return false;
    auto negated = as<op::v1::Multiply>(concat->input_value(0));
    auto split = as<op::v1::Split>(concat->input_value(1));
    if (!negated || !split || negated->input_value(0).get_node() != split.get()) return false;
    if (negated->input_value(0).get_index() != 1 || concat->input_value(1).get_index() != 0) return false;
    auto pairs = as<op::v1::Reshape>(split->input_value(0));
    if (!pairs) return false;
    x = pairs->input_value(0);
    return true;
}

// If x is the reshaped output of a projection, returns the name that the weight of the projection has in the file. Otherwise,
// returns an empty string.
std::string projection(const ov::Output<ov::Node>& x) {
    auto reshape = as<op::v1::Reshape>(x);
    auto matmul = reshape ? as<op::v0::MatMul>(reshape->input_value(0)) : nullptr;
    if (!matmul) return {};
    const auto prefix = ovfleet::WEIGHT_PREFIX;
    const std::string& name = matmul->get_input_node_ptr(1)->get_friendly_name();
    return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : std::string();
}

bool match(const NodePtr& node, PairRotation& found) {
    auto add = ov::as_type_ptr<op::v1::Add>(node);
    auto straight = add ? as<op::v1::Multiply>(add->input_value(0)) : nullptr;
    auto rotated = add ? as<op::v1::Multiply>(add->input_value(1)) : nullptr;
    if (!straight || !rotated) return false;
    ov::Output<ov::Node> x;
    if (!pairwise_table(straight->input_value(1), found.cos) || !pairwise_table(rotated->input_value(1), found.sin) ||
        !rotated_pairs(rotated->input_value(0), x) || x != straight->input_value(0))
        return false;
    const auto& shape = x.get_partial_shape();
    if (shape.rank().is_dynamic() || shape.size() == 0) return false;
    const auto size = shape.rbegin();
    if (size->is_dynamic()) return false;
    found.add = add;
    found.x = x;
    found.head_size = size->get_length();
    found.tensor = projection(x);
    return true;
}

// A rotation to be written as a rotation of halves, in the form that plugins fuse. Each row of the tables has half the size of
// a head.
struct HalfRotation {
    NodePtr node;
    ov::Output<ov::Node> x, cos, sin;
    size_t head_size;
};

// Replaces a rotation with x * cos + rotated * sin. `doubled` contains the tables for whole heads, which rotations with the
// same tables share.
void rewrite(const HalfRotation& rotation, std::map<ov::Output<ov::Node>, NodePtr>& doubled) {
    const auto twice = [&](const ov::Output<ov::Node>& table) {
        auto& concat = doubled[table];
        if (!concat) concat = std::make_shared<op::v0::Concat>(ov::OutputVector{table, table}, -1);
        return concat;
    };
    const int64_t half = rotation.head_size / 2;
    // The axis is 3 instead of -1, because the plugins' fusion matches only this value.
    auto axis = op::v0::Constant::create(ov::element::i64, {}, {3});
    auto halves = std::make_shared<op::v1::VariadicSplit>(rotation.x, axis, integer_constant({half, half}));
    auto minus = op::v0::Constant::create(ov::element::f32, {1, 1, 1, 1}, {-1.0f});
    auto negated = std::make_shared<op::v1::Multiply>(halves->output(1), minus);
    auto rotated = std::make_shared<op::v0::Concat>(ov::OutputVector{negated, halves->output(0)}, -1);
    auto sum = std::make_shared<op::v1::Add>(std::make_shared<op::v1::Multiply>(rotation.x, twice(rotation.cos)),
                                             std::make_shared<op::v1::Multiply>(rotated, twice(rotation.sin)));
    sum->set_friendly_name(rotation.node->get_friendly_name());
    ov::replace_node(rotation.node, sum);
}

// Matches the product of a table and an output of `split`, or of any split if `split` is null.
bool is_half_product(const ov::Output<ov::Node>& value, NodePtr& split, size_t& half, ov::Output<ov::Node>& table) {
    auto product = as<op::v1::Multiply>(value);
    auto halves = product ? as<op::v1::VariadicSplit>(product->input_value(0)) : nullptr;
    if (!halves || (split && split != halves)) return false;
    split = halves;
    half = product->input_value(0).get_index();
    table = product->input_value(1);
    return true;
}

// Matches Concat(x0 * cos - x1 * sin, x1 * cos + x0 * sin), where the subtraction is the addition of a product with -1.
bool match(const NodePtr& node, HalfRotation& found) {
    auto concat = ov::as_type_ptr<op::v0::Concat>(node);
    auto rank = node->get_output_size() == 1 ? node->get_output_partial_shape(0).rank() : ov::Rank::dynamic();
    if (!concat || concat->get_input_size() != 2 || rank.is_dynamic() || rank.get_length() != 4) return false;
    if (concat->get_axis() != -1 && concat->get_axis() != 3) return false;
    auto first = as<op::v1::Add>(concat->input_value(0)), second = as<op::v1::Add>(concat->input_value(1));
    auto negated = first ? as<op::v1::Multiply>(first->input_value(1)) : nullptr;
    auto minus = negated ? as<op::v0::Constant>(negated->input_value(1)) : nullptr;
    if (!second || !minus || ov::shape_size(minus->get_shape()) != 1 || minus->cast_vector<float>()[0] != -1) return false;
    NodePtr split;
    size_t half[4];
    ov::Output<ov::Node> cos, sin;
    if (!is_half_product(first->input_value(0), split, half[0], found.cos) ||
        !is_half_product(negated->input_value(0), split, half[1], found.sin) ||
        !is_half_product(second->input_value(0), split, half[2], cos) ||
        !is_half_product(second->input_value(1), split, half[3], sin))
        return false;
    if (half[0] != 0 || half[1] != 1 || half[2] != 1 || half[3] != 0 || cos != found.cos || sin != found.sin) return false;
    auto axis = as<op::v0::Constant>(split->input_value(1)), lengths = as<op::v0::Constant>(split->input_value(2));
    if (!axis || !lengths) return false;
    const auto at = axis->cast_vector<int64_t>(), sizes = lengths->cast_vector<int64_t>();
    const auto size = *split->get_input_partial_shape(0).rbegin();
    if ((at[0] != -1 && at[0] != 3) || sizes.size() != 2 || sizes[0] != sizes[1] || size != 2 * sizes[0]) return false;
    found.node = node;
    found.x = split->input_value(0);
    found.head_size = size.get_length();
    return true;
}

// Returns the projection from whose output x is computed, directly or through reshapes, additions and multiplications. Returns
// null if other operations are in between.
std::shared_ptr<op::v0::MatMul> origin(ov::Output<ov::Node> x) {
    for (int steps = 0; steps < 16; ++steps) {
        if (auto matmul = as<op::v0::MatMul>(x)) return matmul;
        const auto node = x.get_node_shared_ptr();
        if (ov::is_type<op::v1::Reshape>(node)) {
            x = node->input_value(0);
        } else if (ov::is_type<op::v1::Add>(node) || ov::is_type<op::v1::Multiply>(node)) {
            x = node->input_value(ovfleet::is_weight(node->get_input_node_shared_ptr(0)) ? 1 : 0);
        } else {
            return nullptr;
        }
    }
    return nullptr;
}

// Whether the rotated projections are pairs of a q and a k with the same head size, so that both can be permuted in the same
// way.
bool are_permutable(const std::vector<PairRotation>& rotations) {
    std::map<std::string, size_t> sizes;
    for (const auto& one : rotations)
        if (!sizes.emplace(one.tensor, one.head_size).second) return false;
    for (const auto& [tensor, size] : sizes) {
        auto other = tensor;
        const auto at = other.find(".attn_");
        if (at == std::string::npos) return false;
        char& letter = other[at + 6];
        if (letter != 'q' && letter != 'k') return false;
        letter = letter == 'q' ? 'k' : 'q';
        const auto found = sizes.find(other);
        if (found == sizes.end() || found->second != size) return false;
    }
    return true;
}

// Returns the frequencies from which an angle is computed: a constant with `count` elements that is multiplied by positions and
// scalars, possibly as part of a sum of such products. Returns null if no such constant exists.
std::shared_ptr<op::v0::Constant> frequencies(const ov::Output<ov::Node>& angle, size_t count) {
    if (!as<op::v1::Multiply>(angle) && !as<op::v1::Add>(angle)) return nullptr;
    for (const auto& side : angle.get_node()->input_values()) {
        auto constant = as<op::v0::Constant>(side);
        if (constant && count > 1 && ov::shape_size(constant->get_shape()) == count &&
            constant->get_element_type() == ov::element::f32)
            return constant;
        if (auto found = frequencies(side, count)) return found;
    }
    return nullptr;
}

// Whether the first two frequencies of a table have the same ratio as those of a rotary embedding with this base.
bool is_of_base(const op::v0::Constant& table, double base, size_t count) {
    const auto values = table.cast_vector<double>();
    const double step = std::pow(base, -1.0 / double(count));
    return std::abs(values[1] / values[0] / step - 1) < 1e-3;
}

}  // namespace

std::map<const ov::Node*, size_t> ovfleet::paired_projections(const ov::Model& model, size_t& unknown) {
    unknown = 0;
    std::map<const ov::Node*, size_t> found;
    for (const auto& node : model.get_ordered_ops()) {
        PairRotation rotation;
        if (!match(node, rotation)) continue;
        if (const auto projection = origin(rotation.x)) found[projection.get()] = rotation.head_size;
        else ++unknown;
    }
    return found;
}

void ovfleet::rotate_whole_heads(const ov::Model& model) {
    std::vector<HalfRotation> rotations;
    for (const auto& node : model.get_ordered_ops()) {
        HalfRotation found;
        if (match(node, found)) rotations.push_back(found);
    }
    std::map<ov::Output<ov::Node>, NodePtr> doubled;
    for (const auto& one : rotations) rewrite(one, doubled);
}

extern "C" int ovfleet_divide_frequencies(ov_model_t* model, double base, const float* factors, size_t count, size_t* applied) {
    return ovfleet::guarded([&] {
        *applied = 0;
        // If the graph contains the factors of the file, the front end has already divided the frequencies by them.
        for (const auto& node : model->object->get_ops())
            if (node->get_friendly_name() == "weight.weight_rope_freqs.weight") *applied = 1;
        if (*applied) return;
        std::set<std::shared_ptr<op::v0::Constant>> tables;
        for (const auto& node : model->object->get_ordered_ops())
            if (ov::is_type<op::v0::Cos>(node) || ov::is_type<op::v0::Sin>(node))
                if (auto table = frequencies(node->input_value(0), count))
                    if (base == 0 || is_of_base(*table, base, count)) tables.insert(table);
        for (const auto& table : tables) {
            auto values = table->cast_vector<float>();
            for (size_t i = 0; i < count; ++i) values[i] /= factors[i];
            ov::replace_node(table, op::v0::Constant::create(ov::element::f32, table->get_shape(), values));
        }
        *applied = tables.size();
    });
}

extern "C" int ovfleet_scale_rotary(ov_model_t* model, float factor, size_t count, size_t* applied) {
    return ovfleet::guarded([&] {
        *applied = 0;
        for (const auto& node : model->object->get_ordered_ops()) {
            if (!ov::is_type<op::v0::Cos>(node) && !ov::is_type<op::v0::Sin>(node)) continue;
            if (!frequencies(node->input_value(0), count)) continue;
            const auto readers = node->output(0).get_target_inputs();
            auto scalar = op::v0::Constant::create(ov::element::f32, {}, {factor});
            auto scaled = std::make_shared<op::v1::Multiply>(node, scalar);
            for (auto reader : readers) reader.replace_source_output(scaled);
            ++*applied;
        }
    });
}

extern "C" int ovfleet_rotate_halves(ov_model_t* model, size_t* rotated) {
    return ovfleet::guarded([&] {
        std::vector<PairRotation> rotations;
        for (const auto& node : model->object->get_ordered_ops()) {
            PairRotation found;
            if (match(node, found)) rotations.push_back(found);
        }
        std::map<ov::Output<ov::Node>, NodePtr> doubled;
        for (const auto& one : rotations) rewrite({one.add, one.x, one.cos, one.sin, one.head_size}, doubled);
        *rotated = rotations.size();
    });
}

extern "C" int ovfleet_rewrite_rotary(ov_model_t* model, void (*permuted)(void*, const char*, size_t), void* context) {
    return ovfleet::guarded([&] {
        std::vector<PairRotation> rotations;
        for (const auto& node : model->object->get_ordered_ops()) {
            PairRotation found;
            if (match(node, found) && !found.tensor.empty()) rotations.push_back(found);
        }
        if (!are_permutable(rotations)) return;
        for (const auto& rotation : rotations) permuted(context, rotation.tensor.c_str(), rotation.head_size);
        std::map<ov::Output<ov::Node>, NodePtr> doubled;
        for (const auto& one : rotations) rewrite({one.add, one.x, one.cos, one.sin, one.head_size}, doubled);
    });
}
