// Our own paged attention as an operation of a graph: which models it is for, and what its inputs are.
#include "op.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <openvino/op/ops.hpp>

#include "before.hpp"
#include "run.hpp"

namespace {

using namespace ovfleet;
namespace op = ov::op;

// Inputs of the plugins' paged attention. Ours has the first five, then STEP, and WEIGHTS if it tells them. Where it splits rows
// and turns queries and keys by itself, the first three are ROWS, COS and SIN.
enum Input : size_t {
    QUERY, KEY, VALUE, KEY_CACHE, VALUE_CACHE, PAST_LENS, STEP = PAST_LENS, SUBSEQUENCE_BEGINS, WEIGHTS = SUBSEQUENCE_BEGINS,
    BLOCK_INDICES, BLOCK_INDICES_BEGINS, SCALE, SLIDING_WINDOW, ALIBI_SLOPES, MAX_CONTEXT_LEN,
    ROWS = QUERY, COS = KEY, SIN = VALUE,
};

// The type of the plugins' paged attention.
constexpr const char* PLUGINS_ATTENTION = "PagedAttentionExtension";

// By which the input is known that the weights of blocks are added to, `[kv_head][block]` in f32, as bytes.
constexpr const char* WEIGHTS_NAME = "block_weights";

// The sequences of a step in one: how many there are, their past lengths, the beginnings of their tokens, those of their
// blocks, and the blocks. One for all layers, since the plugin takes its time for each input of an operation it does not
// know.
ov::Output<ov::Node> step_of(const ov::Node& attention) {
    const auto past = attention.input_value(PAST_LENS);
    auto count = std::make_shared<op::v3::ShapeOf>(past, ov::element::i32);
    return std::make_shared<op::v0::Concat>(
        ov::OutputVector{count, past, attention.input_value(SUBSEQUENCE_BEGINS),
                         attention.input_value(BLOCK_INDICES_BEGINS), attention.input_value(BLOCK_INDICES)},
        0);
}

class Attention : public op::Op {
public:
    OPENVINO_OP("PagedAttention", "ovfleet");

