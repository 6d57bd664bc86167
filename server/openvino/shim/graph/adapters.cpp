// Adds LoRA adapters to a graph: at each projection, the input of each token is also multiplied by the matrices of the token's
// adapter, and the result is added to the token's output.
//
//   x ─┬─ W ──────────────────────────────────────────────── + ─
//      └─ down of all adapters ─ select the token's ranks ─ up ┘
//
// The adapters are concatenated along the rank dimension, so that a step can contain tokens of any adapter and tokens without
// an adapter. Projections that read the same input share the product with `down`.
//
// If all projections will be native, no operations are added to the graph: the matrices become attributes of the
// projections, and each native projection takes over the attribute of the projection that it replaces.
#include <map>
#include <utility>
#include <vector>

#include <openvino/op/ops.hpp>

#include "lora.hpp"
#include "model.hpp"
#include "nodes.hpp"
#include "rotary.hpp"
#include "weights.hpp"

namespace {

using ovfleet::integer_constant;
namespace op = ov::op;
using MatMul = op::v0::MatMul;
using NodePtr = std::shared_ptr<ov::Node>;

// Returns the name of a projection: the name of its weight in a GGUF file, or otherwise the name of its node.
std::string name_of(const MatMul& matmul) {
    const auto& weight = matmul.get_input_node_ptr(1)->get_friendly_name();
    if (weight.rfind(ovfleet::WEIGHT_PREFIX, 0) == 0) return weight.substr(ovfleet::WEIGHT_PREFIX.size());
    return matmul.get_friendly_name();
}

std::vector<std::shared_ptr<MatMul>> projections(const ov::Model& model) {
    std::vector<std::shared_ptr<MatMul>> found;
    for (const auto& node : model.get_ordered_ops())
        if (auto matmul = ov::as_type_ptr<MatMul>(node))
            if (ovfleet::is_projection(matmul)) found.push_back(matmul);
    return found;
}

// A projection, and the LoRA matrices of all adapters for it.
struct AdaptedProjection {
    std::shared_ptr<MatMul> matmul;
    const ovfleet_lora* lora;
};

NodePtr matrix(const float* values, size_t rows, size_t columns) {
    return op::v0::Constant::create(ov::element::f32, {rows, columns}, std::vector<float>(values, values + rows * columns));
}

// Returns the part with the ranks from `begin` to `end`, which belong to one adapter.
std::shared_ptr<ovfleet::LoraPart> part_of(const AdaptedProjection& projection, size_t begin, size_t end) {
    const auto& [matmul, lora] = projection;
    const size_t rows = matmul->get_input_shape(1)[0], columns = matmul->get_input_shape(1)[1], ranks = end - begin;
    auto part = std::make_shared<ovfleet::LoraPart>();
    part->adapter = lora->adapters[begin];
    part->rows = rows;
    part->ranks = ranks;
    part->down.assign(lora->down + begin * columns, lora->down + end * columns);
    part->up.reserve(rows * ranks);
    for (size_t row = 0; row < rows; ++row) {
        const float* from = lora->up + row * lora->ranks;
        part->up.insert(part->up.end(), from + begin, from + end);
    }
    return part;
}

// Attaches the matrices to a projection that will be native. Returns the number of parts.
size_t attach(const AdaptedProjection& projection) {
    const auto& [matmul, lora] = projection;
    auto attribute = std::make_shared<ovfleet::Lora>();
    for (size_t begin = 0, end; begin < lora->ranks; begin = end) {
        for (end = begin + 1; end < lora->ranks && lora->adapters[end] == lora->adapters[begin];) ++end;
        attribute->parts.push_back(part_of(projection, begin, end));
    }
    ovfleet::set_lora(*matmul, attribute);
    return attribute->parts.size();
}

// Adds the multiplications by the LoRA matrices to a graph as operations.
class GraphAdapters {
public:
    GraphAdapters() : adapters_(ovfleet::named_parameter(ovfleet::ADAPTERS_INPUT, ov::element::i32, {-1})) {
        zero_ = op::v0::Constant::create(ov::element::f32, {}, {0.0f});
    }

    std::shared_ptr<op::v0::Parameter> input() const { return adapters_; }

