// Low-rank adapters: what is added to the output of a projection, for each token that of its own adapter.
//
//   x ─┬─ W ─────────────────────────────────────────── + ─
//      └─ down, all adapters' ─ keep the token's own ─ up ┘
//
// Adapters lie after each other along the rank, so that tokens of any of them, and of none, share a step. Projections
// that read the same input share the first product.
//
// Where all projections will be our own, nothing is added here: they take the matrices themselves, which they are given as
// attributes of what they replace.
#include <map>
#include <utility>
#include <vector>

#include <openvino/op/ops.hpp>

#include "adapted.hpp"
#include "model.hpp"
#include "rotary.hpp"
#include "weights.hpp"

namespace {

namespace op = ov::op;
using MatMul = op::v0::MatMul;
using NodePtr = std::shared_ptr<ov::Node>;

// By the name of its weight in the file, or else its own.
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

// A projection and what is added to it.
struct Place {
    std::shared_ptr<MatMul> matmul;
    const ovfleet_adapted* adapted;
};

NodePtr matrix(const float* values, size_t rows, size_t columns) {
    return op::v0::Constant::create(ov::element::f32, {rows, columns}, std::vector<float>(values, values + rows * columns));
}

NodePtr integers(std::vector<int64_t> values) {
    return op::v0::Constant::create(ov::element::i64, {values.size()}, values);
}

// What one adapter adds to a projection, of what all do.
std::shared_ptr<ovfleet::LowRank> part_of(const Place& place, size_t begin, size_t end) {
    const auto& [matmul, adapted] = place;
    const size_t rows = matmul->get_input_shape(1)[0], columns = matmul->get_input_shape(1)[1], ranks = end - begin;
    auto part = std::make_shared<ovfleet::LowRank>();
    part->adapter = adapted->owners[begin];
    part->rows = rows;
    part->ranks = ranks;
    part->down.assign(adapted->down + begin * columns, adapted->down + end * columns);
    part->up.reserve(rows * ranks);
    for (size_t row = 0; row < rows; ++row) {
        const float* from = adapted->up + row * adapted->ranks;
        part->up.insert(part->up.end(), from + begin, from + end);
    }
    return part;
}

// Tells a projection that will be our own what is added to it; answers how many parts that is.
size_t note(const Place& place) {
    const auto& [matmul, adapted] = place;
    auto noted = std::make_shared<ovfleet::Adapted>();
    for (size_t begin = 0, end; begin < adapted->ranks; begin = end) {
        for (end = begin + 1; end < adapted->ranks && adapted->owners[end] == adapted->owners[begin];) ++end;
        noted->parts.push_back(part_of(place, begin, end));
    }
    ovfleet::set_adapted(*matmul, noted);
    return noted->parts.size();
}

class Adapter {
public:
    Adapter() : adapters_(std::make_shared<op::v0::Parameter>(ov::element::i32, ov::PartialShape{-1})) {
        adapters_->set_friendly_name(ovfleet::ADAPTERS_INPUT);
        adapters_->output(0).get_tensor().set_names({ovfleet::ADAPTERS_INPUT});
        nothing_ = op::v0::Constant::create(ov::element::f32, {}, {0.0f});
    }

    std::shared_ptr<op::v0::Parameter> input() const { return adapters_; }

