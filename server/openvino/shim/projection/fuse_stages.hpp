// Fuses consecutive projections into one operation.
#pragma once

#include <openvino/core/model.hpp>

namespace ovfleet::projection {

// Replaces each chain of projections with one operation. In a chain, the destination of each projection is the source of the
// next. Do not call this function for image encoders, because the destinations between stages would need additional memory
// (decision 0107).
void fuse_stages(ov::Model& model);

}  // namespace ovfleet::projection
