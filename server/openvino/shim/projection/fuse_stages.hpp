// Fuses consecutive projections into one operation.
#pragma once

#include <openvino/core/model.hpp>

namespace ovfleet::projection {

// Replaces each chain of projections, in which the destination of one is the source of the next, with one operation. Image
// encoders keep them separate: the destinations between stages would need memory of their own (decision 0107).
void fuse_stages(ov::Model& model);

}  // namespace ovfleet::projection
