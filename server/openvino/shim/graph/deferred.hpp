// Constants whose content is computed when it is needed, so that a weight is in memory in only one format at a time.
//
// A deferred constant has reserved memory, which no code can access yet, and parts that know how to compute their content.
// Until the content is computed, rewrites read only the shapes and types of deferred constants, and concatenate parts instead
// of content. `fill` computes the content, in the format that the compiled model uses. It computes a packed weight from the
// weight's tensors in the model's files, a few rows at a time, so these tensors are never in memory as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <openvino/core/model.hpp>
#include <openvino/op/constant.hpp>

#include "../shim.h"

namespace ovfleet {

// The tensors of the model's files.
class TensorSource {
public:
    explicit TensorSource(const ovfleet_tensor_source& source) : source_(source) {}
    TensorSource(const TensorSource&) = delete;
    TensorSource& operator=(const TensorSource&) = delete;
    ~TensorSource() { source_.free(source_.context); }

    // Reads rows of a tensor, converted to the format of the tensor's constants in the graph. Pass null for each constant
    // that is not needed. Several threads may read at the same time.
    void read(size_t tensor, size_t first, size_t count, void* quants, float* scales, void* zeros) const;

private:
    ovfleet_tensor_source source_;
};

// Rows of a tensor in the model's files.
struct TensorRows {
    std::shared_ptr<const TensorSource> source;
    size_t tensor = 0, first = 0, count = 0;
    // See `ovfleet_weight`.
    bool fits_six_bits = false, has_super_scales = false;
};

// One of the consecutive parts of a constant.
struct DeferredPart {
    size_t bytes;
    // Computes the content, possibly on all threads of the calling arena.
    std::function<void(uint8_t* to)> fill;
    // The rows whose quants, scales or zero points are the content. `rows.source` is null if the content is not read from a
    // file.
    TensorRows rows;
};

std::shared_ptr<ov::op::v0::Constant> deferred_constant(const ov::element::Type& type, const ov::Shape& shape,
                                                        std::vector<DeferredPart> parts);
// Returns a deferred constant whose content is the concatenated content of other constants.
std::shared_ptr<ov::op::v0::Constant> concatenated(const ov::element::Type& type, const ov::Shape& shape,
                                                   const std::vector<std::shared_ptr<ov::op::v0::Constant>>& constants);

// Returns the parts of a constant that is not filled, or null for any other constant.
const std::vector<DeferredPart>* deferred_parts(const ov::op::v0::Constant& constant);
// Computes the content of a constant, unless the content is already in memory.
void fill(const ov::op::v0::Constant& constant);
// Computes the content of all deferred constants of a model.
void fill_constants(const ov::Model& model);

}  // namespace ovfleet
