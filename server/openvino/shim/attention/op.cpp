// The native paged attention as an operation of a graph: which layers it replaces, and what its inputs are.
#include "op.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../attributes.hpp"
#include "../graph/nodes.hpp"
#include "rope_fusion.hpp"
#include "run.hpp"
#include "step_view.hpp"

namespace {

using namespace ovfleet;
namespace op = ov::op;

// The inputs of the plugin's paged attention. The native attention has the first five inputs, followed by STEP, by
// BLOCK_SCORES if it reports block scores, and by the sinks if the layer has sinks. If the native attention splits the
// merged projection and applies the rotary embedding, the first three inputs are QKV, COS and SIN instead.
enum Input : size_t {
    QUERY,
    KEY,
    VALUE,
    KEY_CACHE,
    VALUE_CACHE,
    PAST_LENS,
    STEP = PAST_LENS,
    SUBSEQUENCE_BEGINS,
    BLOCK_SCORES = SUBSEQUENCE_BEGINS,
    BLOCK_INDICES,
    BLOCK_INDICES_BEGINS,
    SCALE,
    SLIDING_WINDOW,
    ALIBI_SLOPES,
    MAX_CONTEXT_LEN,
    SINKS = 20,
    QKV = QUERY,
    COS = KEY,
    SIN = VALUE,
};

// The type name of the plugin's paged attention.
constexpr const char* PLUGIN_ATTENTION = "PagedAttentionExtension";

// The name of the model input for block scores. The input is a buffer `[kv_head][block]` of f32, passed as bytes, to which each
// layer adds its scores.
constexpr const char* BLOCK_SCORES_NAME = "block_scores";

// Whether an attention layer applies the rotary embedding itself.
enum class RopeFusion { separate, fused };

// Whether the last input of an attention layer contains sinks: a float for each query head. The floats are stored as bytes,
// because a plugin that computes in another precision would convert an input of floats.
enum class Sinks { absent, present };

class Attention : public op::Op {
public:
    OPENVINO_OP("PagedAttention", "ovfleet");

    Attention() = default;
    Attention(const ov::OutputVector& inputs, Isa isa, const Layer& layer, RopeFusion rope, Sinks sinks)
        : Op(inputs), isa_(isa), layer_(layer), fuses_rope_(rope == RopeFusion::fused), has_sinks_(sinks == Sinks::present) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        // Check the attributes, because they may come from a file.
        const char* fault = unsupported(layer_);
        OPENVINO_ASSERT(!fault, "native attention has invalid attributes: ", fault);
        OPENVINO_ASSERT(isa_ > Isa::plugin && int64_t(isa_) < ISA_COUNT,
                        "native attention has an unknown instruction set: ", int64_t(isa_));
        const size_t inputs = get_input_size() - (has_sinks_ ? 1 : 0);
        OPENVINO_ASSERT(inputs == BLOCK_SCORES || inputs == BLOCK_SCORES + 1,
                        "native attention must have 6 or 7 inputs, and one more with sinks, but has ", get_input_size());
        set_cache_sizes(layer_);
        const auto tokens = get_input_partial_shape(QUERY);
        const auto count = tokens.rank().is_static() && !fuses_rope_ ? tokens[0] : ov::Dimension::dynamic();
        set_output_type(0, get_input_element_type(QUERY), {count, ov::Dimension(layer_.heads * layer_.value_size)});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Attention>(inputs, isa_, layer_, fuses_rope_ ? RopeFusion::fused : RopeFusion::separate,
                                           has_sinks_ ? Sinks::present : Sinks::absent);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        const auto visit = [&](const char* name, size_t& value) {
            auto number = int64_t(value);
            visitor.on_attribute(name, number);
            value = size_t(number);
        };
        visit_isa(visitor, isa_);
        visit("heads", layer_.heads);
        visit("kv_heads", layer_.kv_heads);
        visit("key_size", layer_.key_size);
        visit("value_size", layer_.value_size);
        auto precision = int64_t(layer_.precision);
        visitor.on_attribute("precision", precision);
        layer_.precision = Precision(precision);
        const auto visit_bits = [&](const char* name, float& value) {
            auto bits = bits_of(value);
            visitor.on_attribute(name, bits);
            value = float_of(bits);
        };
        visit_bits("scale_bits", layer_.scale);
        visit_bits("attention_mass_bits", layer_.attention_mass);
        visit("window", layer_.window);
        visitor.on_attribute("fuses_rope", fuses_rope_);
        visitor.on_attribute("has_sinks", has_sinks_);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto* kernels = attention_kernels(isa_);
        OPENVINO_ASSERT(kernels, "this processor does not support the instruction set of native attention: ", int64_t(isa_));
        Layer layer = layer_;
        check_types(outputs, inputs);
        layer.is_bf16 = inputs[QUERY].get_element_type() == ov::element::bf16;
        StepTensors tensors{};
        const size_t tokens = set_activations(layer, inputs, tensors);
        outputs[0].set_shape({tokens, layer.heads * layer.value_size});
        tensors.output = outputs[0].data();
        // The operation writes to the cache, although the cache is an input. This is safe, because the cache belongs to the
        // runner, and no other node reads or writes it.
        tensors.key_cache = const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[KEY_CACHE].data()));
        tensors.value_cache = const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[VALUE_CACHE].data()));
        const size_t cache_blocks = std::min(inputs[KEY_CACHE].get_size() / (layer.kv_heads * layer.key_bytes),
                                             inputs[VALUE_CACHE].get_size() / (layer.kv_heads * layer.value_bytes));
        thread_local StepView step;
        step.read(inputs[STEP], tokens, cache_blocks);
        tensors.step_blocks = step.num_blocks();
        if (has_sinks_) {
            check_size(inputs.back(), layer.heads * sizeof(float), "sinks");
            tensors.sinks = static_cast<const float*>(inputs.back().data());
        }
        layer.block_scores = reports_block_scores(inputs);
        if (layer.block_scores) {
            auto* scores = const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[BLOCK_SCORES].data()));
            tensors.block_scores = reinterpret_cast<float*>(scores);
            OPENVINO_ASSERT(inputs[BLOCK_SCORES].get_size() / sizeof(float) >= layer.kv_heads * tensors.step_blocks,
                            "the buffer for the block scores of native attention has ", inputs[BLOCK_SCORES].get_size(),
                            " bytes; at least ", layer.kv_heads * tensors.step_blocks * sizeof(float), " are required");
        }
        run(*kernels, layer, step.sequences(), tensors);
        return true;
    }

