// The metadata of a step: its sequences and their blocks.
#pragma once

#include <vector>

#include <openvino/core/node_output.hpp>
#include <openvino/runtime/tensor.hpp>

#include "kernels/attention.hpp"

namespace ovfleet {

// One tensor (i32) has the metadata of a step for all attention layers, since the plugin needs time for each input of an
// operation that it does not know: the number of sequences, then for each sequence the number of past tokens, the `begins` of
// its tokens (and their end), the `begins` of its blocks (and their end), and the blocks.
//
// A view parses and validates the tensor once per step. The following layers get the same content, so they only compare it with
// the view. The view is a copy, so nothing can change what was validated.
class StepView {
public:
    // The tensor of the metadata, as an operation on the inputs of the plugin's paged attention.
    static ov::Output<ov::Node> concat(const ov::Output<ov::Node>& past_lens, const ov::Output<ov::Node>& subsequence_begins,
                                       const ov::Output<ov::Node>& block_indices_begins,
                                       const ov::Output<ov::Node>& block_indices);

    // Reads the metadata of a step with `tokens` new tokens and a cache of `cache_blocks` blocks. Throws unless every token
    // and every block exists.
    void read(const ov::Tensor& tensor, size_t tokens, size_t cache_blocks);

    const std::vector<Sequence>& sequences() const { return sequences_; }
    // The number of blocks of all sequences.
    size_t num_blocks() const { return num_blocks_; }

private:
    void parse(size_t tokens);

    std::vector<int32_t> content_;
    std::vector<Sequence> sequences_;
    size_t tokens_ = 0, num_blocks_ = 0;
    // One more than the index of the largest block.
    size_t blocks_end_ = 0;
};

}  // namespace ovfleet
