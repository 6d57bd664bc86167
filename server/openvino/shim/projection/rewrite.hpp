// Which multiplications of a graph our own projections are for.
#pragma once

#include <openvino/core/model.hpp>

namespace ovfleet::projection {

// Whether there is no multiplication by weights in a model that could not be replaced.
bool can_replace_all(const ov::Model& model);

// Replaces multiplications by integer weights by our own, with what is before and behind them that ours does too; `in_bf16`,
// as what is around them is computed in bf16. Answers how many were replaced. Others stay the plugin's.
size_t replace_all(ov::Model& model, bool in_bf16);

}  // namespace ovfleet::projection