    Attention() = default;
    Attention(const ov::OutputVector& inputs, const Layer& layer, bool turns) : Op(inputs), layer_(layer), turns_(turns) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        // Attributes may come from a file.
        const char* fault = unsupported(layer_);
        OPENVINO_ASSERT(!fault, "an attention of ovfleet with bad attributes: ", fault);
        OPENVINO_ASSERT(get_input_size() == WEIGHTS || get_input_size() == WEIGHTS + 1, "an attention of ovfleet with ",
                        get_input_size(), " inputs");
        measure(layer_);
        const auto tokens = get_input_partial_shape(QUERY);
        const auto count = tokens.rank().is_static() && !turns_ ? tokens[0] : ov::Dimension::dynamic();
        set_output_type(0, get_input_element_type(QUERY), {count, ov::Dimension(layer_.heads * layer_.value_size)});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Attention>(inputs, layer_, turns_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        const auto visit = [&](const char* name, size_t& value) {
            auto number = int64_t(value);
            visitor.on_attribute(name, number);
            value = size_t(number);
        };
        visit("heads", layer_.heads);
        visit("kv_heads", layer_.kv_heads);
        visit("key_size", layer_.key_size);
        visit("value_size", layer_.value_size);
        auto precision = int64_t(layer_.precision);
        visitor.on_attribute("precision", precision);
        layer_.precision = Precision(precision);
        // As bits: texts of numbers lose some.
        const auto visit_bits = [&](const char* name, float& value) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof(bits));
            auto number = int64_t(bits);
            visitor.on_attribute(name, number);
            bits = uint32_t(number);
            std::memcpy(&value, &bits, sizeof(bits));
        };
        visit_bits("scale_bits", layer_.scale);
        visit_bits("share_bits", layer_.share);
        visit("window", layer_.window);
        auto in_bf16 = int64_t(layer_.in_bf16);
        visitor.on_attribute("in_bf16", in_bf16);
        layer_.in_bf16 = in_bf16 != 0;
        visitor.on_attribute("turns", turns_);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        Layer layer = layer_;
        check_types(outputs, inputs);
        layer.is_bf16 = inputs[QUERY].get_element_type() == ov::element::bf16;
        const size_t queries = layer.heads * layer.key_size, keys = layer.kv_heads * layer.key_size,
                     values = layer.kv_heads * layer.value_size;
        Memory memory{};
        size_t tokens;
        if (turns_) {
            const auto* rows = static_cast<const float*>(inputs[ROWS].data());
            memory.query_row = memory.key_row = memory.value_row = queries + keys + values;
            tokens = inputs[ROWS].get_size() / memory.query_row;
            check_size(inputs[ROWS], tokens * memory.query_row, "rows");
            check_size(inputs[COS], tokens * layer.key_size, "cosines");
            check_size(inputs[SIN], tokens * layer.key_size, "sines");
            memory.queries = rows;
            memory.keys = rows + queries;
            memory.values = rows + queries + keys;
            memory.cos = static_cast<const float*>(inputs[COS].data());
            memory.sin = static_cast<const float*>(inputs[SIN].data());
        } else {
            tokens = inputs[QUERY].get_size() / queries;
            check_size(inputs[QUERY], tokens * queries, "queries");
            check_size(inputs[KEY], tokens * keys, "keys");
            check_size(inputs[VALUE], tokens * values, "values");
            memory.queries = inputs[QUERY].data();
            memory.keys = inputs[KEY].data();
            memory.values = inputs[VALUE].data();
            memory.query_row = queries, memory.key_row = keys, memory.value_row = values;
        }
        outputs[0].set_shape({tokens, layer_.heads * layer_.value_size});
        memory.output = outputs[0].data();
        // The cache is an input that is written: it is the runner's, and no node's before or behind this one.
        memory.key_cache = const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[KEY_CACHE].data()));
        memory.value_cache = const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[VALUE_CACHE].data()));
        const size_t cache_blocks = std::min(inputs[KEY_CACHE].get_size() / (layer.kv_heads * layer.key_bytes),
                                             inputs[VALUE_CACHE].get_size() / (layer.kv_heads * layer.value_bytes));
        thread_local std::vector<Sequence> all;
        auto& sequences = all;
        memory.step_blocks = read_step(inputs[STEP], tokens, cache_blocks, sequences);
        layer.weighs = inputs.size() > WEIGHTS;
        if (layer.weighs) {
            memory.weights = reinterpret_cast<float*>(const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[WEIGHTS].data())));
            OPENVINO_ASSERT(inputs[WEIGHTS].get_size() / sizeof(float) >= layer.kv_heads * memory.step_blocks,
                            "an attention of ovfleet has no room for the weights of its blocks");
        }
        run(kernels(), layer, sequences, memory);
        return true;
    }

