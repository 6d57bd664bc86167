// The native attention of image encoders as an operation of a graph. This file defines which operations it replaces, and how it
// divides the tokens into sequences.
#include "encoder_op.hpp"

#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include <openvino/op/ops.hpp>

#include "../attributes.hpp"
#include "../graph/nodes.hpp"
#include "../threads.hpp"
#include "run.hpp"

namespace {

using namespace ovfleet;
namespace op = ov::op;
using Attention = op::v13::ScaledDotProductAttention;
using Value = ov::Output<ov::Node>;

enum Input : size_t { QUERY, KEY, VALUE, MASK, SCALE };

Layer layer_of(Isa isa, size_t heads, size_t head_size, float scale) {
    Layer layer{};
    layer.heads = layer.kv_heads = heads;
    layer.key_size = div_up(head_size, KEY_MULTIPLE) * KEY_MULTIPLE;
    layer.value_size = div_up(head_size, VALUE_MULTIPLE) * VALUE_MULTIPLE;
    layer.key_padding = layer.key_size - head_size;
    layer.value_padding = layer.value_size - head_size;
    layer.precision = isa == Isa::avx512_bf16 || isa == Isa::amx ? Precision::bf16 : Precision::f32;
    layer.scale = scale;
    layer.is_bidirectional = true;
    set_cache_sizes(layer);
    return layer;
}

// The inputs are queries, keys and values: [tokens, heads, head size], or [tiles, tokens, heads, head size] if only tokens of
// the same tile attend to each other. The output has the same shape.
class EncoderAttention : public op::Op {
public:
    OPENVINO_OP("EncoderAttention", "ovfleet");

