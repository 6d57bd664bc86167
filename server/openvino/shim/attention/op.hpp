// Our own paged attention as an operation of a graph.
#pragma once

#include <openvino/core/model.hpp>
#include <openvino/core/op_extension.hpp>

#include "attention.hpp"

namespace ovfleet {

// Replaces the paged attentions of a model by our own, whose cache has numbers of this precision; prompts are computed as
// `compute` says, long ones by the keys that have `share` of the weight; with `weighs` the model has another input, to which what
// weight decodes gave to each block is added. False, and nothing is changed, if one of them does what ours does not.
bool put_own_attention(ov::Model& model, Precision precision, Compute compute, float share, bool weighs);

// Throws if a paged attention of a model has no heads, or heads of no numbers.
void check_attentions(const ov::Model& model);

// How graphs with it are read.
ov::Extension::Ptr attention_extension();

}  // namespace ovfleet
