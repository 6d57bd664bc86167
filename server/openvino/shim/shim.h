// A C interface to functions that OpenVINO's C API lacks: reading models (including GGUF files, through OpenVINO's front end),
// the graph rewrites that turn a language model into one with paged attention, and the native kernels. Models cross this
// boundary as the C API's own `ov_model_t`, so all other operations on them use the C API.
//
// Unless its comment says otherwise, a function that returns int returns 0 on success, and 1 on failure with a message in
// ovfleet_last_error(). No function throws.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ov_model ov_model_t;
typedef struct ov_core ov_core_t;
typedef struct ov_compiled_model ov_compiled_model_t;

// The message of the last failed call on this thread. It is valid until the next failed call on this thread.
const char* ovfleet_last_error(void);

// The path of the OpenVINO library that this process is linked against, or null if the dynamic loader cannot determine it.
const char* ovfleet_library_path(void);

enum ovfleet_element {
    OVFLEET_U4 = 0,
    OVFLEET_U8 = 1,
    OVFLEET_I8 = 2,
    OVFLEET_F16 = 3,
    OVFLEET_BF16 = 4,
    OVFLEET_F32 = 5,
    OVFLEET_F4E2M1 = 6,
};

// ---- Reading models ----

// Reads an IR, whose weights are in the file next to it. Unlike ov_core_read_model, it stores the message of an error for the
// calling thread only. The caller frees the model with ov_model_free.
int ovfleet_read_ir(const ov_core_t* core, const char* path, ov_model_t** model);

// Reads a GGUF file as a stateful model with the inputs input_ids, attention_mask, position_ids, beam_idx and the output
// logits. The caller frees the model with ov_model_free.
int ovfleet_read_gguf(const char* path, ov_model_t** model);

// A request to read `count` rows of the tensor with the number `tensor`, starting at the row `first`. The buffers have the form
// of an ovfleet_weight: `quants` has `count * columns` elements (two u4 per byte, the first in the low half), and `scales` and
// `zeros` have one element for each group. A pointer is null if its elements are not needed. `message` is a buffer of
// `message_size` bytes for the reason of a failure, including its terminating NUL.
typedef struct {
    size_t tensor, first, count;
    void* quants;
    float* scales;
    void* zeros;
    char* message;
    size_t message_size;
} ovfleet_tensor_rows;

// Reads the tensors of the model's files. Each tensor is identified by a number. `read` returns 0 on success, and several
// threads may call it at the same time. `free` is called once, when no constant needs the source any longer.
typedef struct {
    void* context;
    int (*read)(const void* context, const ovfleet_tensor_rows* rows);
    void (*free)(void* context);
} ovfleet_tensor_source;

// A weight matrix with groups along its rows: w[r][c] = (q[r][c] - zero[r][c / group]) * scale[r][c / group].
typedef struct {
    const char* tensor;   // the name of the weight's tensor in the GGUF file
    size_t number;        // the number by which the source identifies this tensor
    uint32_t type;        // the ovfleet_element of the quants
    uint32_t zeros_type;  // the ovfleet_element of the zero points
    int has_zeros;        // whether the weight has zero points; otherwise all of them are 0
    size_t rows, columns;
    size_t group;  // 0 if the quants are the weights themselves, without scales
    // Whether all quants fit into 6 bits: u8 below 64, or i8 from -32 to 31.
    int fits_six_bits;
    // Whether the 16 scales of each 256 weights of a row are products of one f16 number and integers from -128 to 127.
    int has_super_scales;
} ovfleet_weight;

// An index of the weights of a model from ovfleet_read_gguf. The caller frees it with ovfleet_free_weights before it calls
// other functions that change the graph. The index takes ownership of `source`, even if the call fails.
typedef struct ovfleet_weights ovfleet_weights_t;
int ovfleet_find_weights(const ov_model_t* model, const ovfleet_tensor_source* source, ovfleet_weights_t** weights);
void ovfleet_free_weights(ovfleet_weights_t* weights);

// Replaces a weight with one that is read from the source when it is needed. `found` receives whether the graph has this
// weight. If the weight is a stack of matrices, one for each expert, the rows of all matrices are stored one matrix after the
// other.
int ovfleet_set_weight(ovfleet_weights_t* weights, const ovfleet_weight* weight, int* found);

// Divides the frequencies of the rotary embeddings with this base (0: with any base) by `factors`, one for each pair of a head.
// `applied` receives the number of changed frequency tables, which is 0 if no table has this length and base, or 1 if the front
// end has already divided the frequencies.
int ovfleet_divide_frequencies(ov_model_t* model, double base, const float* factors, size_t count, size_t* applied);

// Multiplies the cosines and sines of the rotary embeddings with `count` pairs by `factor`. `applied` receives the number of
// changed tables.
int ovfleet_scale_rotary(ov_model_t* model, float factor, size_t count, size_t* applied);

