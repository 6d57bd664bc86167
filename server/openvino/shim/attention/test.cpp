// Runs the native attention without a graph, for tests.
#include "../shim.h"
#include "run.hpp"

extern "C" int ovfleet_test_attention(const ovfleet_attention_test* test) {
    using namespace ovfleet;
    const auto isa = Isa(test->isa);
    const auto* kernels = test->tile_model ? attention_tile_model(isa) : attention_kernels(isa);
    if (!kernels) return 0;
    Layer layer{};
    layer.heads = test->heads;
    layer.kv_heads = test->kv_heads;
    layer.key_size = test->key_size;
    layer.value_size = test->value_size;
    layer.precision = test->kv_cache == OVFLEET_U4     ? Precision::u4
                      : test->kv_cache == OVFLEET_F32  ? Precision::f32
                      : test->kv_cache == OVFLEET_BF16 ? Precision::bf16
                      : test->kv_cache == OVFLEET_F16  ? Precision::f16
                                                       : Precision::u8;
    layer.scale = test->scale;
    layer.attention_mass = test->attention_mass;
    layer.block_scores = test->block_scores != nullptr;
    layer.window = test->window;
    layer.is_bf16 = test->is_bf16 != 0;
    set_cache_sizes(layer);
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < test->sequence_count; ++i) {
        const auto& one = test->sequences[i];
        sequences.push_back({one.begin, one.count, one.past, one.blocks, one.first_block});
    }
    const size_t query_stride = test->stride ? test->stride : layer.heads * layer.key_size,
                 key_stride = test->stride ? test->stride : layer.kv_heads * layer.key_size,
                 value_stride = test->stride ? test->stride : layer.kv_heads * layer.value_size;
    run(*kernels, layer, sequences,
        {test->queries, test->keys, test->values, query_stride, key_stride, value_stride, test->cos, test->sin, test->output,
         test->key_cache, test->value_cache, test->block_scores, test->step_blocks, test->sinks});
    return 1;
}