    EncoderAttention() = default;
    EncoderAttention(const ov::OutputVector& inputs, Isa isa, float scale) : Op(inputs), isa_(isa), scale_(scale) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        set_output_type(0, get_input_element_type(QUERY), get_input_partial_shape(QUERY));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<EncoderAttention>(inputs, isa_, scale_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visit_isa(visitor, isa_);
        visitor.on_attribute("scale", scale_);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto* kernels = attention_kernels(isa_);
        OPENVINO_ASSERT(kernels, "this processor does not support the instruction set of native attention: ", int64_t(isa_));
        const auto& shape = inputs.at(QUERY).get_shape();
        OPENVINO_ASSERT(shape.size() == 3 || shape.size() == 4, "the queries of an encoder have ", shape.size(),
                        " dimensions instead of 3 or 4");
        for (const auto& input : inputs)
            OPENVINO_ASSERT(input.get_shape() == shape && input.get_element_type() == ov::element::f32,
                            "the queries, keys and values of an encoder must be f32 with equal shapes, but one input is ",
                            input.get_element_type(), " with the shape ", input.get_shape(), " instead of ", shape);
        const size_t rank = shape.size(), tokens = shape[rank - 3];
        outputs[0].set_shape(shape);
        if (ov::shape_size(shape) == 0) return true;
        const Layer layer = layer_of(isa_, shape[rank - 2], shape[rank - 1], scale_);
        const char* fault = unsupported(layer);
        OPENVINO_ASSERT(!fault, "an encoder has unsupported attention: ", fault);

        const size_t tiles = rank == 4 ? shape[0] : 1, tile_blocks = div_up(tokens, BLOCK_TOKENS);
        OPENVINO_ASSERT(tiles * tile_blocks <= size_t(INT32_MAX), "an encoder has ", tiles * tile_blocks,
                        " blocks of tokens; at most ", INT32_MAX, " are supported");
        std::vector<int32_t> blocks(tiles * tile_blocks);
        std::iota(blocks.begin(), blocks.end(), 0);
        std::vector<Sequence> sequences;
        for (size_t tile = 0; tile < tiles; ++tile)
            sequences.push_back({tile * tokens, tokens, 0, blocks.data() + tile * tile_blocks, tile * tile_blocks});
        // All layers reuse these buffers, because allocating memory from the operating system is slow.
        thread_local Buffer<uint8_t> key_cache, value_cache;
        StepTensors tensors{};
        tensors.queries = inputs[QUERY].data();
        tensors.keys = inputs[KEY].data();
        tensors.values = inputs[VALUE].data();
        tensors.query_stride = tensors.key_stride = tensors.value_stride = shape[rank - 2] * shape[rank - 1];
        tensors.output = outputs[0].data();
        tensors.key_cache = key_cache.at_least(blocks.size() * layer.kv_heads * layer.key_bytes);
        tensors.value_cache = value_cache.at_least(blocks.size() * layer.kv_heads * layer.value_bytes);
        tensors.step_blocks = blocks.size();
        run(*kernels, layer, sequences, tensors);
        return true;
    }

private:
    Isa isa_ = Isa::plugin;
    float scale_ = 0;
};

// Returns the value of a constant with one element, or `fallback` for anything else.
float number_or(const Value& value, float fallback) {
    const auto constant = as<op::v0::Constant>(value);
    return constant && ov::shape_size(constant->get_shape()) == 1 ? constant->cast_vector<float>()[0] : fallback;
}

// Returns the scale of the scores, or 0 if it is not a constant with one element.
float scale_of(const Attention& attention, size_t head_size) {
    if (attention.get_input_size() > SCALE) return number_or(attention.input_value(SCALE), 0);
    return 1 / std::sqrt(float(head_size));
}

// Whether the native attention can replace an operation.
bool is_supported(const Attention& attention, Isa isa) {
    const auto& shape = attention.get_input_partial_shape(QUERY);
    if (attention.get_causal() || shape.rank().is_dynamic() || (shape.size() != 3 && shape.size() != 4)) return false;
    const size_t heads = shape.size() - 3, head_size = shape.size() - 1;
    for (const auto input : {QUERY, KEY, VALUE}) {
        const auto& one = attention.get_input_partial_shape(input);
        if (one != shape || attention.get_input_element_type(input) != ov::element::f32) return false;
    }
    if (shape[heads].is_dynamic() || shape[head_size].is_dynamic()) return false;
    // The input after the scale contains sinks, which `EncoderAttention` does not pass to the kernels.
    if (attention.get_input_size() > SCALE + 1) return false;
    // A floating-point mask that consists of a single 0 changes no score. A boolean mask that consists of a single false would
    // exclude all keys.
    const bool has_mask = attention.get_input_size() > MASK;
    if (has_mask && !attention.get_input_element_type(MASK).is_real()) return false;
    if (has_mask && number_or(attention.input_value(MASK), NAN) != 0) return false;
    const size_t size = size_t(shape[head_size].get_length());
    return !unsupported(layer_of(isa, size_t(shape[heads].get_length()), size, scale_of(attention, size)));
}

void replace_with_native(Attention& attention, Isa isa) {
    const auto& shape = attention.get_input_partial_shape(QUERY);
    // `EncoderAttention` expects the dimension of the tokens before that of the heads, so these two dimensions are swapped. The
    // plugin removes pairs of transposes that cancel each other.
    const std::vector<int64_t> axes = shape.size() == 3 ? std::vector<int64_t>{1, 0, 2} : std::vector<int64_t>{0, 2, 1, 3};
    const auto order = integer_constant(axes);
    const auto transposed = [&](const Value& value) { return std::make_shared<op::v1::Transpose>(value, order); };
    ov::OutputVector inputs;
    for (const auto input : {QUERY, KEY, VALUE}) inputs.push_back(transposed(attention.input_value(input)));
    const float scale = scale_of(attention, size_t(shape[shape.size() - 1].get_length()));
    const auto output = transposed(std::make_shared<EncoderAttention>(inputs, isa, scale));
    output->set_friendly_name(attention.get_friendly_name());
    attention.output(0).replace(output->output(0));
}

// The plugin computes attention in blocks of queries only if the inputs have four dimensions. Otherwise, it needs memory for
// the scores of all pairs of tokens.
void add_dimension(Attention& attention) {
    const auto axis = integer_constant({0});
    const auto unsqueezed = [&](Input input) {
        return std::make_shared<op::v0::Unsqueeze>(attention.input_value(input), axis);
    };
    const auto output = std::make_shared<Attention>(unsqueezed(QUERY), unsqueezed(KEY), unsqueezed(VALUE), false);
    attention.output(0).replace(std::make_shared<op::v0::Squeeze>(output, axis)->output(0));
}

}  // namespace

size_t ovfleet::replace_encoder_attention(ov::Model& model, Isa isa) {
    size_t replaced = 0;
    for (const auto& node : model.get_ordered_ops()) {
        const auto attention = ov::as_type_ptr<Attention>(node);
        if (!attention) continue;
        if (isa != Isa::plugin && is_supported(*attention, isa)) {
            replace_with_native(*attention, isa);
            ++replaced;
        } else if (attention->get_input_size() == MASK && attention->get_input_partial_shape(QUERY).rank() == 3 &&
                   !attention->get_causal()) {
            add_dimension(*attention);
        }
    }
    return replaced;
}
