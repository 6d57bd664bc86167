// The metadata of a step: its sequences and their blocks.
#pragma once

#include <vector>

#include <openvino/core/node_output.hpp>
#include <openvino/runtime/tensor.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// A single tensor (i32) contains the metadata of a step for all attention layers, because the plugin spends time on each input
// of a custom operation. It contains, one after the other:
// - the number S of sequences;
// - the number of past tokens of each sequence [S];
// - the index of the first new token of each sequence, followed by the number of new tokens [S + 1];
// - the index of the first block of each sequence, followed by the number of blocks [S + 1];
// - the blocks of all sequences.
//
// A view parses and validates the tensor when the first layer of a step reads it. The other layers receive the same content, so
// they only compare it with the view's copy. The view has its own copy so that the validated content cannot change.
class StepView {
public:
    // Returns the output of an operation that builds the metadata tensor from inputs of the plugin's paged attention.
    static ov::Output<ov::Node> concat(const ov::Output<ov::Node>& past_lens, const ov::Output<ov::Node>& subsequence_begins,
                                       const ov::Output<ov::Node>& block_indices_begins,
                                       const ov::Output<ov::Node>& block_indices);

    // Reads the metadata of a step with `tokens` new tokens and a cache of `cache_blocks` blocks. Throws unless the tokens and
    // blocks of the sequences add up to those of the step, each sequence has enough blocks, and every block is in the cache.
    void read(const ov::Tensor& tensor, size_t tokens, size_t cache_blocks);

    const std::vector<Sequence>& sequences() const { return sequences_; }
    // The number of blocks of all sequences.
    size_t num_blocks() const { return num_blocks_; }

private:
    void parse(size_t tokens);

    std::vector<int32_t> content_;
    std::vector<Sequence> sequences_;
    size_t tokens_ = 0, num_blocks_ = 0;
    // The largest block index of the step, plus 1.
    size_t blocks_end_ = 0;
};

}  // namespace ovfleet
