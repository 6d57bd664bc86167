// What OpenVINO's C API lacks, behind a C interface of our own: reading GGUF through its front end, and the
// graph rewrites that turn a language model into a paged one. Models cross this border as the C API's own
// `ov_model_t`, so that everything else goes through the C API.
//
// Every function returns 0, or 1 with a message in ovfleet_last_error(); none throws.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ov_model ov_model_t;
typedef struct ov_core ov_core_t;
typedef struct ov_compiled_model ov_compiled_model_t;

// The message of the last failed call of this thread; valid until its next failed call.
const char* ovfleet_last_error(void);

// Reads a GGUF file as a stateful model with the inputs input_ids, attention_mask, position_ids, beam_idx
// and the output logits. To be freed with ov_model_free.
int ovfleet_read_gguf(const char* path, ov_model_t** model);

// A weight matrix as groups along its rows: w[r][c] = (q[r][c] - zero[r][c / group]) * scale[r][c / group].
typedef struct {
    const char* tensor;     // its name in the GGUF file
    uint32_t type;          // element type of quants: see ovfleet_element
    uint32_t zeros_type;    // element type of zeros: see ovfleet_element; ignored without zeros
    size_t rows, columns, group;
    const void* quants;     // rows * columns elements, two u4 to a byte, the first in the low half
    const float* scales;    // rows * columns / group; null: quants are the weights themselves
    const void* zeros;      // rows * columns / group elements; null: zero
} ovfleet_weight;

enum ovfleet_element { OVFLEET_U4 = 0, OVFLEET_U8 = 1, OVFLEET_I8 = 2, OVFLEET_F16 = 3, OVFLEET_BF16 = 4, OVFLEET_F32 = 5 };

// Where the weights of a model read by ovfleet_read_gguf are, so that none is searched for. To be freed with
// ovfleet_free_weights, before the graph is changed by anything else.
typedef struct ovfleet_weights ovfleet_weights_t;
int ovfleet_find_weights(const ov_model_t* model, ovfleet_weights_t** weights);
void ovfleet_free_weights(ovfleet_weights_t* weights);

// Writes a weight anew. `found` tells whether the graph has it. The rows of a stack of matrices, one for each
// expert, follow each other.
int ovfleet_set_weight(ovfleet_weights_t* weights, const ovfleet_weight* weight, int* found);

// Divides the frequencies of the rotary embeddings of this base (0: of any) by `factors`, one for each pair of
// a head. `applied` counts the frequency tables that were divided; 0 if none was of this length and base.
int ovfleet_divide_frequencies(ov_model_t* model, double base, const float* factors, size_t count, size_t* applied);

// Multiplies the cosines and sines of the rotary embeddings of so many pairs by `factor`. `applied` counts them.
int ovfleet_scale_rotary(ov_model_t* model, float factor, size_t count, size_t* applied);

// Rewrites rotary embeddings of adjacent pairs into the half-rotation form that plugins fuse, where q and k of
// every such layer come straight from their projections. The rows of those must then be permuted (evens, then
// odds, within each head): `permuted` is called for each with its name in the file and its head size.
int ovfleet_rewrite_rotary(ov_model_t* model,
                           void (*permuted)(void* context, const char* tensor, size_t head_size),
                           void* context);

// Takes rotary embeddings of adjacent pairs for ones of halves, and rewrites them into the form that plugins fuse:
// for a file of halves whose graph rotates pairs. `rotated` counts them.
int ovfleet_rotate_halves(ov_model_t* model, size_t* rotated);

// The front end lays out what its experts give as one sequence, and paged attention tokens each as their own:
// gives it the shape of what the experts read. Divides the weights of a token's experts by their sum, too, where
// the graph does not. `aligned` counts the layers.
int ovfleet_mend_experts(ov_model_t* model, size_t* aligned);

// Tells of each projection its name (that of its weight in a GGUF file, else its own in the graph), the rows and columns of
// its weight, and the size of the heads if a rotary embedding turns adjacent pairs of what it gives, else 0. `unknown`
// counts the embeddings of pairs that turn what comes from no such projection. To be called before any are merged.
int ovfleet_each_projection(const ov_model_t* model,
                            void (*found)(void* context, const char* name, size_t rows, size_t columns, size_t paired),
                            void* context,
                            size_t* unknown);

// What adapters add to a projection: up * (down * x), by those ranks that the token's adapter owns.
typedef struct {
    const char* projection;  // its name as ovfleet_each_projection tells it
    size_t ranks;            // of all adapters together
    const float* down;       // ranks * columns
    const float* up;         // rows * ranks
    const int32_t* owners;   // the number of the adapter that each rank is of
} ovfleet_adapted;

// Adds them to the graph, before projections are merged, and the input `adapters` [tokens] (i32): the number of the
// adapter of each token, 0 for none. With `own` all projections of the model will be our own: these do it by themselves, once
// ovfleet_own_projections makes them, which also adds the input. `content` is another with other adapters: a plugin that keeps
// compiled models is not to take graphs for the same that differ in these numbers only.
int ovfleet_adapt(ov_model_t* model, const ovfleet_adapted* adapted, size_t count, int own, const char* content);

// Merges projections of equal form that read the same input (q/k/v, gate/up). `merged` counts those merged.
int ovfleet_merge_projections(ov_model_t* model, size_t* merged);