    // Adds adapters to projections that read the same input.
    void add(const std::vector<AdaptedProjection>& group) {
        std::vector<float> down;
        std::vector<int32_t> adapters;
        std::vector<int64_t> lengths;
        const auto columns = group[0].matmul->get_input_shape(1)[1];
        for (const auto& [matmul, lora] : group) {
            down.insert(down.end(), lora->down, lora->down + lora->ranks * columns);
            adapters.insert(adapters.end(), lora->adapters, lora->adapters + lora->ranks);
            lengths.push_back(int64_t(lora->ranks));
        }
        auto product = std::make_shared<MatMul>(group[0].matmul->input_value(0), matrix(down.data(), adapters.size(), columns),
                                                false, true);
        // Use a selection instead of a multiplication by 0, because the products of other adapters may be infinite.
        auto selected = std::make_shared<op::v1::Select>(rank_mask(adapters, axes_behind_tokens(product)), product, zero_);
        ov::OutputVector parts{selected};
        if (group.size() > 1) {
            auto axis = op::v0::Constant::create(ov::element::i64, {}, {-1});
            parts = std::make_shared<op::v1::VariadicSplit>(selected, axis, integer_constant(lengths))->outputs();
        }
        for (size_t i = 0; i < group.size(); ++i) {
            const auto& [matmul, lora] = group[i];
            const auto readers = matmul->output(0).get_target_inputs();
            auto up = matrix(lora->up, matmul->get_input_shape(1)[0], lora->ranks);
            auto added = std::make_shared<MatMul>(parts[i], up, false, true);
            auto sum = std::make_shared<op::v1::Add>(matmul, added);
            sum->set_friendly_name(matmul->get_friendly_name() + "/adapted");
            for (auto reader : readers) reader.replace_source_output(sum);
        }
    }

private:
    // The number of axes after the axis that will contain the tokens. At this point, a value has an axis of sequences and
    // an axis of tokens. In the paged model, each token will be a sequence: the tokens will be in the first axis whose
    // size is not 1, and all other axes except the last will have the size 1. The mask needs as many axes after its
    // tokens, because Select would otherwise broadcast it: a step of n tokens would compute n² rows of logits, and fail.
    static size_t axes_behind_tokens(const NodePtr& product) {
        const auto& shape = product->get_output_partial_shape(0);
        OPENVINO_ASSERT(shape.rank().is_static(), "the rank of a projection is dynamic");
        for (size_t axis = 0; axis + 1 < shape.size(); ++axis)
            if (shape[axis] != 1) return shape.size() - 1 - axis;
        OPENVINO_THROW("a projection has no axis of tokens");
    }

    // Returns the node that computes, for each token and each rank, whether the rank belongs to the token's adapter. Groups
    // of projections with the same `adapters` and `behind` share the node.
    NodePtr rank_mask(const std::vector<int32_t>& adapters, size_t behind) {
        auto& mask = masks_[{behind, adapters}];
        if (mask) return mask;
        auto& tokens = tokens_[behind];
        std::vector<int64_t> shape(behind + 1, 1);
        shape[0] = -1;
        if (!tokens) tokens = std::make_shared<op::v1::Reshape>(adapters_, integer_constant(shape), false);
        mask = std::make_shared<op::v1::Equal>(tokens, op::v0::Constant::create(ov::element::i32, {adapters.size()}, adapters));
        return mask;
    }

    std::shared_ptr<op::v0::Parameter> adapters_;
    NodePtr zero_;
    // The input `adapters_`, reshaped for each number of axes after the axis of the tokens.
    std::map<size_t, NodePtr> tokens_;
    std::map<std::pair<size_t, std::vector<int32_t>>, NodePtr> masks_;
};

}  // namespace

extern "C" int ovfleet_list_projections(const ov_model_t* model, void (*found)(void*, const char*, size_t, size_t, size_t),
                                        void* context, size_t* unknown) {
    return ovfleet::guarded([&] {
        const auto pairs = ovfleet::paired_projections(*model->object, *unknown);
        for (const auto& matmul : projections(*model->object)) {
            const auto& shape = matmul->get_input_shape(1);
            const auto paired = pairs.find(matmul.get());
            found(context, name_of(*matmul).c_str(), shape[0], shape[1], paired == pairs.end() ? 0 : paired->second);
        }
    });
}

extern "C" int ovfleet_add_adapters(ov_model_t* model, const ovfleet_lora* loras, size_t count, int in_native_projections,
                                    const char* content) {
    return ovfleet::guarded([&] {
        model->object->set_rt_info(std::string(content), "ovfleet", "adapters");
        std::map<std::string, std::vector<std::shared_ptr<MatMul>>> named;
        for (const auto& matmul : projections(*model->object)) named[name_of(*matmul)].push_back(matmul);
        // The groups are in the order of `loras`, so that the graph is the same each time.
        std::vector<std::vector<AdaptedProjection>> groups;
        std::map<ov::Output<ov::Node>, size_t> readers;
        for (const auto* lora = loras; lora != loras + count; ++lora) {
            const auto found = named.find(lora->projection);
            OPENVINO_ASSERT(found != named.end() && found->second.size() == 1, "the projection ", lora->projection,
                            " does not exist, or its name is not unique");
            const auto& matmul = found->second[0];
            OPENVINO_ASSERT(matmul->get_output_element_type(0) == ov::element::f32, "the projection ", lora->projection,
                            " is not computed in f32");
            const auto [group, is_new] = readers.emplace(matmul->input_value(0), groups.size());
            if (is_new) groups.emplace_back();
            groups[group->second].push_back({matmul, lora});
        }
        if (in_native_projections) {
            size_t parts = 0;
            for (const auto& group : groups)
                for (const auto& projection : group) parts += attach(projection);
            ovfleet::set_lora_parts(*model->object, parts);
            return;
        }
        GraphAdapters adapters;
        for (const auto& group : groups) adapters.add(group);
        model->object->add_parameters({adapters.input()});
        model->object->validate_nodes_and_infer_types();
    });
}
