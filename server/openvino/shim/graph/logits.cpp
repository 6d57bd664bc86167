// Limits the vocabulary projection and, if possible, all operations after the last attention to the tokens whose logits are
// needed. For all other tokens, the graph then ends with the last attention.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "nodes.hpp"
#include "weights.hpp"

namespace {

using ovfleet::integer_constant;
namespace op = ov::op;
using NodePtr = std::shared_ptr<ov::Node>;

// The vocabulary projection: the last MatMul before the result.
NodePtr vocabulary_projection(const NodePtr& result) {
    auto node = result->input_value(0).get_node_shared_ptr();
    for (int steps = 0; steps < 16; ++steps) {
        if (ov::is_type<op::v0::MatMul>(node)) return node;
        OPENVINO_ASSERT(node->get_input_size() > 0, "the logits are not computed by a projection");
        node = node->input_value(0).get_node_shared_ptr();
    }
    OPENVINO_THROW("the logits are not computed by a projection");
}

// Returns the shape of a value that has a row for each token, with -1 for the number of rows.
std::vector<int64_t> sizes_of(const ov::PartialShape& shape) {
    std::vector<int64_t> sizes;
    for (const auto& one : shape) sizes.push_back(one.is_static() ? one.get_length() : -1);
    if (std::count(sizes.begin(), sizes.end(), -1) == 1) return sizes;
    // The shape does not show which dimension contains the rows. In graphs of the GGUF front end and of exporters, the number
    // of dimensions determines it.
    const auto size = sizes.back();
    switch (sizes.size()) {
        case 2: return {-1, size};
        case 3: return {-1, 1, size};
        case 4: return {1, -1, 1, size};
    }
    OPENVINO_THROW("a value with ", sizes.size(), " dimensions is not supported");
}

// Selects the rows of the tokens in `indices` from a value that has a row for each token.
ov::Output<ov::Node> selected_rows(const ov::Output<ov::Node>& value, const NodePtr& indices) {
    const auto& shape = value.get_partial_shape();
    OPENVINO_ASSERT(shape.rank().is_static() && shape.rbegin()->is_static(), "the number of columns is not static");
    const int64_t size = shape.rbegin()->get_length();
    auto rows = std::make_shared<op::v1::Reshape>(value, integer_constant({-1, size}), false);
    auto axis = op::v0::Constant::create(ov::element::i64, {}, {0});
    auto selected = std::make_shared<op::v8::Gather>(rows, indices, axis);
    return std::make_shared<op::v1::Reshape>(selected, integer_constant(sizes_of(shape)), false);
}

// Whether an operation reduces or splits only the last axis.
bool is_along_columns(const ov::Node& node) {
    auto axes = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(1));
    const auto rank = node.get_input_partial_shape(0).rank();
    if (!axes || rank.is_dynamic() || ov::shape_size(axes->get_shape()) != 1) return false;
    const auto axis = axes->cast_vector<int64_t>()[0];
    return axis == -1 || axis == rank.get_length() - 1;
}

// Whether each row of a node's output depends only on the same row of its inputs, for any number of rows.
bool is_rowwise(const ov::Node& node) {
    static const std::set<std::string> elementwise = {
        "Add",  "Subtract", "Multiply", "Divide",   "Power", "Sqrt",  "SquaredDifference", "Convert", "Relu", "Swish", "Gelu",
        "Tanh", "Sigmoid",  "Clamp",    "Negative", "Exp",   "Select"};
    static const std::set<std::string> along_columns = {"ReduceMean", "ReduceSum", "Split", "VariadicSplit"};
    const std::string type = node.get_type_name();
    if (elementwise.count(type)) return true;
    if (along_columns.count(type)) return is_along_columns(node);
    if (type == "MatMul") return ovfleet::is_weight(node.get_input_node_shared_ptr(1));
    if (type != "Reshape" && type != "Unsqueeze") return false;
    // The sizes or axes must be constant, and a Reshape must preserve the last axis.
    auto target = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(1));
    if (!target) return false;
    if (type == "Unsqueeze") return true;
    const auto sizes = target->cast_vector<int64_t>();
    const auto& shape = node.get_input_partial_shape(0);
    if (shape.rank().is_dynamic() || shape.size() == 0) return false;
    const auto last = *shape.rbegin();
    return !sizes.empty() && last.is_static() && (sizes.back() == -1 || sizes.back() == last.get_length());
}