// Rewrites rotary embeddings that rotate adjacent pairs to the half-rotation form that plugins fuse, if the q and k of every
// such layer come directly from their projections. The rows of these projections must then be permuted (even rows first, then
// odd rows, within each head): `permuted` is called for each projection with its name in the file and its head size.
int ovfleet_rewrite_rotary(ov_model_t* model, void (*permuted)(void* context, const char* tensor, size_t head_size),
                           void* context);

// Replaces rotary embeddings that rotate adjacent pairs with embeddings that rotate halves, in the form that plugins
// fuse. This function is for files whose weights need rotated halves, but whose graph rotates pairs. `rotated` receives
// the number of replaced embeddings.
int ovfleet_rotate_halves(ov_model_t* model, size_t* rotated);

// Changes the shape of the experts' output to that of their input: the front end assumes a single sequence, but with paged
// attention each token is a sequence. Also divides the weights of a token's experts by their sum, unless the graph already does
// so, and corrects the axis of a softmax over these weights and the shapes of the indices of biases. `layers` receives the
// number of changed layers.
int ovfleet_fix_experts(ov_model_t* model, size_t* layers);

// Sets the sliding window of all attention layers to `tokens` tokens, including the current one, regardless of their masks. The
// window takes effect when the attention is made paged, even if the model is saved and read before that.
int ovfleet_set_sliding_window(ov_model_t* model, uint32_t tokens);

// ---- Projections and adapters ----

// Calls `found` for each projection with its name and with the rows and columns of its weight. The name is that of the weight
// in a GGUF file, or otherwise that of the node. `paired` is the head size if a rotary embedding rotates adjacent pairs of the
// projection's output, or otherwise 0. `unknown` receives the number of rotary embeddings that rotate adjacent pairs and whose
// input comes from no projection. Call this function before projections are merged.
int ovfleet_list_projections(const ov_model_t* model,
                             void (*found)(void* context, const char* name, size_t rows, size_t columns, size_t paired),
                             void* context, size_t* unknown);

// The LoRA matrices of all adapters at one projection. For each token, up * (down * x) is added to the output, restricted to
// the ranks of the token's adapter.
typedef struct {
    const char* projection;   // its name from ovfleet_list_projections
    size_t ranks;             // the sum over all adapters
    const float* down;        // ranks * columns
    const float* up;          // rows * ranks
    const int32_t* adapters;  // the number of the adapter of each rank
} ovfleet_lora;

// Adds adapters to the graph, before projections are merged, with the input `adapters` [tokens] (i32): the number of the
// adapter of each token, or 0. With `in_native_projections`, the matrices are only attached to the projections, all of which
// must become native: ovfleet_apply_kernel_plan then adds the matrices to the native projections, and the input to the graph.
// `content` identifies the adapters, because a plugin that caches compiled models must distinguish graphs that differ only in
// these matrices.
int ovfleet_add_adapters(ov_model_t* model, const ovfleet_lora* loras, size_t count, int in_native_projections,
                         const char* content);

// Merges projections that read the same input and have weights of the same form (q/k/v, gate/up). `merged` receives the number
// of projections that were merged.
int ovfleet_merge_projections(ov_model_t* model, size_t* merged);

// ---- Image encoders ----

// Replaces the attention masks in the encoder of a Qwen model, which have an element for each pair of patches. The function
// removes the input `attention_mask`: in the layers that read it, all patches attend to each other. If the graph has the input
// `window_attention_mask`, three inputs replace it:
// - `window_slots` [windows, slots] (i64): the index of the patch in each slot of a window. A window with fewer patches than
//   slots has unused slots, which contain the index of any patch.
// - `window_mask` [windows, 1, 1, slots] (f32): 0 for slots of patches, and -inf for unused slots.
// - `window_patches` [patches] (i64): the slot of each patch, counted over all windows.
//
// `replaced` receives the number of replaced attention operations: 0 if the graph has another structure and was not changed.
int ovfleet_remove_attention_masks(ov_model_t* model, size_t* replaced);

// Replaces each convolution whose kernel covers its whole input with a matrix multiplication. `replaced` receives the
// number of replaced convolutions.
int ovfleet_replace_patch_convolutions(ov_model_t* model, size_t* replaced);

// Replaces each attention operation without a mask in an encoder with the native attention for the instruction set `isa` (an
// ovfleet_isa), which multiplies in bf16 with OVFLEET_AVX512_BF16 and OVFLEET_AMX, and in f32 with all others. `replaced`
// receives the number of replaced operations. The plugin computes all other attention (with OVFLEET_PLUGIN, all attention), in
// blocks of queries where possible.
int ovfleet_replace_encoder_attention(ov_model_t* model, uint32_t isa, size_t* replaced);

