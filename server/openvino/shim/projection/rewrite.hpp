// Replaces multiplications of a graph with native projections.
#pragma once

#include <set>

#include <openvino/core/model.hpp>

#include "../isa.hpp"

namespace ovfleet::projection {

// Whether the native projections support every multiplication by weights in a model, except for `others`.
bool supports_all(const ov::Model& model, const std::set<const ov::Node*>& others);

// The precision of activations between native projections and the operations around them.
enum class Activations { f32, bf16 };

// The kernels and precisions of the native projections.
struct Target {
    Isa isa;
    Activations activations;
    // The number of terms into which quantized activations are split: one 8-bit term, or two that represent 15 bits.
    size_t terms;
};

// Replaces the multiplications that the native projections support in a paged model or an image encoder. Returns the number of
// replaced multiplications.
size_t replace_projections(ov::Model& model, const Target& target);

}  // namespace ovfleet::projection
