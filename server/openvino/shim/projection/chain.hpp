// Projections that follow each other.
#pragma once

#include <openvino/core/model.hpp>

namespace ovfleet::projection {

// Makes one operation of each chain of projections in which the one's results are the next one's rows.
void join_chains(ov::Model& model);

}  // namespace ovfleet::projection