// Replaces the multiplications by integer weights in an encoder with native projections for the instruction set `isa` (an
// ovfleet_isa), which read and return f32 and split activations into `terms` 8-bit terms. `replaced` receives the number of
// replaced multiplications. The plugin computes all other multiplications.
int ovfleet_replace_encoder_projections(ov_model_t* model, uint32_t isa, uint32_t terms, size_t* replaced);

// ---- Paged attention and kernels ----

// Whether this process may use the tile registers of AMX with bf16.
enum ovfleet_tile_support {
    OVFLEET_TILES_ABSENT = 0,  // the processor has no tile registers
    OVFLEET_TILES_DENIED = 1,  // the operating system does not let this process use them
    OVFLEET_TILES_GRANTED = 2,
};

// Returns an ovfleet_tile_support. The first call requests permission from the operating system, for all threads of the
// process. `reason` receives a string that is valid until the process ends: the reason for a denial, or an empty
// string.
int ovfleet_tile_support(const char** reason);

// An instruction set for which native kernels are compiled. Compiled models contain these numbers.
enum ovfleet_isa {
    OVFLEET_PLUGIN = 0,  // the plugin's kernels instead of native ones
    OVFLEET_PORTABLE = 1,
    OVFLEET_AVX2 = 2,
    OVFLEET_AVX_VNNI = 3,
    OVFLEET_AVX512 = 4,
    OVFLEET_AVX512_VNNI = 5,
    OVFLEET_AVX512_BF16 = 6,
    OVFLEET_AMX = 7,
};

// The kernels that compute a model. src/kernels.rs creates this plan as a `KernelPlan`.
typedef struct ovfleet_kernel_plan {
    uint32_t projection_isa;          // an ovfleet_isa
    uint32_t projection_activations;  // OVFLEET_F32 or OVFLEET_BF16
    uint32_t attention_isa;           // an ovfleet_isa
    uint32_t attention_activations;   // OVFLEET_F32 or OVFLEET_BF16
    uint32_t kv_cache;                // OVFLEET_F32, OVFLEET_BF16, OVFLEET_F16, OVFLEET_U8 or OVFLEET_U4
    float attention_mass;             // the attention mass that the selected keys of long prompts must cover; 0: all keys
    uint32_t block_scores;            // whether decodes report the attention to each block
    uint32_t projection_terms;        // the number of 8-bit terms into which projections split activations: 1 or 2
    uint32_t native_experts;          // whether the kernels of the projections also compute experts
} ovfleet_kernel_plan;

// Whether the native kernels support the experts of a model.
enum ovfleet_experts {
    OVFLEET_NO_EXPERTS = 0,      // the model has none
    OVFLEET_PLUGIN_EXPERTS = 1,  // only the plugin supports all of them
    OVFLEET_NATIVE_EXPERTS = 2,
};

// Returns in `supported` whether the native kernels support every multiplication by weights in a model, including those of
// experts, and in `experts` an ovfleet_experts.
int ovfleet_supports_native_projections(ov_model_t* model, int* supported, int* experts);

// Replaces the attention with the plugin's paged attention. Returns in `supports_native_attention` whether the native attention
// supports every attention layer.
int ovfleet_make_paged(ov_model_t* model, int* supports_native_attention);

// Some paged models contain conditions on the largest position of a step or on the length of its longest sequence.
// Replaces them with their values for a sequence of `max_model_len` tokens (0: unknown), so that the result of a
// sequence does not depend on other sequences in the step. `resolved` receives the number of conditions. The call fails
// if there is such a condition and `max_model_len` is unknown, or if the condition has an unknown form.
int ovfleet_resolve_length_conditions(ov_model_t* model, uint32_t max_model_len, size_t* resolved);

// Replaces operations of a paged model with native ones according to the plan, and limits the output to [rows, vocabulary]: the
// new input `logits_indices` [rows] (i64) lists the tokens whose logits are computed.
//
// With `block_scores`, the model gets another input `block_scores` (u8), which contains [kv_heads][blocks of the step] in f32:
// to each element, the kernels add the attention that the block receives from decoded tokens. `projections` receives the number
// of replaced projections. The call fails if the plan has native attention, but the native attention does not support a layer
// of the model.
int ovfleet_apply_kernel_plan(ov_model_t* model, const ovfleet_kernel_plan* plan, size_t* projections);

// ---- Threads ----

// A group of threads of the arena that runs a graph. The weights and the KV heads are divided among the groups.
typedef struct ovfleet_thread_group {
    const uint32_t* processors;  // the processors on which the threads of the group run
    size_t processor_count;      // 0: the threads are not bound
    int32_t node;                // the NUMA node of the group's weights; -1: they are not placed
} ovfleet_thread_group;