// Selects rows before the operations that follow the last attention layer. Returns false, without changes, if that is
// impossible, for example because one of these operations is not known to be row-wise.
bool select_behind_attention(ov::Model& model, const NodePtr& projection, const NodePtr& indices) {
    const auto ordered = model.get_ordered_ops();
    std::set<ov::Node*> from_inputs, behind;
    ov::Node* last = nullptr;
    for (const auto& node : ordered)
        if (ovfleet::is_paged_attention(*node)) last = node.get();
    if (!last) return false;
    for (const auto& node : ordered) {
        bool reads_inputs = ov::is_type<op::v0::Parameter>(node), is_behind = false;
        for (const auto& value : node->input_values()) {
            reads_inputs |= from_inputs.count(value.get_node()) > 0;
            is_behind |= value.get_node() == last || behind.count(value.get_node()) > 0;
        }
        if (reads_inputs) from_inputs.insert(node.get());
        if (is_behind) behind.insert(node.get());
    }
    if (!behind.count(projection.get())) return false;

    std::vector<ov::Input<ov::Node>> inputs;
    for (const auto& node : ordered) {
        if (!behind.count(node.get())) continue;
        // The operations after the vocabulary projection depend only on its output.
        if (node == projection) break;
        if (!is_rowwise(*node)) return false;
        for (auto& input : node->inputs()) {
            auto source = input.get_source_output();
            if (behind.count(source.get_node()) || !from_inputs.count(source.get_node())) continue;
            const auto& shape = source.get_partial_shape();
            const auto type = source.get_element_type();
            // The masks of adapters also have a row for each token.
            const bool is_mask = type == ov::element::boolean && ov::is_type<op::v1::Select>(node);
            if (!(type.is_real() || is_mask) || shape.rank().is_dynamic() || shape.size() < 2 || shape.size() > 4 ||
                shape.rbegin()->is_dynamic())
                return false;
            inputs.push_back(input);
        }
    }
    std::map<ov::Output<ov::Node>, ov::Output<ov::Node>> selected;
    for (auto& input : inputs) {
        const auto source = input.get_source_output();
        if (!selected.count(source)) selected[source] = selected_rows(source, indices);
        input.replace_source_output(selected[source]);
    }
    return true;
}

}  // namespace

void ovfleet::select_logits(ov::Model& model) {
    auto result = model.output("logits").get_node_shared_ptr();
    if (!ov::is_type<op::v0::Result>(result)) {
        for (const auto& candidate : model.get_results())
            if (candidate->input_value(0).get_node_shared_ptr() == result) {
                result = candidate;
                break;
            }
    }
    const auto& shape = result->get_input_partial_shape(0);
    OPENVINO_ASSERT(shape.rank().is_static() && shape.size() > 0, "the logits have no vocabulary dimension");
    const auto vocabulary = *shape.rbegin();
    OPENVINO_ASSERT(vocabulary.is_static(), "the size of the vocabulary is not static");
    auto projection = vocabulary_projection(result);

    auto indices = named_parameter(LOGITS_INDICES, ov::element::i64, {-1});
    if (!select_behind_attention(model, projection, indices))
        projection->input(0).replace_source_output(selected_rows(projection->input_value(0), indices));

    auto logits =
        std::make_shared<op::v1::Reshape>(result->input_value(0), integer_constant({-1, vocabulary.get_length()}), false);
    result->input_value(0).get_tensor().set_names({});
    logits->output(0).get_tensor().set_names({"logits"});
    result->input(0).replace_source_output(logits);
    model.add_parameters({indices});
    model.validate_nodes_and_infer_types();
}