private:
    // Sets the queries, keys and values of a step, and returns the number of tokens in the step. Throws unless the sizes of the
    // inputs match the layer.
    size_t set_activations(const Layer& layer, const ov::TensorVector& inputs, StepTensors& tensors) const {
        const size_t queries = layer.heads * layer.key_size, keys = layer.kv_heads * layer.key_size,
                     values = layer.kv_heads * layer.value_size;
        if (!fuses_rope_) {
            const size_t tokens = inputs[QUERY].get_size() / queries;
            check_size(inputs[QUERY], tokens * queries, "queries");
            check_size(inputs[KEY], tokens * keys, "keys");
            check_size(inputs[VALUE], tokens * values, "values");
            tensors.queries = inputs[QUERY].data();
            tensors.keys = inputs[KEY].data();
            tensors.values = inputs[VALUE].data();
            tensors.query_stride = queries, tensors.key_stride = keys, tensors.value_stride = values;
            return tokens;
        }
        const auto* qkv = static_cast<const float*>(inputs[QKV].data());
        const size_t stride = queries + keys + values, tokens = inputs[QKV].get_size() / stride;
        check_size(inputs[QKV], tokens * stride, "queries, keys and values");
        check_size(inputs[COS], tokens * layer.key_size, "cosines");
        check_size(inputs[SIN], tokens * layer.key_size, "sines");
        tensors.query_stride = tensors.key_stride = tensors.value_stride = stride;
        tensors.queries = qkv;
        tensors.keys = qkv + queries;
        tensors.values = qkv + queries + keys;
        tensors.cos = static_cast<const float*>(inputs[COS].data());
        tensors.sin = static_cast<const float*>(inputs[SIN].data());
        return tokens;
    }

    // Throws unless the tensors have the types that the kernels assume when they access the memory. A plugin that computes in
    // f16 would pass f16.
    void check_types(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
        const auto type = inputs.at(QUERY).get_element_type();
        const auto check = [&](Input input, const ov::element::Type& expected) {
            OPENVINO_ASSERT(inputs.at(input).get_element_type() == expected, "input ", size_t(input),
                            " of native attention has the type ", inputs[input].get_element_type(), " instead of ", expected);
        };
        check(QUERY, type == ov::element::bf16 && !fuses_rope_ ? ov::element::bf16 : ov::element::f32);
        check(KEY, type);
        check(VALUE, type);
        check(KEY_CACHE, ov::element::u8);
        check(VALUE_CACHE, ov::element::u8);
        check(STEP, ov::element::i32);
        // The remaining inputs, if any, are the block scores, the sinks, or both.
        for (size_t input = BLOCK_SCORES; input < inputs.size(); ++input) check(Input(input), ov::element::u8);
        OPENVINO_ASSERT(outputs.at(0).get_element_type() == type, "the output of native attention has the type ",
                        outputs[0].get_element_type(), " instead of ", type);
    }

    bool reports_block_scores(const ov::TensorVector& inputs) const {
        return inputs.size() > BLOCK_SCORES + (has_sinks_ ? 1 : 0);
    }

    static void check_size(const ov::Tensor& tensor, size_t expected, const char* name) {
        OPENVINO_ASSERT(tensor.get_size() == expected, "the ", name, " of native attention have ", tensor.get_size(),
                        " elements instead of ", expected);
    }

    Isa isa_ = Isa::plugin;
    Layer layer_{};
    bool fuses_rope_ = false, has_sinks_ = false;
};