// Gives all attentions a window of so many tokens, the present one among them, whatever their masks cut out.
// It takes effect when the attention is made paged, also after the model was saved and read.
int ovfleet_set_window(ov_model_t* model, uint32_t tokens);

// Replaces multiplications by integer weights by our own, on the CPU; `in_bf16` says whether it computes in bf16. To be called
// once the model is paged. `replaced` counts them.
int ovfleet_own_projections(ov_model_t* model, int in_bf16, size_t* replaced);

// Whether this processor has what ours are made for.
int ovfleet_has_own_projections(void);

// `all`: whether there is no multiplication by weights in a model that they could not replace.
int ovfleet_can_own_projections(ov_model_t* model, int* all);

// Replaces the attention by paged attention, and cuts the output to [rows, vocabulary] where the new input
// `wanted_rows` [rows] (i64) names the tokens whose logits are computed.
//
// Where it can, the attention is our own, with a cache of the precision `own_cache` (0: f32, 1: bf16, 2: f16, 3: u8), and
// `own` is 1; with -1 it is the plugin's. Prompts are computed in f32, or in bf16 with `compute` 1, where what is around is
// computed in it too, and 2, where it is not. Long prompts look at keys that have `share` of the weight, or at all if it is 0.
// With `weighs` ours has an input `block_weights` (u8), [heads of the cache][blocks of the step] in f32, to which it adds the weight that
// the tokens of decodes gave to each block.
int ovfleet_make_paged(ov_model_t* model, int own_cache, int compute, float share, int weighs, int* own);

// New tokens of a sequence, and the blocks of its cache.
typedef struct ovfleet_sequence {
    size_t begin, count, past;
    const int32_t* blocks;
    // Where its blocks are among those of the step.
    size_t place;
} ovfleet_sequence;

// One step of our own attention by itself, for tests. Queries, keys, values and the output are f32, or bf16 with `is_bf16`;
// prompts are computed in bf16 with `in_bf16`;
// `precision` as above; the cache's blocks are as large as attention.hpp says.
typedef struct ovfleet_attention {
    size_t kernels, heads, kv_heads, size, value_size, window, count;
    // Numbers from a token's queries, keys or values to the next one's; 0 if nothing is between.
    size_t row;
    float scale, share;
    int precision, is_bf16, in_bf16;
    const ovfleet_sequence* sequences;
    const void *queries, *keys, *values;
    // Of rotary embeddings, or null.
    const float *cos, *sin;
    void* output;
    uint8_t *key_cache, *value_cache;
    // [kv_heads][blocks of the step], or null.
    float* weights;
    size_t step_blocks;
} ovfleet_attention;

// 0, and nothing is done, if the processor does not have the instruction set of these kernels.
int ovfleet_try_attention(const ovfleet_attention* asked);

// What an adapter adds to `rows` outputs of a projection from `first` on, for tests: up * (down * row).
typedef struct ovfleet_low_rank {
    int32_t adapter;
    size_t first, rows, ranks;
    const float *down, *up;
} ovfleet_low_rank;

// A projection of our own by itself, for tests: `count` rows by a matrix of `quants`, a byte each, of 4 or 8 bits (signed with
// `is_signed`), whose groups of `group` inputs share a zero and a scale. `then`: 0, or 1 to add to `base`, or 2 to gate. With
// `norm` the rows are normalised. Rows and outputs are f32, or bf16. `adapters` are the numbers of those that rows have.
typedef struct ovfleet_projection {
    size_t kernels, count, inputs, outputs, bits, group;
    int is_signed, then, is_bf16;
    const uint8_t* quants;
    const float *zeros, *scales, *norm;
    float epsilon;
    const void* rows;
    const float* base;
    void* to;
    const ovfleet_low_rank* low_ranks;
    size_t low_rank_count;
    const int32_t* adapters;
} ovfleet_projection;

// 0, and nothing is done, if the processor does not have the instruction set of these kernels.
int ovfleet_try_projection(const ovfleet_projection* asked);

// Bytes that the integer weights of the projections inside the model take in f32; 0 if it has none.
int ovfleet_unpacked_bytes(const ov_model_t* model, uint64_t* bytes);

// Replaces these weights by their f32 values.
int ovfleet_unpack_weights(ov_model_t* model);

// Another graph over the same weights. To be freed with ov_model_free.
int ovfleet_clone(const ov_model_t* model, ov_model_t** copy);

// Writes a model, not yet paged, as an IR.
int ovfleet_save(ov_model_t* model, const char* xml, const char* bin);

// From now on `core` reads compiled models that are paged. To be called before it compiles or reads any for the CPU.
int ovfleet_read_compiled(ov_core_t* core);

// Writes a compiled model of the CPU.
int ovfleet_export(const ov_compiled_model_t* compiled, const char* path);

// Reads a compiled model from the first `bytes` of a file, which stays in use as its memory. `properties` are `count`
// names, each before its value. To be freed with ov_compiled_model_free.
int ovfleet_import(ov_core_t* core,
                   const char* path,
                   size_t bytes,
                   const char* device,
                   const char* const* properties,
                   size_t count,
                   ov_compiled_model_t** compiled);

// The file of the OpenVINO library this process is linked to; null if it cannot be told.
const char* ovfleet_library_path(void);

#ifdef __cplusplus
}
#endif
