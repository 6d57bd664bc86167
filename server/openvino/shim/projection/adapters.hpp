// LoRA adapters in native projections: their matrices in memory, and their products with the rows of a step.
#pragma once

#include <vector>

#include "../graph/lora.hpp"
#include "kernels/projection.hpp"

namespace ovfleet::projection {

// Packs the adapters of a matrix, and returns the memory that contains them. Sets `matmul.adapter_count`; the sizes and the
// epilogue of `matmul` must already be set. `norm` contains the factors of the norm that is applied to the source, or is null
// if there is none.
std::vector<uint8_t> pack_adapters(const std::vector<std::shared_ptr<LoraPart>>& parts, const float* norm, Matmul& matmul);

// The products of the adapters' `down` matrices with the rows of a step that have adapters. They are divided into items, which
// threads take one at a time.
class AdapterProducts {
public:
    // `numbers` contains, for each row, the number that identifies its adapter, or is null if no row has an adapter. The
    // padding of the last tile gets the adapter of the last row.
    void plan(const Matmul& matmul, size_t M, size_t padded, const int32_t* numbers);

    size_t items() const { return items_.size(); }
    // The total number of multiplications in all items.
    size_t products() const { return products_; }
    void compute(const Kernels& kernels, const Matmul& matmul, FloatData src, size_t item) const;

    // Returns the products for each row, or null if no row has an adapter that changes this matrix.
    const LoraDown* rows() const { return items_.empty() ? nullptr : lora_.data(); }

private:
    struct Item {
        AdapterRows rows;
        size_t first, last;
    };

    std::vector<Item> items_;
    std::vector<LoraDown> lora_;
    std::vector<uint32_t> order_;
    std::vector<float> down_;
    size_t products_ = 0;
};

}  // namespace ovfleet::projection
