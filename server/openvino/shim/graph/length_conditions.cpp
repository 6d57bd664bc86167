// Resolves conditions on the length of the longest sequence of a step: replaces them with their values for the longest possible
// sequence. Models with LongRoPE choose the divisors of their rotary frequencies by such a condition: max(position_ids) + 1 >
// original length. In a paged model, `position_ids` contains the new positions of all sequences, so without the replacement,
// the keys of a sequence would depend on the other sequences and on the division of the prompt into chunks.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>
#include <openvino/op/util/binary_elementwise_comparison.hpp>
#include <openvino/op/util/gather_base.hpp>
#include <openvino/op/util/shape_of_base.hpp>

#include "model.hpp"
#include "nodes.hpp"

namespace {

namespace op = ov::op;
using NodePtr = std::shared_ptr<ov::Node>;
using ConstantPtr = std::shared_ptr<op::v0::Constant>;
using NodeSet = std::unordered_set<const ov::Node*>;

// The largest number of elements of a value from which a condition is computed.
constexpr size_t condition_elements_max = 16;

// The maximum number of operations that the recursion visits to compute a condition, including repeated visits. This limit
// bounds the depth of the recursion. It also bounds the run time for graphs in which each operation reads the previous
// operation twice.
constexpr size_t condition_nodes_max = 1000;

bool is_input(const ov::Output<ov::Node>& value, const char* name) {
    return ovfleet::as<op::v0::Parameter>(value) && value.get_names().count(name) > 0;
}

bool has_one_element(const ov::PartialShape& shape) { return shape.is_static() && ov::shape_size(shape.to_shape()) == 1; }

bool reads_any(const ov::Node& node, const NodeSet& nodes) {
    // An attention operation does not count as a reader, because its output does not depend on the length of the longest
    // sequence. (`resolve_conditions` also skips the operations that read only the sizes of a tensor.)
    if (ovfleet::is_paged_attention(node)) return false;
    for (size_t index = 0; index < node.get_input_size(); ++index)
        if (nodes.count(node.get_input_node_ptr(index))) return true;
    return false;
}

// Returns the largest new position in a step with the longest possible sequence, or null if `value` is not the largest
// new position.
ConstantPtr last_position(const ov::Output<ov::Node>& value, int64_t max_model_len) {
    auto max = ovfleet::as<op::v1::ReduceMax>(value);
    if (!max || value.get_partial_shape().rank().is_dynamic()) return nullptr;
    auto positions = max->input_value(0);
    while (ovfleet::as<op::v0::Convert>(positions) || ovfleet::as<op::v0::Unsqueeze>(positions) ||
           ovfleet::as<op::v0::Squeeze>(positions) || ovfleet::as<op::v1::Reshape>(positions))
        positions = positions.get_node()->input_value(0);
    if (!is_input(positions, "position_ids")) return nullptr;
    // If the graph computes a maximum for each sequence, this constant is broadcast to all of them.
    const ov::Shape shape(value.get_partial_shape().size(), 1);
    return op::v0::Constant::create(value.get_element_type(), shape, std::vector<int64_t>{max_model_len - 1});
}

// If `value` is the size of a static dimension, which the graph reads from the shape of a tensor, returns this size. Otherwise,
// returns null.
ConstantPtr static_size(const ov::Output<ov::Node>& value) {
    auto gather = ov::as_type_ptr<op::util::GatherBase>(value.get_node_shared_ptr());
    auto sizes = gather ? ov::as_type_ptr<op::util::ShapeOfBase>(gather->get_input_node_shared_ptr(0)) : nullptr;
    auto index = gather ? ovfleet::as<op::v0::Constant>(gather->input_value(1)) : nullptr;
    if (!sizes || !index || ov::shape_size(index->get_shape()) != 1) return nullptr;
    const auto& shape = sizes->get_input_partial_shape(0);
    if (shape.rank().is_dynamic()) return nullptr;
    const int64_t rank = shape.size(), given = index->cast_vector<int64_t>()[0], axis = given < 0 ? given + rank : given;
    if (axis < 0 || axis >= rank || shape[axis].is_dynamic()) return nullptr;
    return op::v0::Constant::create(value.get_element_type(), index->get_shape(),
                                    std::vector<int64_t>{shape[axis].get_length()});
}

// Computes `value` for a step with the longest possible sequence. Returns null if the result is unknown, for example because
// `value` also depends on other inputs or is computed from more than `remaining` operations. Subtracts the number of visited
// operations from `remaining`.
ConstantPtr value_for(const ov::Output<ov::Node>& value, int64_t max_model_len, size_t& remaining) {
    if (remaining == 0) return nullptr;
    --remaining;
    if (auto constant = ovfleet::as<op::v0::Constant>(value)) return constant;
    if (is_input(value, "max_context_len"))
        return op::v0::Constant::create(value.get_element_type(), ov::Shape{}, std::vector<int64_t>{max_model_len});
    if (auto constant = last_position(value, max_model_len)) return constant;
    if (auto constant = static_size(value)) return constant;
    const auto node = value.get_node_shared_ptr();
    if (node->get_input_size() == 0 || node->get_output_size() != 1) return nullptr;
    ov::OutputVector inputs;
    for (const auto& input : node->input_values()) {
        auto constant = value_for(input, max_model_len, remaining);
        if (!constant || ov::shape_size(constant->get_shape()) > condition_elements_max) return nullptr;
        inputs.push_back(constant);
    }
    const auto computed = node->clone_with_new_inputs(inputs);
    const auto& shape = computed->get_output_partial_shape(0);
    if (shape.is_dynamic() || ov::shape_size(shape.to_shape()) > condition_elements_max) return nullptr;
    ov::OutputVector folded(1);
    if (!computed->constant_fold(folded, inputs)) return nullptr;
    return ovfleet::as<op::v0::Constant>(folded[0]);
}

// Replaces a comparison that depends on the length of the longest sequence with its value for the longest possible
// sequence. Returns false if the comparison is not a condition but, for example, a mask.
bool resolve(const NodePtr& comparison, int64_t max_model_len) {
    const auto& name = comparison->get_friendly_name();
    size_t remaining = condition_nodes_max;
    const auto value = value_for(comparison->output(0), max_model_len > 0 ? max_model_len : INT32_MAX, remaining);
    if (value && ov::shape_size(value->get_shape()) == 1) {
        OPENVINO_ASSERT(max_model_len > 0, "the condition ", name,
                        " depends on the length of the longest sequence, but the files of the model contain no context length; "
                        "set --max-model-len");
        ov::replace_node(comparison, value);
        return true;
    }
    // A condition of another form cannot be resolved, because the length at which its value changes need not be the
    // constant in the comparison: for example, max(2 * position_ids) + 1 > 48 is true from position 24 on.
    if (has_one_element(comparison->get_output_partial_shape(0)))
        OPENVINO_THROW("the condition ", name,
                       " depends on the length of the longest sequence in an unknown way; supported conditions compare the "
                       "largest position or the length with a constant");
    return false;
}

// Resolves the conditions of a graph, and returns their number.
size_t resolve_conditions(const ov::Model& model, int64_t max_model_len) {
    // The nodes that depend on the positions, and those that depend on the largest position or on the length of the longest
    // sequence.
    NodeSet positions, lengths;
    size_t resolved = 0;
    for (const auto& node : model.get_ordered_ops()) {
        if (ov::is_type<op::util::ShapeOfBase>(node) || node->get_output_size() == 0) continue;
        if (is_input(node->output(0), "position_ids") || reads_any(*node, positions)) positions.insert(node.get());
        const bool is_length = is_input(node->output(0), "max_context_len") || reads_any(*node, lengths) ||
                               (ov::is_type<op::v1::ReduceMax>(node) && positions.count(node.get()));
        if (!is_length) continue;
        if (ov::is_type<op::util::BinaryElementwiseComparison>(node) && resolve(node, max_model_len)) {
            ++resolved;
            continue;
        }
        lengths.insert(node.get());
    }
    return resolved;
}

}  // namespace

int ovfleet_resolve_length_conditions(ov_model_t* model, uint32_t max_model_len, size_t* resolved) {
    return ovfleet::guarded([&] {
        auto& graph = *model->object;
        *resolved = resolve_conditions(graph, std::min<int64_t>(max_model_len, INT32_MAX));
        if (*resolved > 0) graph.validate_nodes_and_infer_types();
    });
}
