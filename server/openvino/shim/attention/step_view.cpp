#include "step_view.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include <openvino/op/concat.hpp>
#include <openvino/op/shape_of.hpp>

namespace ovfleet {
namespace {

void check(bool holds, const char* fault) { OPENVINO_ASSERT(holds, "the metadata of a step is not valid: ", fault); }

}  // namespace

ov::Output<ov::Node> StepView::concat(const ov::Output<ov::Node>& past_lens, const ov::Output<ov::Node>& subsequence_begins,
                                      const ov::Output<ov::Node>& block_indices_begins,
                                      const ov::Output<ov::Node>& block_indices) {
    auto count = std::make_shared<ov::op::v3::ShapeOf>(past_lens, ov::element::i32);
    return std::make_shared<ov::op::v0::Concat>(
        ov::OutputVector{count, past_lens, subsequence_begins, block_indices_begins, block_indices}, 0);
}

void StepView::read(const ov::Tensor& tensor, size_t tokens, size_t cache_blocks) {
    const auto* begin = static_cast<const int32_t*>(tensor.data());
    const size_t size = tensor.get_size();
    const bool is_known = size > 0 && size == content_.size() && tokens == tokens_ &&
                          std::memcmp(begin, content_.data(), size * sizeof(int32_t)) == 0;
    if (!is_known) {
        content_.assign(begin, begin + size);
        try {
            parse(tokens);
        } catch (...) {
            content_.clear();
            throw;
        }
    }
    check(blocks_end_ <= cache_blocks, "a block is not in the cache");
}

void StepView::parse(size_t tokens) {
    const size_t size = content_.size();
    check(size > 0 && content_[0] >= 0, "the number of sequences is missing or negative");
    const auto count = size_t(content_[0]);
    check(count < size && size >= 1 + count + 2 * (count + 1), "it is too short");
    const auto *past = content_.data() + 1, *begins = past + count, *block_begins = begins + count + 1,
               *blocks = block_begins + count + 1;
    num_blocks_ = size - (1 + count + 2 * (count + 1));
    check(begins[0] == 0 && size_t(begins[count]) == tokens,
          "the token counts of its sequences do not add up to the tokens of the step");
    check(block_begins[0] == 0 && size_t(block_begins[count]) == num_blocks_,
          "the block counts of its sequences do not add up to the blocks of the step");
    tokens_ = tokens;
    sequences_.clear();
    for (size_t i = 0; i < count; ++i) {
        check(past[i] >= 0 && begins[i] <= begins[i + 1] && block_begins[i] <= block_begins[i + 1], "a count is negative");
        const auto new_tokens = size_t(begins[i + 1] - begins[i]), own_blocks = size_t(block_begins[i + 1] - block_begins[i]);
        check((size_t(past[i]) + new_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS <= own_blocks, "a sequence has too few blocks");
        sequences_.push_back(
            {size_t(begins[i]), new_tokens, size_t(past[i]), blocks + block_begins[i], size_t(block_begins[i])});
    }
    // A negative block index becomes a large unsigned number, which `read` rejects.
    uint32_t last = 0;
    for (size_t i = 0; i < num_blocks_; ++i) last = std::max(last, uint32_t(blocks[i]));
    blocks_end_ = num_blocks_ == 0 ? 0 : size_t(last) + 1;
}

}  // namespace ovfleet
