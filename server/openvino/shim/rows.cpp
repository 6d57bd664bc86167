// Which rows are computed: the logits of wanted tokens only, and, behind the last attention, nothing but what they need.
// In that layer a token that is not wanted has to leave its keys and values, and nobody reads what comes of it.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "weights.hpp"

namespace {

namespace op = ov::op;
using NodePtr = std::shared_ptr<ov::Node>;

NodePtr integers(std::vector<int64_t> values) {
    return op::v0::Constant::create(ov::element::i64, {values.size()}, values);
}

// The vocabulary projection: the first MatMul met on the way back from the result through operations that
// leave rows apart.
NodePtr vocabulary_projection(const NodePtr& result) {
    auto node = result->input_value(0).get_node_shared_ptr();
    for (int steps = 0; steps < 16; ++steps) {
        if (ov::is_type<op::v0::MatMul>(node)) return node;
        OPENVINO_ASSERT(node->get_input_size() > 0, "the logits do not come from a projection");
        node = node->input_value(0).get_node_shared_ptr();
    }
    OPENVINO_THROW("the logits do not come from a projection");
}

// The sizes of a value that has a row for each token, with as many rows as there are: they are where the tokens were.
std::vector<int64_t> sizes_of(const ov::PartialShape& shape) {
    std::vector<int64_t> sizes;
    for (const auto& one : shape) sizes.push_back(one.is_static() ? one.get_length() : -1);
    if (std::count(sizes.begin(), sizes.end(), -1) == 1) return sizes;
    // What is known of both kinds of graphs.
    const auto size = sizes.back();
    switch (sizes.size()) {
        case 2: return {-1, size};
        case 3: return {-1, 1, size};
        case 4: return {1, -1, 1, size};
    }
    OPENVINO_THROW("rows in ", sizes.size(), " dimensions");
}

// Of a value that has a row for each token, those of the tokens that are wanted.
ov::Output<ov::Node> wanted_of(const ov::Output<ov::Node>& value, const NodePtr& wanted) {
    const auto& shape = value.get_partial_shape();
    OPENVINO_ASSERT(shape.rank().is_static() && shape.rbegin()->is_static(), "the size of a row is not known");
    const int64_t size = shape.rbegin()->get_length();
    auto rows = std::make_shared<op::v1::Reshape>(value, integers({-1, size}), false);
    auto axis = op::v0::Constant::create(ov::element::i64, {}, {0});
    auto kept = std::make_shared<op::v8::Gather>(rows, wanted, axis);
    return std::make_shared<op::v1::Reshape>(kept, integers(sizes_of(shape)), false);
}

// Whether an operation along axes is along the last one only.
bool is_along_rows(const ov::Node& node) {
    auto axes = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(1));
    const auto rank = node.get_input_partial_shape(0).rank();
    if (!axes || rank.is_dynamic() || ov::shape_size(axes->get_shape()) != 1) return false;
    const auto axis = axes->cast_vector<int64_t>()[0];
    return axis == -1 || axis == rank.get_length() - 1;
}

// Whether a node computes each row of its output from the same row of its inputs, however many rows there are.
bool keeps_rows_apart(const ov::Node& node) {
    static const std::set<std::string> elementwise = {
        "Add",  "Subtract", "Multiply", "Divide", "Power",   "Sqrt",  "SquaredDifference", "Convert",
        "Relu", "Swish",    "Gelu",     "Tanh",   "Sigmoid", "Clamp", "Negative",          "Exp",
        "Select"};
    static const std::set<std::string> along_rows = {"ReduceMean", "ReduceSum", "Split", "VariadicSplit"};
    const std::string type = node.get_type_name();
    if (elementwise.count(type)) return true;
    if (along_rows.count(type)) return is_along_rows(node);
    if (type == "MatMul") return ovfleet::is_weight(node.get_input_node_shared_ptr(1));
    if (type != "Reshape" && type != "Unsqueeze") return false;
    // A shape that says nothing of the number of rows.
    auto target = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(1));
    if (!target) return false;
    if (type == "Unsqueeze") return true;
    const auto sizes = target->cast_vector<int64_t>();
    const auto last = *node.get_input_partial_shape(0).rbegin();
    return !sizes.empty() && last.is_static() && (sizes.back() == -1 || sizes.back() == last.get_length());
}

// Lets only wanted rows into what is behind the last attention. False, and nothing is changed, if something there is not
// known to keep rows apart.
bool cut_behind_attention(ov::Model& model, const NodePtr& projection, const NodePtr& wanted) {
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

    std::vector<ov::Input<ov::Node>> places;
    for (const auto& node : ordered) {
        if (!behind.count(node.get())) continue;
        // What comes of the logits is theirs alone.
        if (node == projection) break;
        if (!keeps_rows_apart(*node)) return false;
        for (auto& place : node->inputs()) {
            auto source = place.get_source_output();
            if (behind.count(source.get_node()) || !from_inputs.count(source.get_node())) continue;
            const auto& shape = source.get_partial_shape();
            const auto type = source.get_element_type();
            // Whether a token's adapter has a rank is a row of the token, too.
            const bool is_mask = type == ov::element::boolean && ov::is_type<op::v1::Select>(node);
            if (!(type.is_real() || is_mask) || shape.rank().is_dynamic() || shape.size() < 2 ||
                shape.size() > 4 || shape.rbegin()->is_dynamic())
                return false;
            places.push_back(place);
        }
    }
    std::map<ov::Output<ov::Node>, ov::Output<ov::Node>> kept;
    for (auto& place : places) {
        const auto source = place.get_source_output();
        if (!kept.count(source)) kept[source] = wanted_of(source, wanted);
        place.replace_source_output(kept[source]);
    }
    return true;
}

}  // namespace

void ovfleet::keep_wanted_rows(ov::Model& model) {
    auto result = model.output("logits").get_node_shared_ptr();
    if (!ov::is_type<op::v0::Result>(result)) {
        for (const auto& candidate : model.get_results())
            if (candidate->input_value(0).get_node_shared_ptr() == result) { result = candidate; break; }
    }
    const auto vocabulary = *result->get_input_partial_shape(0).rbegin();
    OPENVINO_ASSERT(vocabulary.is_static(), "the size of the vocabulary is not known");
    auto projection = vocabulary_projection(result);

    auto wanted = std::make_shared<op::v0::Parameter>(ov::element::i64, ov::PartialShape{-1});
    wanted->set_friendly_name(WANTED_INPUT);
    wanted->output(0).get_tensor().set_names({WANTED_INPUT});
    if (!cut_behind_attention(model, projection, wanted))
        projection->input(0).replace_source_output(wanted_of(projection->input_value(0), wanted));

    auto logits = std::make_shared<op::v1::Reshape>(result->input_value(0), integers({-1, vocabulary.get_length()}), false);
    result->input_value(0).get_tensor().set_names({});
    logits->output(0).get_tensor().set_names({"logits"});
    result->input(0).replace_source_output(logits);
    model.add_parameters({wanted});
    model.validate_nodes_and_infer_types();
}
