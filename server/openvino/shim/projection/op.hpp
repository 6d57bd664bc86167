// Projections of our own as operations of a graph.
#pragma once

#include <openvino/core/model.hpp>
#include <openvino/core/op_extension.hpp>

namespace ovfleet {

// Replaces multiplications by integer weights by our own, with what is before and behind them that ours does too;
// `in_bf16`, as what is around them is computed in bf16. Answers how many were replaced. Others stay the plugin's.
size_t put_own_projections(ov::Model& model, bool in_bf16);

// Whether there is no multiplication by weights in a model that could not be replaced.
bool can_own_projections(const ov::Model& model);

// How graphs with them are read.
ov::Extension::Ptr projection_extension();

}  // namespace ovfleet