// Divides the threads into groups, for all models of the process. If `count` is 0 or 1, the threads are not divided. Results
// do not depend on groups. Call this function before any model runs: the first run of a model places its weights on the NUMA
// nodes.
void ovfleet_set_thread_groups(const ovfleet_thread_group* groups, size_t count);

// ---- Files ----

// Writes a model whose attention is not paged yet as an IR.
int ovfleet_save(ov_model_t* model, const char* xml, const char* bin);

// Lets `core` read compiled models that contain native operations or paged attention. `core` must not have compiled or read a
// model for the CPU before.
int ovfleet_enable_import(ov_core_t* core);

// Writes a model that was compiled for the CPU.
int ovfleet_export(const ov_compiled_model_t* compiled, const char* path);

// Reads a compiled model from the first `bytes` bytes of a file, which remains mapped into memory. `properties` are `count`
// pairs of a name and a value. The caller frees the model with ov_compiled_model_free.
int ovfleet_import(ov_core_t* core, const char* path, size_t bytes, const char* device, const char* const* properties,
                   size_t count, ov_compiled_model_t** compiled);

// ---- Native kernels without a graph, for tests ----

// The new tokens of a sequence, and the blocks of its cache. The first new token is token `begin` of the step, and
// follows `past` earlier tokens of the sequence.
typedef struct ovfleet_sequence {
    size_t begin, count, past;
    const int32_t* blocks;
    // The index of the sequence's first block among the blocks of the step.
    size_t first_block;
} ovfleet_sequence;

// One step of the native attention. Queries, keys, values and outputs are f32, or bf16 with `is_bf16`. attention.hpp defines
// the sizes of the cache's blocks.
typedef struct ovfleet_attention_test {
    size_t isa, heads, kv_heads, key_size, value_size, window, sequence_count;
    // The number of elements from the queries, keys or values of one token to those of the next; 0 if they are contiguous.
    size_t stride;
    float scale, attention_mass;
    // An ovfleet_element.
    int kv_cache;
    int is_bf16;
    // Whether to run the AMX kernels on the plain C++ model of the tile registers. Their vector code is then compiled for the
    // instruction set `isa`.
    int tile_model;
    const ovfleet_sequence* sequences;
    const void *queries, *keys, *values;
    // The tables of a rotary embedding, or null.
    const float *cos, *sin;
    void* output;
    uint8_t *key_cache, *value_cache;
    // [kv_heads][blocks of the step], or null.
    float* block_scores;
    size_t step_blocks;
    // The sink of each query head, or null.
    const float* sinks;
} ovfleet_attention_test;

// Returns 0, and does nothing, if no kernels exist for the instruction set or the processor lacks it; otherwise 1.
int ovfleet_test_attention(const ovfleet_attention_test* test);

// The LoRA matrices of an adapter for `rows` outputs of a projection, starting at the output `first`.
typedef struct ovfleet_lora_test {
    int32_t adapter;
    size_t first, rows, ranks;
    const float *down, *up;
} ovfleet_lora_test;

// One native projection: a source of `m` rows and `k` columns, multiplied by weights of `n` rows and `k` columns. `quants`
// contains one byte for each weight. If `bits` is 4, 6 or 8, the bytes are integers of this size (signed with `is_signed`). If
// `bits` is 5, they are codes of E2M1, and there are no zero points. Groups of `group` weights share a zero point and a scale.
// Weights of 6 bits in groups of 16 are signed and have no zero points, and their scales must be products of super-scales and
// integers. `bias`, which may be null, has a number for each row of the weights. `epilogue` is 0 for none, 1 to add `residual`,
// 2 for SwiGLU, or 3 for clamped SwiGLU. With `norm`, the rows of the source are normalized. The source and the destination are
// f32, or bf16 with `is_bf16`. `adapters` contains the number of the adapter of each row. With `tile_model`, the AMX kernels
// run on the plain C++ model of the tile registers, and their vector code is compiled for the instruction set `isa`.
typedef struct ovfleet_projection_test {
    size_t isa, m, k, n, bits, group, terms;
    int tile_model, is_signed, epilogue, is_bf16;
    const uint8_t* quants;
    const float *zeros, *scales, *bias, *norm;
    float epsilon;
    const void* src;
    const float* residual;
    void* dst;
    const ovfleet_lora_test* loras;
    size_t lora_count;
    const int32_t* adapters;
} ovfleet_projection_test;

// Returns 0, and does nothing, if no kernels exist for the instruction set or the processor lacks it; otherwise 1.
int ovfleet_test_projection(const ovfleet_projection_test* test);

// Calls `body` once in an arena with `threads` threads (at most 16), all of which run at the same time, even if the machine has
// fewer processors. Returns 1, or 0 without calling `body` if the threads could not be started. Only one call at a time is
// allowed.
int ovfleet_test_on_threads(size_t threads, void (*body)(void* context), void* context);

#ifdef __cplusplus
}
#endif