int64_t size_of(const ov::Node& node, const char* name) {
    const auto found = node.get_rt_info().find(name);
    OPENVINO_ASSERT(found != node.get_rt_info().end(), "a paged attention operation lacks the rt_info ", name);
    return found->second.as<int64_t>();
}

// Throws unless the numbers of KV heads and the head sizes of an attention layer are from 1 to `HEADS_MAX`. This check comes
// before any use of these numbers, because other sizes are divided by them.
void check_heads(const ov::Node& node) {
    for (const char* name : {"num_k_heads", "k_head_size", "num_v_heads", "v_head_size"}) {
        const auto size = size_of(node, name);
        OPENVINO_ASSERT(size > 0 && size <= int64_t(HEADS_MAX), "the attention ", node.get_friendly_name(), " has ", name,
                        " = ", size, "; it must be from 1 to ", HEADS_MAX);
    }
}

// Reads an input that is a constant with one element. Returns false for other inputs.
template <typename T>
bool number(const ov::Node& node, size_t input, T& value) {
    auto constant = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(input));
    if (!constant || ov::shape_size(constant->get_shape()) != 1) return false;
    value = constant->cast_vector<T>()[0];
    return true;
}

// Returns the sinks of a layer: an empty list if the layer has none, and no value if the sinks are not a floating-point
// constant with one element for each query head.
std::optional<std::vector<float>> sinks_of(const ov::Node& node, size_t heads) {
    if (node.get_input_size() <= SINKS) return std::vector<float>{};
    auto value = node.get_input_node_shared_ptr(SINKS);
    // The front end converts the sinks to f16. Read the constant before this conversion: it has the f32 values of the file.
    while (ov::is_type<op::v0::Convert>(value) || ov::is_type<op::v1::Reshape>(value))
        value = value->get_input_node_shared_ptr(0);
    auto constant = ov::as_type_ptr<op::v0::Constant>(value);
    if (!constant || !constant->get_element_type().is_real()) return {};
    auto sinks = constant->cast_vector<float>();
    return sinks.empty() || sinks.size() == heads ? std::make_optional(std::move(sinks)) : std::nullopt;
}

// Whether a layer uses none of the plugin's features that the native attention lacks (ALiBi slopes, score aggregation,
// rotations, masks). The inputs of an unused feature are empty constants, or scalars that only configure the feature.
bool has_no_other_features(const ov::Node& node) {
    for (size_t input = ALIBI_SLOPES; input < node.get_input_size(); ++input) {
        if (input == MAX_CONTEXT_LEN || input == SINKS) continue;
        auto constant = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(input));
        if (!constant || (constant->get_shape().size() > 0 && ov::shape_size(constant->get_shape()) > 0)) return false;
    }
    return true;
}

// Describes a layer for the native attention. Returns false if the layer is not supported.
bool describe(const ov::Node& node, Precision precision, Layer& layer) {
    check_heads(node);
    layer.kv_heads = size_t(size_of(node, "num_k_heads"));
    layer.key_size = size_t(size_of(node, "k_head_size"));
    layer.value_size = size_t(size_of(node, "v_head_size"));
    const auto& width = node.get_input_partial_shape(QUERY);
    if (width.rank().is_dynamic() || width.size() != 2 || width[1].is_dynamic()) return false;
    if (size_t(width[1].get_length()) % layer.key_size != 0) return false;
    layer.heads = size_t(width[1].get_length()) / layer.key_size;
    layer.precision = precision;
    int32_t window = 0;
    if (!number(node, SCALE, layer.scale) || !number(node, SLIDING_WINDOW, window) || window < 0) return false;
    layer.window = size_t(window);
    set_cache_sizes(layer);
    return layer.kv_heads == size_t(size_of(node, "num_v_heads")) && !unsupported(layer) && has_no_other_features(node) &&
           sinks_of(node, layer.heads);
}

}  // namespace

