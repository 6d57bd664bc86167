// The attention by itself, for tests.
#include "../shim.h"
#include "run.hpp"

extern "C" int ovfleet_try_attention(const ovfleet_attention* asked) {
    using namespace ovfleet;
    const auto* kernels = kernels_of(asked->kernels);
    if (!kernels) return 0;
    Layer layer{};
    layer.heads = asked->heads;
    layer.kv_heads = asked->kv_heads;
    layer.key_size = asked->size;
    layer.value_size = asked->value_size;
    layer.precision = Precision(asked->precision);
    layer.scale = asked->scale;
    layer.share = asked->share;
    layer.weighs = asked->weights != nullptr;
    layer.window = asked->window;
    layer.is_bf16 = asked->is_bf16 != 0;
    layer.in_bf16 = asked->in_bf16 != 0;
    measure(layer);
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < asked->count; ++i) {
        const auto& one = asked->sequences[i];
        sequences.push_back({one.begin, one.count, one.past, one.blocks, one.place});
    }
    const size_t query_row = asked->row ? asked->row : layer.heads * layer.key_size,
                 key_row = asked->row ? asked->row : layer.kv_heads * layer.key_size,
                 value_row = asked->row ? asked->row : layer.kv_heads * layer.value_size;
    run(*kernels, layer, sequences,
        {asked->queries, asked->keys, asked->values, query_row, key_row, value_row, asked->cos, asked->sin, asked->output,
         asked->key_cache, asked->value_cache, asked->weights, asked->step_blocks});
    return 1;
}