private:
    // The kernels read memory as these types: any other (f16, where a plugin computes in it) is refused and not misread.
    void check_types(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
        const auto type = inputs.at(QUERY).get_element_type();
        const auto check = [&](Input input, const ov::element::Type& expected) {
            OPENVINO_ASSERT(inputs.at(input).get_element_type() == expected, "input ", size_t(input),
                            " of an attention of ovfleet has type ", inputs[input].get_element_type(), ", and not ", expected);
        };
        check(QUERY, type == ov::element::bf16 && !turns_ ? ov::element::bf16 : ov::element::f32);
        check(KEY, type);
        check(VALUE, type);
        check(KEY_CACHE, ov::element::u8);
        check(VALUE_CACHE, ov::element::u8);
        check(STEP, ov::element::i32);
        if (inputs.size() > WEIGHTS) check(WEIGHTS, ov::element::u8);
        OPENVINO_ASSERT(outputs.at(0).get_element_type() == type, "the output of an attention of ovfleet has type ",
                        outputs[0].get_element_type(), ", and not ", type);
    }

    static void check_size(const ov::Tensor& tensor, size_t expected, const char* name) {
        OPENVINO_ASSERT(tensor.get_size() == expected, "an attention of ovfleet has ", tensor.get_size(), " numbers of ", name,
                        ", and not ", expected);
    }

    // Reads the sequences of a step with `tokens` tokens over a cache of `cache_blocks` blocks; answers how many blocks the
    // sequences have together. Throws unless every token and every block exists.
    static size_t read_step(const ov::Tensor& tensor, size_t tokens, size_t cache_blocks, std::vector<Sequence>& sequences) {
        const auto check = [](bool holds, const char* fault) {
            OPENVINO_ASSERT(holds, "an attention of ovfleet has a bad step: ", fault);
        };
        const auto* step = static_cast<const int32_t*>(tensor.data());
        const size_t size = tensor.get_size();
        check(size > 0 && step[0] >= 0, "it has no number of sequences");
        const auto count = size_t(step[0]);
        check(count < size && size >= 1 + count + 2 * (count + 1), "it is too short");
        const auto *past = step + 1, *begins = past + count, *block_begins = begins + count + 1,
                   *blocks = block_begins + count + 1;
        const size_t all_blocks = size - (1 + count + 2 * (count + 1));
        check(begins[0] == 0 && size_t(begins[count]) == tokens, "its sequences do not have its tokens");
        check(block_begins[0] == 0 && size_t(block_begins[count]) == all_blocks, "its sequences do not have its blocks");
        sequences.clear();
        for (size_t i = 0; i < count; ++i) {
            check(past[i] >= 0 && begins[i] <= begins[i + 1] && block_begins[i] <= block_begins[i + 1], "its counts decrease");
            const auto new_tokens = size_t(begins[i + 1] - begins[i]), own_blocks = size_t(block_begins[i + 1] - block_begins[i]);
            check((size_t(past[i]) + new_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS <= own_blocks, "a sequence has too few blocks");
            sequences.push_back({size_t(begins[i]), new_tokens, size_t(past[i]), blocks + block_begins[i], size_t(block_begins[i])});
        }
        uint32_t last = 0;
        for (size_t i = 0; i < all_blocks; ++i) last = std::max(last, uint32_t(blocks[i]));
        check(all_blocks == 0 || last < cache_blocks, "a block is not in the cache");
        return all_blocks;
    }

    Layer layer_{};
    bool turns_ = false;
};

int64_t size_of(const ov::Node& node, const char* name) {
    const auto found = node.get_rt_info().find(name);
    OPENVINO_ASSERT(found != node.get_rt_info().end(), "a paged attention without ", name);
    return found->second.as<int64_t>();
}

// Throws if a graph gives its attention heads of no numbers, or no heads: sizes are divided by them.
void check_heads(const ov::Node& node) {
    for (const char* name : {"num_k_heads", "k_head_size", "num_v_heads", "v_head_size"}) {
        const auto size = size_of(node, name);
        OPENVINO_ASSERT(size > 0 && size <= int64_t(HEADS_MAX), "the attention ", node.get_friendly_name(), " has ", name, " = ",
                        size, "; it must be from 1 to ", HEADS_MAX);
    }
}

// The value of an input that is one number and known; false if it is not.
template <typename T>
bool number(const ov::Node& node, size_t input, T& value) {
    auto constant = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(input));
    if (!constant || ov::shape_size(constant->get_shape()) != 1) return false;
    value = constant->cast_vector<T>()[0];
    return true;
}

// Whether nothing is asked that ours does not do (slopes, sinks, scores, rotations, masks): what asks for it is empty. Numbers
// among these say how what is not asked would be done.
bool asks_nothing_else(const ov::Node& node) {
    for (size_t input = ALIBI_SLOPES; input < node.get_input_size(); ++input) {
        if (input == MAX_CONTEXT_LEN) continue;
        auto constant = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(input));
        if (!constant || (constant->get_shape().size() > 0 && ov::shape_size(constant->get_shape()) > 0)) return false;
    }
    return true;
}