bool ovfleet::supports_native_attention(const ov::Model& model) {
    size_t layers = 0;
    for (const auto& node : model.get_ordered_ops()) {
        if (std::strcmp(node->get_type_name(), PLUGIN_ATTENTION) != 0) continue;
        Layer layer{};
        if (!describe(*node, Precision::f32, layer)) return false;
        ++layers;
    }
    return layers > 0;
}

void ovfleet::replace_attention(ov::Model& model, const AttentionPlan& plan) {
    std::vector<std::pair<std::shared_ptr<ov::Node>, Layer>> found;
    for (const auto& node : model.get_ordered_ops()) {
        if (std::strcmp(node->get_type_name(), PLUGIN_ATTENTION) != 0) continue;
        Layer layer{};
        OPENVINO_ASSERT(describe(*node, plan.kv_cache, layer), "the native attention does not support ",
                        node->get_friendly_name());
        layer.attention_mass = plan.attention_mass;
        found.emplace_back(node, layer);
    }
    OPENVINO_ASSERT(!found.empty(), "the model has no paged attention");
    std::shared_ptr<op::v0::Parameter> scores;
    if (plan.block_scores) {
        // The type is u8, as for the caches, because a plugin that computes in another precision would convert floats.
        scores = named_parameter(BLOCK_SCORES_NAME, ov::element::u8, {-1});
        model.add_parameters({scores});
    }
    ov::Output<ov::Node> step;
    for (auto& [node, layer] : found) {
        for (const auto cache : {KEY_CACHE, VALUE_CACHE}) {
            auto parameter = ov::as_type_ptr<op::v0::Parameter>(node->get_input_node_shared_ptr(cache));
            OPENVINO_ASSERT(parameter, "the cache of ", node->get_friendly_name(), " is not an input of the model");
            const size_t bytes = cache == KEY_CACHE ? layer.key_bytes : layer.value_bytes;
            parameter->set_element_type(ov::element::u8);
            parameter->set_partial_shape({-1, int64_t(layer.kv_heads), int64_t(BLOCK_TOKENS), int64_t(bytes / BLOCK_TOKENS)});
            parameter->validate_and_infer_types();
        }
        const auto all = node->input_values();
        if (!step.get_node())
            step = StepView::concat(all[PAST_LENS], all[SUBSEQUENCE_BEGINS], all[BLOCK_INDICES_BEGINS], all[BLOCK_INDICES]);
        ov::OutputVector inputs(all.begin(), all.begin() + STEP);
        inputs.push_back(step);
        if (scores) inputs.push_back(scores);
        // `describe` has verified that the sinks, if any, are constant.
        const auto sinks = sinks_of(*node, layer.heads).value_or(std::vector<float>());
        if (!sinks.empty())
            inputs.push_back(
                std::make_shared<op::v0::Constant>(ov::element::u8, ov::Shape{sinks.size() * sizeof(float)}, sinks.data()));
        // The plugin's operations compute in the configured precision, regardless of the types in the graph. Native operations
        // use the types in the graph, so their inputs are converted here.
        if (plan.is_bf16)
            for (auto input : {QUERY, KEY, VALUE})
                inputs[input] = std::make_shared<op::v0::Convert>(inputs[input], ov::element::bf16);
        const auto rope = plan.is_bf16 ? std::nullopt : find_rope(all[QUERY], all[KEY], all[VALUE], layer);
        if (rope) {
            inputs[QKV] = rope->qkv;
            inputs[COS] = rope->cos;
            inputs[SIN] = rope->sin;
        }
        const auto fusion = rope ? RopeFusion::fused : RopeFusion::separate;
        std::shared_ptr<ov::Node> native =
            std::make_shared<Attention>(inputs, plan.isa, layer, fusion, sinks.empty() ? Sinks::absent : Sinks::present);
        native->set_friendly_name(node->get_friendly_name());
        if (plan.is_bf16 || rope) native = std::make_shared<op::v0::Convert>(native, node->get_output_element_type(0));
        node->output(0).replace(native->output(0));
    }
}

void ovfleet::check_attention_layers(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops())
        if (std::strcmp(node->get_type_name(), PLUGIN_ATTENTION) == 0) check_heads(*node);
}

ov::Extension::Ptr ovfleet::attention_extension() { return std::make_shared<ov::OpExtension<Attention>>(); }