    // All projections that read the same.
    void add(const std::vector<Place>& places) {
        std::vector<float> down;
        std::vector<int32_t> owners;
        std::vector<int64_t> lengths;
        const auto columns = places[0].matmul->get_input_shape(1)[1];
        for (const auto& [matmul, adapted] : places) {
            down.insert(down.end(), adapted->down, adapted->down + adapted->ranks * columns);
            owners.insert(owners.end(), adapted->owners, adapted->owners + adapted->ranks);
            lengths.push_back(int64_t(adapted->ranks));
        }
        auto product = std::make_shared<MatMul>(places[0].matmul->input_value(0),
                                                matrix(down.data(), owners.size(), columns), false, true);
        // Chosen and not multiplied by 0: what others' adapters make of a token is nothing to it, whatever it is.
        auto own = std::make_shared<op::v1::Select>(owned(owners, behind_tokens(product)), product, nothing_);
        ov::OutputVector parts{own};
        if (places.size() > 1) {
            auto axis = op::v0::Constant::create(ov::element::i64, {}, {-1});
            parts = std::make_shared<op::v1::VariadicSplit>(own, axis, integers(lengths))->outputs();
        }
        for (size_t i = 0; i < places.size(); ++i) {
            const auto& [matmul, adapted] = places[i];
            const auto readers = matmul->output(0).get_target_inputs();
            auto up = matrix(adapted->up, matmul->get_input_shape(1)[0], adapted->ranks);
            auto added = std::make_shared<MatMul>(parts[i], up, false, true);
            auto sum = std::make_shared<op::v1::Add>(matmul, added);
            sum->set_friendly_name(matmul->get_friendly_name() + "/adapted");
            for (auto reader : readers) reader.replace_source_output(sum);
        }
    }

private:
    // How many dimensions come after that of the tokens. Before the model is paged they are sequences of tokens each; then
    // each token is a sequence, in the first dimension that is not one, and all others but the last are one. (Were it not
    // so, a step of several tokens would have logits for the square of them, and fail.)
    static size_t behind_tokens(const NodePtr& product) {
        const auto& shape = product->get_output_partial_shape(0);
        OPENVINO_ASSERT(shape.rank().is_static(), "the rank of what is projected is not known");
        for (size_t axis = 0; axis + 1 < shape.size(); ++axis)
            if (shape[axis] != 1) return shape.size() - 1 - axis;
        OPENVINO_THROW("what is projected has no tokens");
    }

    // Whether a token's adapter has a rank: one node for all of the same shape that have the same owners.
    NodePtr owned(const std::vector<int32_t>& owners, size_t behind) {
        auto& mask = masks_[{behind, owners}];
        if (mask) return mask;
        auto& tokens = tokens_[behind];
        std::vector<int64_t> shape(behind + 1, 1);
        shape[0] = -1;
        if (!tokens) tokens = std::make_shared<op::v1::Reshape>(adapters_, integers(shape), false);
        mask = std::make_shared<op::v1::Equal>(
            tokens, op::v0::Constant::create(ov::element::i32, {owners.size()}, owners));
        return mask;
    }

    std::shared_ptr<op::v0::Parameter> adapters_;
    NodePtr nothing_;
    // By the dimensions that come after.
    std::map<size_t, NodePtr> tokens_;
    std::map<std::pair<size_t, std::vector<int32_t>>, NodePtr> masks_;
};

}  // namespace

extern "C" int ovfleet_each_projection(const ov_model_t* model,
                                       void (*found)(void*, const char*, size_t, size_t, size_t),
                                       void* context,
                                       size_t* unknown) {
    return ovfleet::guarded([&] {
        const auto pairs = ovfleet::paired_projections(*model->object, *unknown);
        for (const auto& matmul : projections(*model->object)) {
            const auto& shape = matmul->get_input_shape(1);
            const auto paired = pairs.find(matmul.get());
            found(context, name_of(*matmul).c_str(), shape[0], shape[1], paired == pairs.end() ? 0 : paired->second);
        }
    });
}

extern "C" int ovfleet_adapt(ov_model_t* model, const ovfleet_adapted* adapted, size_t count, int own, const char* content) {
    return ovfleet::guarded([&] {
        model->object->set_rt_info(std::string(content), "ovfleet", "adapters");
        std::map<std::string, std::vector<std::shared_ptr<MatMul>>> named;
        for (const auto& matmul : projections(*model->object)) named[name_of(*matmul)].push_back(matmul);
        // In the order in which they come, so that the graph is the same each time.
        std::vector<std::vector<Place>> groups;
        std::map<ov::Output<ov::Node>, size_t> readers;
        for (const auto* one = adapted; one != adapted + count; ++one) {
            const auto found = named.find(one->projection);
            OPENVINO_ASSERT(found != named.end() && found->second.size() == 1, "the projection ", one->projection,
                            " is not there, or not the only one of its name");
            const auto& matmul = found->second[0];
            OPENVINO_ASSERT(matmul->get_output_element_type(0) == ov::element::f32, "the projection ", one->projection,
                            " is not computed in f32");
            const auto [place, is_new] = readers.emplace(matmul->input_value(0), groups.size());
            if (is_new) groups.emplace_back();
            groups[place->second].push_back({matmul, one});
        }
        if (own) {
            size_t parts = 0;
            for (const auto& group : groups)
                for (const auto& place : group) parts += note(place);
            ovfleet::set_adapted_parts(*model->object, parts);
            return;
        }
        Adapter adapter;
        for (const auto& group : groups) adapter.add(group);
        model->object->add_parameters({adapter.input()});
        model->object->validate_nodes_and_infer_types();
    });
}