// What an attention is for ours; false if it does what ours does not.
bool describe(const ov::Node& node, Precision precision, Layer& layer) {
    check_heads(node);
    layer.kv_heads = size_t(size_of(node, "num_k_heads"));
    layer.key_size = size_t(size_of(node, "k_head_size"));
    layer.value_size = size_t(size_of(node, "v_head_size"));
    const auto width = node.get_input_partial_shape(QUERY);
    if (width.rank().is_dynamic() || width.size() != 2 || width[1].is_dynamic()) return false;
    if (size_t(width[1].get_length()) % layer.key_size != 0) return false;
    layer.heads = size_t(width[1].get_length()) / layer.key_size;
    layer.precision = precision;
    int32_t window = 0;
    if (!number(node, SCALE, layer.scale) || !number(node, SLIDING_WINDOW, window) || window < 0) return false;
    layer.window = size_t(window);
    measure(layer);
    return layer.kv_heads == size_t(size_of(node, "num_v_heads")) && !unsupported(layer) && asks_nothing_else(node);
}

}  // namespace

bool ovfleet::put_own_attention(ov::Model& model, Precision precision, Compute compute, float share, bool weighs) {
    std::vector<std::pair<std::shared_ptr<ov::Node>, Layer>> found;
    for (const auto& node : model.get_ordered_ops()) {
        if (std::strcmp(node->get_type_name(), PLUGINS_ATTENTION) != 0) continue;
        Layer layer{};
        if (!describe(*node, precision, layer)) return false;
        layer.in_bf16 = compute != Compute::f32;
        layer.share = share;
        found.emplace_back(node, layer);
    }
    std::shared_ptr<op::v0::Parameter> weights;
    if (weighs && !found.empty()) {
        // Bytes, as the caches: a plugin that computes in another precision would change floats on the way.
        weights = std::make_shared<op::v0::Parameter>(ov::element::u8, ov::PartialShape{-1});
        weights->set_friendly_name(WEIGHTS_NAME);
        weights->output(0).get_tensor().set_names({WEIGHTS_NAME});
        model.add_parameters({weights});
    }
    ov::Output<ov::Node> step;
    for (auto& [node, layer] : found) {
        for (const auto cache : {KEY_CACHE, VALUE_CACHE}) {
            auto parameter = ov::as_type_ptr<op::v0::Parameter>(node->get_input_node_shared_ptr(cache));
            OPENVINO_ASSERT(parameter, "a paged attention whose cache is no input");
            const size_t bytes = cache == KEY_CACHE ? layer.key_bytes : layer.value_bytes;
            parameter->set_element_type(ov::element::u8);
            parameter->set_partial_shape({-1, int64_t(layer.kv_heads), int64_t(BLOCK_TOKENS), int64_t(bytes / BLOCK_TOKENS)});
            parameter->validate_and_infer_types();
        }
        const auto all = node->input_values();
        if (!step.get_node()) step = step_of(*node);
        ov::OutputVector inputs(all.begin(), all.begin() + STEP);
        inputs.push_back(step);
        if (weights) inputs.push_back(weights);
        // The plugin's operations have the type that they compute in whatever the graph says, ours what it says.
        if (compute == Compute::bf16)
            for (auto input : {QUERY, KEY, VALUE})
                inputs[input] = std::make_shared<op::v0::Convert>(inputs[input], ov::element::bf16);
        const auto found_before = compute == Compute::bf16 ? std::nullopt : before(all[QUERY], all[KEY], all[VALUE], layer);
        if (found_before) {
            inputs[ROWS] = found_before->rows;
            inputs[COS] = found_before->cos;
            inputs[SIN] = found_before->sin;
        }
        std::shared_ptr<ov::Node> own = std::make_shared<Attention>(inputs, layer, found_before.has_value());
        own->set_friendly_name(node->get_friendly_name());
        if (compute == Compute::bf16 || found_before)
            own = std::make_shared<op::v0::Convert>(own, node->get_output_element_type(0));
        node->output(0).replace(own->output(0));
    }
    return !found.empty();
}

void ovfleet::check_attentions(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops())
        if (std::strcmp(node->get_type_name(), PLUGINS_ATTENTION) == 0) check_heads(*node);
}

ov::Extension::Ptr ovfleet::attention_extension() {
    return std::make_shared<ov::OpExtension<Attention>>();
}
