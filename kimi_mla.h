// kimi_mla.h - v0.1.0 - MLA decode attention for Kimi models - SPDX-License-Identifier: MIT
//
// One header that plans, compiles (NVRTC, at run time) and launches the GPU reader of a Kimi
// model's latent KV cache, with a plain C reader for machines that have no GPU.

// =============================================================================
// Start here
// =============================================================================
//
//     #define KIMI_MLA_IMPLEMENTATION       // in exactly one .c or .cpp file
//     #include "kimi_mla.h"
//
//     kmla_error error;                     // every call fills it when it fails
//     kmla_gpu* gpu;  kmla_device card;  kmla_plan plan;
//     kmla_gpu_open(NULL, &gpu, &error);                    // finds libcuda and NVRTC
//     kmla_gpu_device(gpu, &card, &error);                  // of the current context
//
//     kmla_shape shape = {0};               // zero means "default" in every desc
//     shape.requests = 1;   shape.rows = 4;   shape.rows_per_request = 4;
//     shape.heads = 99;     shape.capacity_tokens = 16384;  shape.page_tokens = 64;
//     kmla_plan_decode(&shape, &card, &plan, &error);       // tile, splits, workspace
//     kmla_gpu_prepare(gpu, &plan, NULL, &error);           // compiles and loads: slow, once
//
//     kmla_decode args = {0};               // device addresses; see the struct
//     args.query = q;  args.kv = pool;  args.kv_pages = pages;  args.block_table = table;
//     args.block_table_width = 256;  args.lengths = lengths;  args.scale = 0.07216878f;
//     args.out = out;  args.lse = lse;
//     args.workspace = workspace;  args.workspace_bytes = plan.workspace_bytes;
//     kmla_gpu_decode(gpu, &plan, &args, stream, &error);   // capture-safe, allocates nothing

// =============================================================================
// Build options: define before the include; the value shown is the default
// =============================================================================
//
//     KIMI_MLA_IMPLEMENTATION   not defined   emit the function bodies here
//     KIMI_MLA_STATIC           not defined   every function is static
//     KIMI_MLA_NO_GPU           not defined   leave the GPU side out: no dlopen, no device source
//     KIMI_MLA_NO_NVRTC         not defined   leave the compiler and device source out: kernels are
//                                             images that tools/kmla made
//     KIMI_MLA_NO_FILES         not defined   leave kmla_cache_files out, which alone touches files
//     KMLA_API                  extern        linkage of the public functions
//     KMLA_MALLOC(bytes)        malloc        used by open, compile and the checking mode only
//     KMLA_FREE(pointer)        free          its partner

// =============================================================================
// Symbols, shapes and model facts
// =============================================================================
//
//     R query rows    H heads    T tokens    S splits    P tokens a page
//     D = 512 latent dims    E = 64 rope lanes    D + E = 576 absorbed width
//     vector = one query row of one head; V = R * H of them
//
//     score(t) = scale * (q[0:512] . latent[t] + q[512:576] . rope[t])
//     out = softmax(score) . latent         lse = ln(sum exp(score))
//
//     public model configs, read 2026-09      Kimi-K3               Kimi-K2 / K2.5
//     query heads                             96                    64
//     MLA layers                              24 of 93              61
//     softmax scale                           192^-0.5 0.07216878   K2.5 with YaRN 0.14468
//     longest context                         1,048,576             262,144

#ifndef KIMI_MLA_H
#define KIMI_MLA_H

#include <stddef.h>
#include <stdint.h>

#define KMLA_VERSION_MAJOR 0
#define KMLA_VERSION_MINOR 1
#define KMLA_VERSION_PATCH 0
#define KMLA_VERSION (KMLA_VERSION_MAJOR * 10000 + KMLA_VERSION_MINOR * 100 + KMLA_VERSION_PATCH)

#ifndef KMLA_API
#if defined(KIMI_MLA_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define KMLA_API static __attribute__((unused))
#elif defined(KIMI_MLA_STATIC)
#define KMLA_API static
#else
#define KMLA_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

// =============================================================================
// >>status   Status codes and errors
// =============================================================================

#define KMLA_STATUS_LIST(X)                                                                     \
    X(KMLA_OK, 0, "success")                                                                    \
    X(KMLA_ERROR_ARGUMENT, 1, "an argument is wrong; the message names it")                     \
    X(KMLA_ERROR_OVERFLOW, 2, "a size does not fit its type")                                   \
    X(KMLA_ERROR_WORKSPACE, 3, "the workspace is missing or too small")                         \
    X(KMLA_ERROR_PAGE, 4, "a table names a page or slot outside the pool (checking mode)")      \
    X(KMLA_ERROR_UNSUPPORTED, 5, "no variant fits this card or shape")                          \
    X(KMLA_ERROR_LIBRARY, 6, "libcuda or NVRTC was not found or cannot be used")                \
    X(KMLA_ERROR_SYMBOL, 7, "a library lacks a function")                                       \
    X(KMLA_ERROR_ARCHITECTURE, 8, "NVRTC or the image does not know this card")                 \
    X(KMLA_ERROR_COMPILE, 9, "NVRTC refused the device source; see the log")                    \
    X(KMLA_ERROR_CUDA, 10, "a CUDA driver call failed")                                         \
    X(KMLA_ERROR_CONTEXT, 11, "no current context, or not the one that was prepared")           \
    X(KMLA_ERROR_NOT_PREPARED, 12, "the plan's kernels were not prepared in this context")      \
    X(KMLA_ERROR_CAPTURE, 13, "the call is not legal while a stream is captured")               \
    X(KMLA_ERROR_MEMORY, 14, "host memory could not be allocated")

// A function's result. 0 is success; every other value leaves outputs as they were.
typedef int32_t kmla_status;
enum {
#define KMLA_I_STATUS(name, value, text) name = value,
    KMLA_STATUS_LIST(KMLA_I_STATUS)
#undef KMLA_I_STATUS
        KMLA_STATUS_COUNT_
};

// What went wrong. Every function takes one, may be NULL, and writes it only when it fails.
typedef struct kmla_error {
    int32_t status;         // a kmla_status
    int32_t cuda_result;    // CUresult of the failed call, else 0
    int32_t nvrtc_result;   // nvrtcResult of the failed call, else 0
    int32_t driver_version; // as cuDriverGetVersion gives it (13000 is 13.0), 0 = not known
    int32_t nvrtc_version;  // major * 1000 + minor * 10, 0 = not known
    char library[256];      // path or name of the library, "" = none was involved
    char message[768];      // one sentence that names the argument or call
} kmla_error;

// The name and the meaning of a status, e.g. "KMLA_ERROR_PAGE". Never NULL. Any thread.
KMLA_API const char* kmla_status_name(kmla_status status);
KMLA_API const char* kmla_status_text(kmla_status status);

// =============================================================================
// >>records   Record formats
// =============================================================================

// Numbers in records are little-endian on every machine, as the GPU has them. Plain arrays
// (sources, outputs, lse, tables) are in the machine's own order.

#define KMLA_LATENT_DIMS 512  // D: config kv_lora_rank
#define KMLA_ROPE_DIMS 64     // E: config qk_rope_head_dim
#define KMLA_QUERY_DIMS 576   // D + E
#define KMLA_GROUP_DIMS 128   // dims that share a scale of a packed record
#define KMLA_CHUNK_TOKENS 64  // the unit that splits are made of
#define KMLA_PACKED_BYTES 656 // 512 E4M3, 4 fp32 scales, 64 BF16
#define KMLA_PACKED_SCALE_OFFSET 512
#define KMLA_PACKED_ROPE_OFFSET 528
#define KMLA_E4M3_BYTES 576   // 576 E4M3, one scale for the tensor
#define KMLA_BF16_BYTES 1152  // 576 BF16

#define KMLA_KV_PACKED 0 // kv_format
#define KMLA_KV_E4M3 1
#define KMLA_KV_BF16 2

#define KMLA_QUERY_BF16 0 // query_format
#define KMLA_QUERY_PACKED 1
#define KMLA_QUERY_E4M3 2

// Exact takes a query's values as they are. E4M3 rounds a BF16 query to what the packed query
// writer would store, bit for bit. Packed and E4M3 queries give the same in both.
enum { KMLA_MODE_EXACT = 0, KMLA_MODE_E4M3_QUERY = 1 };

// Type of a plain array: partials of splits, outputs, sources of writers.
#define KMLA_BF16 0
#define KMLA_FP32 1

// Bytes of one record, 0 for an unknown format. Any thread.
KMLA_API size_t kmla_kv_record_bytes(int32_t kv_format);
KMLA_API size_t kmla_query_record_bytes(int32_t query_format);

// One E4M3 ("fn") code: to fp32, and from fp32 with round-to-nearest-even and saturation at
// 448. NaN becomes 0x7F. Any thread.
KMLA_API float kmla_e4m3_to_float(uint8_t code);
KMLA_API uint8_t kmla_float_to_e4m3(float value);

// BF16 bits to fp32, and from fp32 with round-to-nearest-even. NaN stays NaN. Any thread.
KMLA_API float kmla_bf16_to_float(uint16_t bits);
KMLA_API uint16_t kmla_float_to_bf16(float value);

// =============================================================================
// >>planning   Heads, lengths, splits, workspace: pure functions, any thread, no CUDA
// =============================================================================

// How gathered heads are padded. The reader itself needs no padding: missing heads exist only
// inside the kernel. This is for engines that pad, and for comparing with readers that must.
enum { KMLA_PAD_TILE = 0, KMLA_PAD_EIGHT = 1 };

typedef struct kmla_heads_desc {
    int32_t local_heads; // heads a rank computes, 1..4096
    int32_t dcp_ranks;   // ranks whose heads are gathered; 0 = 1
    int32_t kv_format;   // KMLA_KV_*
    int32_t padding;     // KMLA_PAD_*
} kmla_heads_desc;

typedef struct kmla_heads {
    int32_t effective; // local_heads * dcp_ranks
    int32_t tile;      // 16 if the KV is packed and effective > 16, else 8
    int32_t padded;    // effective, rounded up to the tile (or to 8)
    int32_t tiles;     // ceil(padded / tile)
    int32_t launches;  // of a reader with whole tiles only: 2 when 16-head tiles leave a rest
} kmla_heads;

// Head geometry after the DCP gather. Gathered index of a head = rank * local_heads + head.
// Errors: ARGUMENT (a count below 1, an unknown enum), OVERFLOW (effective > 2^20).
KMLA_API kmla_status kmla_plan_heads(const kmla_heads_desc* desc, kmla_heads* out,
                                     kmla_error* error);

// A decode context parallel (DCP) shard: token g lives on rank (g / interleave) mod ranks.
typedef struct kmla_dcp {
    int32_t ranks;      // n; 0 = 1
    int32_t rank;       // r, 0..n-1
    int32_t interleave; // I tokens; 0 = 1
} kmla_dcp;

// Tokens of a global length that rank r holds:
// floor(L/(nI))*I + clamp(L mod nI - r*I, 0, I). Sums to L over the ranks. A negative length
// counts as 0. Errors: ARGUMENT (bad n, r or I).
KMLA_API kmla_status kmla_local_length(const kmla_dcp* dcp, int64_t global_tokens,
                                       int64_t* local_tokens, kmla_error* error);

// The rank that holds global token g, and its index there. Either output may be NULL.
// Errors: ARGUMENT (g < 0, bad n or I).
KMLA_API kmla_status kmla_token_owner(const kmla_dcp* dcp, int64_t global_token, int32_t* rank,
                                      int64_t* local_token, kmla_error* error);

// Tokens of the largest shard of a context: ceil(C/(nI))*I. Errors: ARGUMENT.
KMLA_API kmla_status kmla_shard_capacity(const kmla_dcp* dcp, int64_t context_tokens,
                                         int64_t* shard_tokens, kmla_error* error);

// Where a row's visible tokens end.
enum {
    KMLA_LENGTHS_PER_ROW = 0,      // lengths[R]: local tokens of each row, used as they are
    KMLA_LENGTHS_PER_REQUEST = 1   // lengths[requests]: GLOBAL tokens, the block included
};
enum {
    KMLA_ROWS_CAUSAL = 0, // row i of q: L - q + 1 + i
    KMLA_ROWS_DRAFT = 1   // every row: L
};

// The rule by which lengths become token ranges; the same for host, device and planning.
typedef struct kmla_length_rule {
    int32_t lengths_kind;  // KMLA_LENGTHS_*
    int32_t rows_kind;     // KMLA_ROWS_*; per-request lengths only
    int32_t window_tokens; // W: keys [max(0, len-W), len); 0 = no window
    kmla_dcp dcp;          // per-request lengths only: each row's GLOBAL bounds are localised
} kmla_length_rule;

// Token ranges [begins[i], ends[i]) of the rows of one request, in local tokens, before the
// capacity clamp. `length` is the request's global length for KMLA_LENGTHS_PER_REQUEST; for
// KMLA_LENGTHS_PER_ROW call it per row with rows = 1. Negative counts as 0.
// Errors: ARGUMENT (rows < 1, null arrays, bad DCP, per-row lengths with several ranks or rows).
KMLA_API kmla_status kmla_row_ranges(const kmla_length_rule* rule, int64_t length, int32_t rows,
                                     int64_t* begins, int64_t* ends, kmla_error* error);

enum { KMLA_SPLIT_STATIC = 0, KMLA_SPLIT_BALANCED = 1 };

// The part of one row's range that split s reads, in local tokens. Chunks are 64 tokens.
// static: chunks [s*c, (s+1)*c), c = ceil(ceil(capacity/64)/S). balanced: the row's live
// chunks [begin/64, ceil(end/64)) shared evenly over min(S, live) splits, the first
// live mod min(S, live) of them one chunk longer. A row with at most single_split_chunks live
// chunks is read by split 0 alone. An empty part is *part_begin = *part_end. What lies past the
// capacity is clamped. Errors: ARGUMENT.
KMLA_API kmla_status kmla_split_range(int32_t split_mode, int32_t splits, int32_t split,
                                      int64_t capacity_tokens, int32_t single_split_chunks,
                                      int64_t begin, int64_t end, int64_t* part_begin,
                                      int64_t* part_end, kmla_error* error);

// Bytes that the partials of S splits take: S * R * H * (512 * size + 4); 0 for one split.
// `heads` are the heads that are stored: 99 need no tile of 112. Layout: payloads
// [S][R][H][512], then lse [S][R][H] fp32. Errors: ARGUMENT, OVERFLOW.
KMLA_API kmla_status kmla_workspace_bytes(int32_t rows, int32_t heads, int32_t splits,
                                          int32_t partial_type, uint64_t* bytes,
                                          kmla_error* error);

// What a plan needs to know of a card. kmla_gpu_device asks the driver; all zero = no GPU.
typedef struct kmla_device {
    int32_t compute_major;    // 9 of 9.0
    int32_t compute_minor;    // 0 of 9.0
    int32_t multiprocessors;  // SMs; of a green context its share
    int32_t shared_bytes;     // most dynamic shared memory a block may ask for (opt-in limit)
    int32_t shared_bytes_sm;  // shared memory of one SM
} kmla_device;

// Limits of a shape.
#define KMLA_MAX_HEADS 4096
#define KMLA_MAX_ROWS 65535
#define KMLA_MAX_SPLITS 1024
#define KMLA_MAX_CAPACITY_TOKENS 67108864 // 2^26: 64 times the longest public context

enum {
    KMLA_READER_HOST = 0,
    KMLA_READER_PORTABLE = 1, // compute capability 8.0 and up
    KMLA_READER_HOPPER = 2    // 9.0 exactly, packed and E4M3 KV
};

// What will be decoded. Zero takes the default in brackets.
typedef struct kmla_shape {
    int32_t requests;            // requests in a batch, 1..65535
    int32_t rows;                // R, all rows of the batch, 1..65535 [requests * rows_per_request]
    int32_t rows_per_request;    // most rows of any request [1]
    int32_t heads;               // H, as the caller holds them: no padding needed, 1..4096
    int32_t kv_format;           // KMLA_KV_* [packed]
    int32_t query_format;        // KMLA_QUERY_* [BF16]
    int32_t mode;                // KMLA_MODE_* [exact]
    int32_t page_tokens;         // P, 1.. [64]
    int64_t capacity_tokens;     // most local tokens of any row; longer lengths are clamped
    int32_t split_mode;          // KMLA_SPLIT_* [static]
    int32_t splits;              // S, 1..1024 [the planner's choice for the card]
    int32_t single_split_chunks; // rows of at most so many live chunks use one split [0]
    int32_t partial_type;        // KMLA_BF16 or KMLA_FP32 [BF16]
    int32_t tile;                // query vectors a block reads together: 8, 16, 32, Hopper
                                 // also 24, 40, 48, 56 [planner]
    int32_t ragged;              // 1: row_offsets says which rows are whose [0: uniform]
    int32_t slot_list;           // 1: tokens come from a slot list, one per row [block table]
    kmla_length_rule lengths;    // [per-row lengths, no window, one rank]
    int32_t reader;              // KMLA_READER_PORTABLE or _HOPPER [the best for card and shape]
} kmla_shape;

enum { KMLA_CHOSEN_BY_CALLER = 0, KMLA_CHOSEN_BY_PLANNER = 1 };

// A whole plan. Plain data: copy it, keep it, compare it. Made by kmla_plan_decode only.
typedef struct kmla_plan {
    int32_t version;           // KMLA_VERSION that made it
    int32_t reader;            // KMLA_READER_*
    kmla_shape shape;          // with every default filled in
    kmla_device device;        // as given
    int32_t tile;              // query vectors of a block
    int32_t tiles_per_request; // ceil(rows_per_request * heads / tile); slot list: of one row
    int32_t groups;            // independent KV readers: requests, or rows with a slot list
    int32_t splits;            // S
    int32_t splits_chosen_by;  // KMLA_CHOSEN_BY_*
    int32_t chunks;            // ceil(capacity / 64)
    int32_t chunks_per_split;  // ceil(chunks / S): the static share
    int32_t threads;           // of a reader block
    int32_t resident;          // reader blocks that are to share an SM
    int32_t stages;            // steps of KV that a reader block holds; Hopper: runs of 32 tokens
    int32_t shared_bytes;      // of a reader block
    int32_t launches;          // reader, and merge if S > 1
    uint64_t workspace_bytes;  // exact need; alignment 16
    char reason[192];          // why this tile and these splits, for a log
} kmla_plan;

// Plans a decode. `device` NULL or all zero plans for the host reader.
// Errors: ARGUMENT (names the field), OVERFLOW, UNSUPPORTED (compute capability below 8.0, or
// shared memory that no variant fits; the message has both numbers).
KMLA_API kmla_status kmla_plan_decode(const kmla_shape* shape, const kmla_device* device,
                                      kmla_plan* plan, kmla_error* error);

// Of several plans, e.g. one captured graph for 1, 2, 4, 8, ... requests, the smallest that covers
// a step: at least so many requests, rows and local tokens; fewest rows, then requests, then
// tokens. What is left over in it are dead rows. A count of 0 asks for nothing.
// Errors: ARGUMENT (no plan covers; the message has what was asked; NULL, a negative number).
KMLA_API kmla_status kmla_pick_plan(const kmla_plan* const* plans, int32_t count, int32_t requests,
                                    int32_t rows, int64_t tokens, int32_t* index,
                                    kmla_error* error);

// ---- What DCP ranks send each other
//
// A step of n ranks: each writes the queries of its own heads into its slice of a gathered buffer;
// an all-gather fills the others; each decodes all heads over its shard of the tokens; the parts
// are combined by either transport (KMLA_TRANSPORT_*), and each rank keeps its own heads.
//
// All arrays here have heads outermost, [heads][R]: a rank's slice is then one piece whatever R is,
// and is written, gathered in place, read and sent without a copy. Padding heads lie at the end.
// Heads in the gaps of equal slices are decoded from whatever lies there, and reach no result.

typedef struct kmla_gather_desc {
    int32_t heads;        // of all ranks together, 1..4096; need not be a multiple of ranks
    int32_t ranks;        // n, 1..1024 [1: also where each rank has the whole cache]
    int32_t rank;         // this one, 0..n-1
    int32_t rows;         // R, 1..65535
    int32_t query_format; // KMLA_QUERY_* [BF16]
    int32_t out_type;     // of what a rank decodes, KMLA_BF16 or KMLA_FP32 [BF16]
    int32_t equal_slices; // 1: each slice has room for the most heads of any rank, as collectives
                          // of equal counts need [0: as many as the rank has]
    int32_t stored_heads; // that a buffer has room for, e.g. 112 [as many as are gathered]
} kmla_gather_desc;

// One array, [stored heads][R] records or elements. Strides are in what the calls' structs count:
// bytes of queries, elements of out and lse.
typedef struct kmla_slices {
    int64_t head_stride;
    int64_t row_stride;
    uint64_t offset_bytes; // of this rank's slice
    uint64_t slice_bytes;  // that this rank contributes or keeps; divided by R, of one row
    uint64_t bytes;        // of the whole array, padding included
} kmla_slices;

typedef struct kmla_gather {
    kmla_gather_desc desc;  // with every default filled in
    int32_t exchanges;      // 0: one rank, which skips every collective and the combine
    int32_t gathered_heads; // H to plan a decode with: heads, or n slices where they are equal
    int32_t first_head;     // index of this rank's first head among them
    int32_t local_heads;    // of this rank; the first heads mod n ranks have one more. May be 0:
                            // such a rank writes and combines nothing, and decodes all the same
    int32_t slice_heads;    // of its slice: local_heads, or with equal slices the most of any rank
    kmla_slices query;
    kmla_slices out;
    kmla_slices lse;
} kmla_gather;

// Lays out a rank's side of a gather. Other ranks' slices: ask with their number.
// Errors: ARGUMENT (names the field).
KMLA_API kmla_status kmla_plan_gather(const kmla_gather_desc* desc, kmla_gather* out,
                                      kmla_error* error);

// =============================================================================
// >>arguments   What a call reads and writes; the same structs for host and GPU
// =============================================================================
//
// Addresses are device addresses for kmla_gpu_* and host addresses for kmla_host_*, cast to
// uint64_t. A stride of 0 means dense. Every record and payload address and byte stride is a
// multiple of 16, every int32 or fp32 array's of 4, int64 of 8, else ARGUMENT. Outputs may not
// overlap inputs.

typedef struct kmla_decode {
    uint64_t query;                  // [R][H] query records
    int64_t query_row_stride_bytes;  // [H * head stride]
    int64_t query_head_stride_bytes; // [record bytes]
    float query_scale;               // E4M3 queries: their one scale, finite and > 0
    float scale;                     // softmax scale, finite and > 0; no default
    float kv_scale;                  // E4M3 KV: its one scale, finite and > 0
    int32_t check_pages;             // 1: checking mode; reads tables back, synchronises
    uint64_t kv;                     // pool: page p begins at kv + p * page_pitch_bytes
    uint64_t kv_pages;               // pages in the pool, >= 1
    uint64_t page_pitch_bytes;       // [P * record bytes], may be more, a multiple of 16
    uint64_t block_table;            // int32 [requests][width], page of each P tokens
    int64_t block_table_width;       // entries a request, >= 1; must cover ceil(capacity / P)
    int64_t block_table_stride;      // entries from one request to the next [width]
    uint64_t slot_list;              // int32 [R][width], page * P + offset, -1 = no token
    int64_t slot_list_width;         // >= capacity_tokens
    int64_t slot_list_stride;        // [width]
    uint64_t row_offsets;            // ragged: int32 [requests + 1], prefix sums; rows past the
                                     // last offset are dead: out 0, lse -inf
    uint64_t lengths;                // int32 [R] or [requests], see KMLA_LENGTHS_*; <= 0: dead
    uint64_t out;                    // [R][H][512], BF16 or FP32
    int64_t out_row_stride;          // elements [H * head stride]
    int64_t out_head_stride;         // elements [512]
    int32_t out_type;                // KMLA_BF16 or KMLA_FP32
    int32_t lse_unused_;             // keep 0
    uint64_t lse;                    // fp32 [R][H], natural log; 0 = not wanted
    int64_t lse_row_stride;          // elements [H * head stride]
    int64_t lse_head_stride;         // elements [1]
    uint64_t workspace;              // plan.workspace_bytes, 16-byte aligned; any content
    uint64_t workspace_bytes;
} kmla_decode;

// Weighs parts by their lse: shards of DCP ranks, or any split of the tokens.
// m = max lse (NaN and +-inf count as -inf), w = exp(lse - m), out = sum(w o) / sum(w),
// lse = m + ln(sum w). A part with weight 0 is not read. All empty: out 0, lse -inf. Shares of
// parts with weight 0 are 0, whatever their payload holds, so that their sum is always the result.
typedef struct kmla_combine {
    int32_t parts;             // 1..1024
    int32_t rows;              // R
    int32_t heads;             // H, this rank's own
    int32_t part_type;         // KMLA_BF16 or KMLA_FP32
    uint64_t part_out;         // [parts][R][H][512]
    int64_t part_out_stride;   // elements from part to part [R * row stride]
    int64_t part_row_stride;   // elements [H * head stride]
    int64_t part_head_stride;  // elements [512]
    uint64_t part_lse;         // fp32 [parts][R][H]
    int64_t part_lse_stride;   // elements from part to part [R * row stride]
    int64_t part_lse_row_stride;  // elements [H * head stride]
    int64_t part_lse_head_stride; // elements [1]
    uint64_t out;              // [R][H][512]
    int64_t out_row_stride;    // elements [H * head stride]
    int64_t out_head_stride;   // elements [512]
    int32_t out_type;          // KMLA_BF16 or KMLA_FP32
    int32_t share;             // p + 1: only what part p adds, w o / sum(w), for a transport that
                               // sums; part_out is then that part's own [R][H][512] and may be
                               // out itself, if type and strides are equal [0: all parts]
    uint64_t lse;              // fp32 [R][H], of all parts; 0 = not wanted
    int64_t lse_row_stride;    // elements [H * head stride]
    int64_t lse_head_stride;   // elements [1]
} kmla_combine;

enum { KMLA_SCALE_EXACT = 0, KMLA_SCALE_POWER_OF_TWO = 1 };

// Writes KV records. Packed: per token and 128 dims, scale = max(amax / 448, FLT_MIN),
// optionally rounded up to a power of two; code = E4M3(x / scale); rope is a bit copy.
// E4M3: code = E4M3(x / kv_scale) for all 576. BF16: values rounded to BF16.
typedef struct kmla_kv_write {
    int32_t tokens;            // T, >= 1
    int32_t kv_format;         // KMLA_KV_*
    int32_t source_type;       // KMLA_BF16 or KMLA_FP32: of latent; rope likewise
    int32_t scale_rule;        // KMLA_SCALE_*; packed only
    float kv_scale;            // E4M3 only, finite and > 0
    int32_t page_tokens;       // P [64]
    uint64_t latent;           // [T][512]
    int64_t latent_stride;     // elements [512]
    uint64_t rope;             // [T][64]
    int64_t rope_stride;       // elements [64]
    uint64_t slots;            // int64 [T]: page * P + offset; < 0 or past the pool: skipped
    uint64_t kv;               // pool
    uint64_t kv_pages;         // pages in the pool
    uint64_t page_pitch_bytes; // [P * record bytes]
} kmla_kv_write;

// Writes query records. Packed: per 128 dims, raw = max(amax * (1/448), 1e-4), rounded up to a
// power of two by its bits; code = E4M3(x * (1/scale)); rope becomes BF16.
// E4M3: code = E4M3(x / query_scale) for all 576. BF16: values rounded to BF16.
// Source and destination must not overlap.
typedef struct kmla_query_write {
    int32_t rows;                     // R
    int32_t heads;                    // H
    int32_t query_format;             // KMLA_QUERY_*
    int32_t source_type;              // KMLA_BF16 or KMLA_FP32
    float query_scale;                // E4M3 only, finite and > 0
    int32_t unused_;                  // keep 0
    uint64_t source;                  // [R][H][576]
    int64_t source_row_stride;        // elements [H * head stride]
    int64_t source_head_stride;       // elements [576]
    uint64_t query;                   // [R][H] records
    int64_t query_row_stride_bytes;   // [H * head stride]
    int64_t query_head_stride_bytes;  // [record bytes]
} kmla_query_write;

// How parts come together:
// ALL_TO_ALL        each rank gets its slice of out and lse of all ranks, [n][slice heads][R]...,
//                   and combines them: out and lse of its own heads, in any layout.
// REDUCE_SCATTER    lse of all ranks is all-gathered, [n][stored heads][R]; each rank's out becomes
//                   its share; an element-wise sum over the ranks leaves its slice with each.
enum { KMLA_TRANSPORT_ALL_TO_ALL = 0, KMLA_TRANSPORT_REDUCE_SCATTER = 1 };

// A gather's layout as arguments. Each fills in the named addresses and all that the layout says of
// them (counts, types, strides), and leaves the rest of *args as it is. Of a share, out's and lse's
// strides too: out lies like part_out. Errors: ARGUMENT (NULL, an unknown transport, a rank without
// heads that is to write or to combine its own). Any thread.
KMLA_API kmla_status kmla_gather_write(const kmla_gather* gather, uint64_t query,
                                       kmla_query_write* args, kmla_error* error);
KMLA_API kmla_status kmla_gather_decode(const kmla_gather* gather, uint64_t query, uint64_t out,
                                        uint64_t lse, kmla_decode* args, kmla_error* error);
KMLA_API kmla_status kmla_gather_combine(const kmla_gather* gather, int32_t transport,
                                         uint64_t part_out, uint64_t part_lse, kmla_combine* args,
                                         kmla_error* error);

// The checks that every host and GPU call makes first, usable alone: nothing is read through
// any address. Errors: ARGUMENT (names the field), WORKSPACE, OVERFLOW. Any thread.
KMLA_API kmla_status kmla_check_decode(const kmla_plan* plan, const kmla_decode* args,
                                       kmla_error* error);
KMLA_API kmla_status kmla_check_combine(const kmla_combine* args, kmla_error* error);
KMLA_API kmla_status kmla_check_kv_write(const kmla_kv_write* args, kmla_error* error);
KMLA_API kmla_status kmla_check_query_write(const kmla_query_write* args, kmla_error* error);

// Checking mode's own check, on HOST copies of the tables: row_offsets rise from 0 to at most R
// and by at most rows_per_request, every page or slot that a live token names is in the pool.
// `table` is the block table or the slot list, `row_offsets` may be NULL if not ragged.
// Errors: those of kmla_check_decode, PAGE (the message has row, token and value).
KMLA_API kmla_status kmla_check_pages(const kmla_plan* plan, const kmla_decode* args,
                                      const int32_t* table, const int32_t* lengths,
                                      const int32_t* row_offsets, kmla_error* error);

// =============================================================================
// >>host   Host reader, merge, combine and writers: plain C, fp32, the GPU's fallback and oracle
// =============================================================================

// A caller's way to run count tasks, in any order and on any threads; run returns when all have.
typedef void (*kmla_task)(void* task_data, uint32_t index);
typedef struct kmla_parallel {
    void (*run)(void* user, uint32_t count, kmla_task task, void* task_data);
    void* user;
} kmla_parallel;

// Decodes on the CPU, by the same plan (splits, partial type) as the GPU would. `parallel` NULL
// runs on the calling thread. Order of sums: a score is 16 sums of the dims equal modulo 16, each
// ascending, then added in halves (i and i + 8, i + 4, i + 2, i + 1). Tokens ascend within a
// 64-token chunk, chunks within a split, splits in the merge. The result does not depend on
// `parallel`. Allocates nothing; takes about 56 KiB of stack.
// Errors: those of kmla_check_decode; PAGE with check_pages. Threads: any, on distinct outputs.
KMLA_API kmla_status kmla_host_decode(const kmla_plan* plan, const kmla_decode* args,
                                      const kmla_parallel* parallel, kmla_error* error);

// Combine and writers on the CPU; byte-equal to the GPU's writers. Errors: their check's.
KMLA_API kmla_status kmla_host_combine(const kmla_combine* args, kmla_error* error);
KMLA_API kmla_status kmla_host_write_kv(const kmla_kv_write* args, kmla_error* error);
KMLA_API kmla_status kmla_host_write_query(const kmla_query_write* args, kmla_error* error);

// =============================================================================
// >>gpu   GPU side: open, compile, prepare, launch, close
// =============================================================================
#ifndef KIMI_MLA_NO_GPU

// One object per CUDA context; not tied to a thread.
typedef struct kmla_gpu kmla_gpu;

// Keeps compiled images from one process to the next, under keys: text of letters, digits, '_' and
// '-' that can name a file. A key is a hash of the device source, the compiler's options,
// its version and this header's, after the architecture and the variant in clear. Called by
// kmla_gpu_compile and kmla_gpu_prepare on their threads, so by several at once if they are.
// Nothing is taken on trust: what load gives is checked as any image is, and whatever is wrong with
// it, or whatever the driver refuses, is compiled and stored again.
#define KMLA_CACHE_KEY_BYTES 48 // room that holds every key, the final 0 included
typedef struct kmla_cache {
    // Returns the bytes of a key's entry, 0 if there is none, and copies them if room suffices.
    size_t (*load)(void* user, const char* key, void* data, size_t room);
    // Puts an entry in the place of an older one. If it fails, the next load finds none.
    void (*store)(void* user, const char* key, const void* data, size_t bytes);
    void* user;
} kmla_cache;

// How the libraries are found. A handle wins over a path, a path over the search:
//   libcuda  libcuda.so.1 / nvcuda.dll, by the loader.
//   NVRTC    libnvrtc.so.13, .12, .11.2, .so / nvrtc64_130_0.dll, ...: one that the process has
//            loaded already; else by the loader; else in lib64 and lib (Windows: bin\x64 and bin)
//            of CUDA_PATH, CUDA_HOME and /usr/local/cuda, toolkits and pip wheels alike. Releases
//            newer than the driver come last.
typedef struct kmla_gpu_desc {
    void* cuda_handle;        // of dlopen or LoadLibrary; stays the caller's
    const char* cuda_path;
    void* nvrtc_handle;
    const char* nvrtc_path;
    int32_t without_nvrtc;    // 1: images come from the caller; NVRTC is not looked for
    int32_t without_cuda;     // 1: for compiling only, libcuda is not looked for; every other
                              // call on the object returns LIBRARY
    kmla_cache cache;         // of what is compiled [none]; kmla_cache_files makes one
} kmla_gpu_desc;

#ifndef KIMI_MLA_NO_FILES
// A cache of files in a directory, for kmla_gpu_desc.cache. `directory` is not copied and must
// outlive the objects that are opened with it. Its last folder is made if it is missing, for its
// owner alone. A folder that exists must be this user's or root's, and nobody else may write to
// it; one that is read-only is read. (On Windows it has the access rights of its parent.)
// An entry is written to a file of its own, <key>.<process>.<number>.tmp, brought to disk, and
// renamed to <key>.kmla. Processes and threads may share a directory. A killed process may leave a
// *.tmp, which nobody reads. Any other fault of files is a miss, never an error of a later call.
// Errors: ARGUMENT (the message says what is wrong with the directory); *cache stays as it was.
// Any thread.
KMLA_API kmla_status kmla_cache_files(const char* directory, kmla_cache* cache,
                                      kmla_error* error);
#endif

// Finds the libraries and their functions, and that NVRTC has its builtins (by a compile of
// nothing, which takes some 10 ms). Creates no context, prints nothing, unloads nothing. desc may
// be NULL. Not for use during capture.
// Errors: LIBRARY (lists every name tried; a toolkit's stub of libcuda; NVRTC without its
// builtins), SYMBOL, CUDA, MEMORY.
KMLA_API kmla_status kmla_gpu_open(const kmla_gpu_desc* desc, kmla_gpu** gpu, kmla_error* error);

// Describes the device of the calling thread's current context. Errors: CONTEXT, CUDA.
KMLA_API kmla_status kmla_gpu_device(kmla_gpu* gpu, kmla_device* device, kmla_error* error);

// A compiled image: CUBIN for exactly one architecture, behind a head of 64 bytes that says what
// it is of. Keep its bytes in a file or an array; kmla_image_open makes an image of them again.
typedef struct kmla_image {
    void* data;            // KMLA_MALLOC, or the caller's; see borrowed
    size_t bytes;
    int32_t variant;       // which kernels: kmla_plan_variant, or 0 for the writers and combine
    int32_t compute_major; // the card it is for
    int32_t compute_minor;
    int32_t borrowed;      // 1: data is the caller's, of kmla_image_open
} kmla_image;

// Receives NVRTC's log, also when it succeeds with a log. The text ends when the call returns.
typedef struct kmla_log {
    void (*write)(void* user, const char* text);
    void* user;
} kmla_log;

// Compiles the kernels of a plan, or with plan NULL the writers and the combine, for
// device->compute_major.minor. Needs no GPU and no context. Slow (seconds) unless the cache has
// it; with a log the cache is not asked, only told. Any thread.
// Errors: ARGUMENT, LIBRARY (opened without_nvrtc, or KIMI_MLA_NO_NVRTC), ARCHITECTURE (NVRTC
// does not know the card; the message has NVRTC's version and what it knows), COMPILE (the message
// has the options), MEMORY.
KMLA_API kmla_status kmla_gpu_compile(kmla_gpu* gpu, const kmla_plan* plan,
                                      const kmla_device* device, const kmla_log* log,
                                      kmla_image* image, kmla_error* error);

// An image of bytes that kmla_gpu_compile made earlier, also on another machine. `data` stays the
// caller's, aligned to 8 bytes; it is not copied and must outlive the image. Any thread.
// Errors: ARGUMENT (empty, unaligned, cut off, damaged, of another version or device source; the
// message says which). Whether it fits the plan and the card is kmla_gpu_prepare's to check.
KMLA_API kmla_status kmla_image_open(const void* data, size_t bytes, kmla_image* image,
                                     kmla_error* error);

// Frees what kmla_gpu_compile allocated and zeroes the image. NULL does nothing.
KMLA_API void kmla_image_free(kmla_image* image);

// Loads a plan's kernels into the current context, or with plan NULL the writers and the
// combine (a plan loads those too). `image` NULL compiles first; to compile nothing, first prepare
// NULL with the image of NULL, then the plan with its own. Calling it again for what is loaded does
// nothing. Call it outside capture, once per context and plan, before any launch.
// Not from two threads at once on one object.
// Errors: CONTEXT (none current, or another than the first prepare's), CAPTURE is not detected
// here, ARGUMENT (an image that kmla_image_open refuses or of another variant or plan),
// ARCHITECTURE (an image for another card), UNSUPPORTED (less shared memory than planned),
// CUDA, and those of kmla_gpu_compile.
KMLA_API kmla_status kmla_gpu_prepare(kmla_gpu* gpu, const kmla_plan* plan,
                                      const kmla_image* image, kmla_error* error);

// Launches: the reader, and the merge if there are several splits. `stream` is a CUstream (NULL
// = the context's legacy stream). Allocates, locks, loads, queries and synchronises nothing, and
// is legal in any capture mode. Everything that varies from step to step (lengths, tables, row
// offsets) is read from device memory when the kernel runs. Any thread with the prepared
// context current; launches on distinct workspaces may overlap.
// Errors, before anything is launched: those of kmla_check_decode, CONTEXT, NOT_PREPARED (a
// capture stays valid); then CUDA. With check_pages it reads tables back and synchronises, and
// so is not for capture: CAPTURE (which stays valid), PAGE, MEMORY.
KMLA_API kmla_status kmla_gpu_decode(kmla_gpu* gpu, const kmla_plan* plan,
                                     const kmla_decode* args, void* stream, kmla_error* error);
KMLA_API kmla_status kmla_gpu_combine(kmla_gpu* gpu, const kmla_combine* args, void* stream,
                                      kmla_error* error);
KMLA_API kmla_status kmla_gpu_write_kv(kmla_gpu* gpu, const kmla_kv_write* args, void* stream,
                                       kmla_error* error);
KMLA_API kmla_status kmla_gpu_write_query(kmla_gpu* gpu, const kmla_query_write* args,
                                          void* stream, kmla_error* error);

// Unloads the modules (if their context still lives) and frees the object. NULL does nothing.
KMLA_API void kmla_gpu_close(kmla_gpu* gpu);

// The variant number of a plan's kernels: reader * 10000 + kv_format * 1000 + tile.
KMLA_API int32_t kmla_plan_variant(const kmla_plan* plan);

// The whole device source as NVRTC gets it (facts first), for offline compilers and caches.
// *bytes is the room of text and becomes the need, the final zero included; text may be NULL.
// Errors: ARGUMENT (bytes is NULL, or the room too small: text stays as it was), LIBRARY (with
// KIMI_MLA_NO_NVRTC). Any thread.
KMLA_API kmla_status kmla_device_source(char* text, size_t* bytes, kmla_error* error);

#endif // KIMI_MLA_NO_GPU

#ifdef __cplusplus
}
#endif

#endif // KIMI_MLA_H

// =============================================================================
// End of header; the implementation follows
// =============================================================================
#if defined(KIMI_MLA_IMPLEMENTATION) && !defined(KIMI_MLA_IMPLEMENTED)
#define KIMI_MLA_IMPLEMENTED

// -----------------------------------------------------------------------------
// Facts that host and device share. Each is written once, as a macro; KMLA_I_FACTS further down
// turns them into the first lines of the device source.
// -----------------------------------------------------------------------------

#define KMLA_I_READER_THREADS 256  // 8 warps: 2 halves of a step's tokens x 4 groups of dims
#define KMLA_I_SUPPORT_THREADS 128 // merge, combine, writers
#define KMLA_I_STEP_TOKENS 32      // tokens a block takes through QK, softmax and PV at a time; a
                                   // bulk copy, which lies in one page
#define KMLA_I_FP8_STEP_TOKENS 64  // the same of FP8 KV, of which more fits
#define KMLA_I_STAGES 2            // steps of KV in shared memory
#define KMLA_I_BLOCK_RESERVED_BYTES 1024 // shared memory that CUDA keeps of every block
#define KMLA_I_PITCH_PACKED 656    // bytes from record to record in shared memory: chosen so
#define KMLA_I_PITCH_E4M3 592      // that a warp's loads fall into different banks
#define KMLA_I_PITCH_BF16 1168
#define KMLA_I_MISC_BYTES 128      // barriers and token masks of the stages, facts of the tile
#define KMLA_I_HOPPER_THREADS 512  // of the Hopper reader: 8 warps that score, 8 that weigh values
#define KMLA_I_HOPPER_STEP_TOKENS 64
#define KMLA_I_HOPPER_MISC_BYTES 256
#define KMLA_I_HOPPER_LEAST_RUNS 5 // of KMLA_I_STEP_TOKENS tokens, in the ring: two steps and one
#define KMLA_I_HOPPER_MOST_RUNS 10
#define KMLA_I_MOST_TILE 56         // vectors of a tile, of the Hopper reader
#define KMLA_I_REFERENCE_BELOW 5   // a new softmax reference is the maximum less this (log2)
#define KMLA_I_REFERENCE_GROWTH 15 // and is kept until a score passes it by this: 2^15 fits f16

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// =============================================================================
// >>status   Implementation: status codes, errors, and the checks that all others are made of
// =============================================================================

#if defined(__GNUC__) || defined(__clang__)
#define KMLA_I_PRINTF(format, values) __attribute__((__format__(__printf__, format, values)))
#else
#define KMLA_I_PRINTF(format, values)
#endif

#define KMLA_I_COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

KMLA_API const char* kmla_status_name(kmla_status status) {
    switch (status) {
#define KMLA_I_STATUS(name, value, text) case value: return #name;
        KMLA_STATUS_LIST(KMLA_I_STATUS)
#undef KMLA_I_STATUS
    }
    return "KMLA_ERROR_UNKNOWN";
}

KMLA_API const char* kmla_status_text(kmla_status status) {
    switch (status) {
#define KMLA_I_STATUS(name, value, text) case value: return text;
        KMLA_STATUS_LIST(KMLA_I_STATUS)
#undef KMLA_I_STATUS
    }
    return "not a status of this library";
}

// Fills the whole error, if the caller wants one, and returns the status.
static kmla_status kmla_i_fail(kmla_error* error, kmla_status status, const char* format, ...)
    KMLA_I_PRINTF(3, 4);

static kmla_status kmla_i_fail(kmla_error* error, kmla_status status, const char* format, ...) {
    if (error) {
        va_list values;
        memset(error, 0, sizeof *error);
        error->status = status;
        va_start(values, format);
        vsnprintf(error->message, sizeof error->message, format, values);
        va_end(values);
    }
    return status;
}

static int64_t kmla_i_min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t kmla_i_max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t kmla_i_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static int64_t kmla_i_default(int64_t value, int64_t instead) { return value ? value : instead; }

// A product of counts: INT64_MAX if it does not fit, -1 if a factor is negative. Both are sizes
// that no check accepts, so that defaults can be computed before anything is checked.
static int64_t kmla_i_multiply(int64_t a, int64_t b) {
    if (a < 0 || b < 0) {
        return -1;
    }
    return b > 0 && a > INT64_MAX / b ? INT64_MAX : a * b;
}

// What a number may be, inclusive.
typedef struct kmla_i_limit {
    const char* name;
    int64_t value, low, high;
} kmla_i_limit;

static kmla_status kmla_i_check_limits(const kmla_i_limit* limits, int32_t count,
                                       kmla_error* error) {
    for (int32_t i = 0; i < count; ++i) {
        const kmla_i_limit* l = &limits[i];
        if (l->value < l->low || l->value > l->high) {
            return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is %lld; %lld..%lld is allowed",
                               l->name, (long long)l->value, (long long)l->low,
                               (long long)l->high);
        }
    }
    return KMLA_OK;
}

static kmla_status kmla_i_check_pointer(const char* name, const void* pointer, kmla_error* error) {
    return pointer ? KMLA_OK : kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is NULL", name);
}

// =============================================================================
// >>records   Implementation: record sizes, E4M3 and BF16
// =============================================================================

KMLA_API size_t kmla_kv_record_bytes(int32_t kv_format) {
    switch (kv_format) {
        case KMLA_KV_PACKED: return KMLA_PACKED_BYTES;
        case KMLA_KV_E4M3: return KMLA_E4M3_BYTES;
        case KMLA_KV_BF16: return KMLA_BF16_BYTES;
    }
    return 0;
}

KMLA_API size_t kmla_query_record_bytes(int32_t query_format) {
    switch (query_format) {
        case KMLA_QUERY_BF16: return KMLA_BF16_BYTES;
        case KMLA_QUERY_PACKED: return KMLA_PACKED_BYTES;
        case KMLA_QUERY_E4M3: return KMLA_E4M3_BYTES;
    }
    return 0;
}

static uint32_t kmla_i_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float kmla_i_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// E4M3 is sign, 4 bits of exponent with bias 7, 3 of mantissa; exponent 0 counts 2^-9 steps.
KMLA_API float kmla_e4m3_to_float(uint8_t code) {
    uint32_t sign = (uint32_t)(code & 0x80) << 24;
    uint32_t magnitude = code & 0x7Fu;
    if (magnitude == 0x7F) {
        return kmla_i_float(sign | 0x7FC00000u);
    }
    if (magnitude < 8) {
        float value = (float)magnitude * (1.0f / 512.0f);
        return kmla_i_float(sign | kmla_i_bits(value));
    }
    return kmla_i_float(sign | ((magnitude << 20) + (120u << 23))); // 120 = fp32's bias less 7
}

KMLA_API uint8_t kmla_float_to_e4m3(float value) {
    uint32_t bits = kmla_i_bits(value);
    uint32_t sign = bits >> 24 & 0x80u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return 0x7F;
    }
    if (magnitude >= 0x43E00000u) { // 448 and more
        return (uint8_t)(sign | 0x7Eu);
    }
    if (magnitude >= 0x3C800000u) { // 2^-6 and more: keep 3 of 23 mantissa bits
        uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);
        return (uint8_t)(sign | ((rounded >> 20) - (120u << 3)));
    }
    uint32_t shift = 141u - (magnitude >> 23); // of the 24-bit significand, to count 2^-9 steps
    if (shift > 24) {                          // less than half a step
        return (uint8_t)sign;
    }
    uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    uint32_t half_less_one = (1u << (shift - 1)) - 1u;
    return (uint8_t)(sign | ((significand + half_less_one + (significand >> shift & 1u)) >> shift));
}

KMLA_API float kmla_bf16_to_float(uint16_t bits) { return kmla_i_float((uint32_t)bits << 16); }

// NaN becomes 0x7FFF, as the GPU's own conversion has it.
KMLA_API uint16_t kmla_float_to_bf16(float value) {
    uint32_t bits = kmla_i_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0x7FFF;
    }
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// =============================================================================
// >>planning   Implementation: heads
// =============================================================================

KMLA_API kmla_status kmla_plan_heads(const kmla_heads_desc* desc, kmla_heads* out,
                                     kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("desc", desc, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("out", out, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    int64_t ranks = kmla_i_default(desc->dcp_ranks, 1);
    const kmla_i_limit limits[] = {
        {"desc.local_heads", desc->local_heads, 1, KMLA_MAX_HEADS},
        {"desc.dcp_ranks", ranks, 1, INT32_MAX},
        {"desc.kv_format", desc->kv_format, 0, KMLA_KV_BF16},
        {"desc.padding", desc->padding, 0, KMLA_PAD_EIGHT},
    };
    status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status != KMLA_OK) {
        return status;
    }
    int64_t effective = desc->local_heads * ranks;
    if (effective > 1 << 20) {
        return kmla_i_fail(error, KMLA_ERROR_OVERFLOW,
                           "desc.local_heads * desc.dcp_ranks is %lld; 1048576 is the most",
                           (long long)effective);
    }
    // Packed heads that fit one tile of 16 are not given one: two of 8 at most hold them.
    int64_t tile = desc->kv_format == KMLA_KV_PACKED && effective > 16 ? 16 : 8;
    int64_t unit = desc->padding == KMLA_PAD_EIGHT ? 8 : tile;
    int64_t padded = kmla_i_ceil_div(effective, unit) * unit;
    out->effective = (int32_t)effective;
    out->tile = (int32_t)tile;
    out->padded = (int32_t)padded;
    out->tiles = (int32_t)kmla_i_ceil_div(padded, tile);
    out->launches = padded % tile ? 2 : 1;
    return KMLA_OK;
}

// =============================================================================
// >>planning   Implementation: lengths
// =============================================================================

static kmla_dcp kmla_i_full_dcp(kmla_dcp dcp) {
    dcp.ranks = (int32_t)kmla_i_default(dcp.ranks, 1);
    dcp.interleave = (int32_t)kmla_i_default(dcp.interleave, 1);
    return dcp;
}

// Checks a DCP whose defaults are filled in.
static kmla_status kmla_i_check_dcp(const kmla_dcp* dcp, kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"dcp.ranks", dcp->ranks, 1, INT32_MAX},
        {"dcp.rank", dcp->rank, 0, (int64_t)dcp->ranks - 1},
        {"dcp.interleave", dcp->interleave, 1, INT32_MAX},
    };
    return kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
}

// A DCP as the public functions take it: not NULL, defaults filled in, checked.
static kmla_status kmla_i_read_dcp(const kmla_dcp* given, kmla_dcp* dcp, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("dcp", given, error);
    if (status != KMLA_OK) {
        return status;
    }
    *dcp = kmla_i_full_dcp(*given);
    return kmla_i_check_dcp(dcp, error);
}

// Tokens of the first `tokens` global ones that this rank holds. dcp is full and checked.
static int64_t kmla_i_local_tokens(const kmla_dcp* dcp, int64_t tokens) {
    int64_t interleave = dcp->interleave;
    int64_t round = dcp->ranks * interleave; // tokens in which every rank has its turn
    int64_t rest = tokens % round - dcp->rank * interleave;
    return tokens / round * interleave + kmla_i_min(kmla_i_max(rest, 0), interleave);
}

KMLA_API kmla_status kmla_local_length(const kmla_dcp* dcp, int64_t global_tokens,
                                       int64_t* local_tokens, kmla_error* error) {
    kmla_dcp full;
    kmla_status status = kmla_i_read_dcp(dcp, &full, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("local_tokens", local_tokens, error);
    }
    if (status == KMLA_OK) {
        *local_tokens = kmla_i_local_tokens(&full, kmla_i_max(global_tokens, 0));
    }
    return status;
}

KMLA_API kmla_status kmla_token_owner(const kmla_dcp* dcp, int64_t global_token, int32_t* rank,
                                      int64_t* local_token, kmla_error* error) {
    kmla_dcp full;
    kmla_status status = kmla_i_read_dcp(dcp, &full, error);
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_i_limit limit = {"global_token", global_token, 0, INT64_MAX};
    status = kmla_i_check_limits(&limit, 1, error);
    if (status != KMLA_OK) {
        return status;
    }
    int64_t interleave = full.interleave;
    int64_t run = global_token / interleave; // every run of `interleave` tokens has one owner
    if (rank) {
        *rank = (int32_t)(run % full.ranks);
    }
    if (local_token) {
        *local_token = run / full.ranks * interleave + global_token % interleave;
    }
    return KMLA_OK;
}

KMLA_API kmla_status kmla_shard_capacity(const kmla_dcp* dcp, int64_t context_tokens,
                                         int64_t* shard_tokens, kmla_error* error) {
    kmla_dcp full;
    kmla_status status = kmla_i_read_dcp(dcp, &full, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("shard_tokens", shard_tokens, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    int64_t round = (int64_t)full.ranks * full.interleave;
    // The upper limit keeps the last, partly filled round from passing INT64_MAX.
    const kmla_i_limit limit = {"context_tokens", context_tokens, 0, INT64_MAX - round};
    status = kmla_i_check_limits(&limit, 1, error);
    if (status == KMLA_OK) {
        *shard_tokens = kmla_i_ceil_div(context_tokens, round) * full.interleave;
    }
    return status;
}

static kmla_status kmla_i_check_length_rule(const kmla_length_rule* rule, kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"lengths.lengths_kind", rule->lengths_kind, 0, KMLA_LENGTHS_PER_REQUEST},
        {"lengths.rows_kind", rule->rows_kind, 0, KMLA_ROWS_DRAFT},
        {"lengths.window_tokens", rule->window_tokens, 0, INT32_MAX},
    };
    kmla_dcp dcp = kmla_i_full_dcp(rule->dcp);
    kmla_status status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK) {
        status = kmla_i_check_dcp(&dcp, error);
    }
    if (status == KMLA_OK && rule->lengths_kind == KMLA_LENGTHS_PER_ROW && dcp.ranks > 1) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "lengths.dcp.ranks is %d, but lengths_kind is KMLA_LENGTHS_PER_ROW: "
                           "those are local already; only per-request lengths are global",
                           (int)dcp.ranks);
    }
    return status;
}

// Tokens [begin, end) that row i of a request's `rows` sees, before the capacity clamp. `length`
// is the row's own, or its request's global one, as the rule (checked) says.
static void kmla_i_row_range(const kmla_length_rule* rule, int64_t length, int32_t rows,
                             int32_t row, int64_t* begin, int64_t* end) {
    int64_t last = kmla_i_max(length, 0);
    if (rule->lengths_kind == KMLA_LENGTHS_PER_REQUEST && rule->rows_kind == KMLA_ROWS_CAUSAL) {
        last = kmla_i_max(last - ((int64_t)rows - 1 - row), 0);
    }
    int64_t first = rule->window_tokens ? kmla_i_max(last - rule->window_tokens, 0) : 0;
    // Global bounds are localised one by one. A difference of local numbers would be wrong.
    kmla_dcp dcp = kmla_i_full_dcp(rule->dcp);
    *begin = kmla_i_local_tokens(&dcp, first);
    *end = kmla_i_local_tokens(&dcp, last);
}

KMLA_API kmla_status kmla_row_ranges(const kmla_length_rule* rule, int64_t length, int32_t rows,
                                     int64_t* begins, int64_t* ends, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("rule", rule, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("begins", begins, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("ends", ends, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_length_rule(rule, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    int32_t most_rows = rule->lengths_kind == KMLA_LENGTHS_PER_ROW ? 1 : INT32_MAX;
    const kmla_i_limit limit = {"rows", rows, 1, most_rows};
    status = kmla_i_check_limits(&limit, 1, error);
    if (status != KMLA_OK) {
        return status;
    }
    for (int32_t row = 0; row < rows; ++row) {
        kmla_i_row_range(rule, length, rows, row, &begins[row], &ends[row]);
    }
    return KMLA_OK;
}

// =============================================================================
// >>planning   Implementation: splits and workspace
// =============================================================================

// Chunks [first, last) of split s, for a row whose live chunks are [live_first, live_last).
static void kmla_i_split_chunks(int32_t split_mode, int32_t splits, int32_t split, int64_t chunks,
                                int32_t single_split_chunks, int64_t live_first, int64_t live_last,
                                int64_t* first, int64_t* last) {
    int64_t live = live_last - live_first;
    if (live <= single_split_chunks) {
        *first = live_first;
        *last = split == 0 ? live_last : live_first;
    } else if (split_mode == KMLA_SPLIT_STATIC) {
        int64_t share = kmla_i_ceil_div(chunks, splits);
        *first = split * share;
        *last = *first + share;
    } else {
        int64_t used = kmla_i_min(splits, live);
        int64_t share = live / used;
        int64_t longer = live % used; // so many splits take one chunk more
        *first = live_first + split * share + kmla_i_min(split, longer);
        *last = split < used ? *first + share + (split < longer) : *first;
    }
}

KMLA_API kmla_status kmla_split_range(int32_t split_mode, int32_t splits, int32_t split,
                                      int64_t capacity_tokens, int32_t single_split_chunks,
                                      int64_t begin, int64_t end, int64_t* part_begin,
                                      int64_t* part_end, kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"split_mode", split_mode, 0, KMLA_SPLIT_BALANCED},
        {"splits", splits, 1, KMLA_MAX_SPLITS},
        {"split", split, 0, (int64_t)splits - 1},
        {"capacity_tokens", capacity_tokens, 1, KMLA_MAX_CAPACITY_TOKENS},
        {"single_split_chunks", single_split_chunks, 0, INT32_MAX},
        {"begin", begin, 0, INT64_MAX},
        {"end", end, begin, INT64_MAX},
    };
    kmla_status status = kmla_i_check_pointer("part_begin", part_begin, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("part_end", part_end, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    end = kmla_i_min(end, capacity_tokens);
    begin = kmla_i_min(begin, end);
    *part_begin = begin;
    *part_end = begin;
    if (begin < end) {
        int64_t first, last;
        kmla_i_split_chunks(split_mode, splits, split,
                            kmla_i_ceil_div(capacity_tokens, KMLA_CHUNK_TOKENS),
                            single_split_chunks, begin / KMLA_CHUNK_TOKENS,
                            kmla_i_ceil_div(end, KMLA_CHUNK_TOKENS), &first, &last);
        first = kmla_i_max(begin, first * KMLA_CHUNK_TOKENS);
        last = kmla_i_min(end, last * KMLA_CHUNK_TOKENS);
        if (first < last) {
            *part_begin = first;
            *part_end = last;
        }
    }
    return KMLA_OK;
}

static int32_t kmla_i_element_bytes(int32_t type) { return type == KMLA_BF16 ? 2 : 4; }

KMLA_API kmla_status kmla_workspace_bytes(int32_t rows, int32_t heads, int32_t splits,
                                          int32_t partial_type, uint64_t* bytes,
                                          kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"rows", rows, 1, INT32_MAX},
        {"heads", heads, 1, INT32_MAX},
        {"splits", splits, 1, INT32_MAX},
        {"partial_type", partial_type, 0, KMLA_FP32},
    };
    kmla_status status = kmla_i_check_pointer("bytes", bytes, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    if (splits == 1) { // the reader writes the output itself
        *bytes = 0;
        return KMLA_OK;
    }
    int64_t vector_bytes = KMLA_LATENT_DIMS * kmla_i_element_bytes(partial_type) + 4;
    int64_t vectors = kmla_i_multiply(rows, heads);
    int64_t need = kmla_i_multiply(kmla_i_multiply(vectors, splits), vector_bytes);
    if (need == INT64_MAX) {
        return kmla_i_fail(error, KMLA_ERROR_OVERFLOW,
                           "a workspace of %d splits * %d rows * %d heads does not fit 63 bits",
                           (int)splits, (int)rows, (int)heads);
    }
    *bytes = (uint64_t)need;
    return KMLA_OK;
}

// =============================================================================
// >>planning   Implementation: a whole plan
// =============================================================================

// Fills in every default but those of tile and splits, which need the card.
static kmla_shape kmla_i_full_shape(const kmla_shape* given) {
    kmla_shape shape = *given;
    shape.rows_per_request = (int32_t)kmla_i_default(shape.rows_per_request, 1);
    shape.page_tokens = (int32_t)kmla_i_default(shape.page_tokens, 64);
    shape.lengths.dcp = kmla_i_full_dcp(shape.lengths.dcp);
    if (shape.rows == 0 && !shape.ragged) {
        int64_t rows = kmla_i_multiply(shape.requests, shape.rows_per_request);
        shape.rows = (int32_t)kmla_i_min(rows, INT32_MAX);
    }
    return shape;
}

// Tiles for which the readers are written, and what they cost on an H200 (us; medians of the
// benchmark's sweeps, 2026-12-01, packed KV): a block's launch, query, first loads and last stores;
// a step of a block alone on its SM, and of two blocks that share one (0: they never do).
typedef struct kmla_i_tile_cost {
    int32_t reader, tile;
    double block_us, alone_us, shared_us;
} kmla_i_tile_cost;
static const kmla_i_tile_cost kmla_i_tiles[] = {
    {KMLA_READER_PORTABLE, 8, 5.5, 1.39, 2.00},
    {KMLA_READER_PORTABLE, 16, 6.3, 1.68, 2.40},
    {KMLA_READER_PORTABLE, 32, 10.4, 2.07, 4.40},
    {KMLA_READER_HOPPER, 8, 6.5, 1.36, 0.00},
    {KMLA_READER_HOPPER, 16, 6.7, 1.45, 0.00},
    {KMLA_READER_HOPPER, 24, 6.9, 1.55, 0.00},
    {KMLA_READER_HOPPER, 32, 7.1, 1.63, 0.00},
    {KMLA_READER_HOPPER, 40, 7.7, 1.83, 0.00},
    {KMLA_READER_HOPPER, 48, 8.0, 1.94, 0.00},
    {KMLA_READER_HOPPER, 56, 8.5, 1.98, 0.00},
};
enum { KMLA_I_TILES = sizeof kmla_i_tiles / sizeof kmla_i_tiles[0] };

// The entry of a reader's tile, NULL if it has none such. The host reader takes every tile.
static const kmla_i_tile_cost* kmla_i_find_tile(int32_t reader, int32_t tile) {
    for (int32_t i = 0; i < KMLA_I_TILES; ++i) {
        if (kmla_i_tiles[i].tile == tile &&
            (kmla_i_tiles[i].reader == reader || reader == KMLA_READER_HOST)) {
            return &kmla_i_tiles[i];
        }
    }
    return NULL;
}

// Checks a shape whose defaults are filled in; tile and splits may still be 0.
static kmla_status kmla_i_check_shape(const kmla_shape* shape, kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"shape.requests", shape->requests, 1, KMLA_MAX_ROWS},
        {"shape.rows_per_request", shape->rows_per_request, 1, KMLA_MAX_ROWS},
        {"shape.ragged", shape->ragged, 0, 1},
        {"shape.rows", shape->rows, 1, KMLA_MAX_ROWS},
        {"shape.heads", shape->heads, 1, KMLA_MAX_HEADS},
        {"shape.kv_format", shape->kv_format, 0, KMLA_KV_BF16},
        {"shape.query_format", shape->query_format, 0, KMLA_QUERY_E4M3},
        {"shape.mode", shape->mode, 0, KMLA_MODE_E4M3_QUERY},
        {"shape.page_tokens", shape->page_tokens, 1, INT32_MAX},
        {"shape.capacity_tokens", shape->capacity_tokens, 1, KMLA_MAX_CAPACITY_TOKENS},
        {"shape.split_mode", shape->split_mode, 0, KMLA_SPLIT_BALANCED},
        {"shape.splits", shape->splits, 0, KMLA_MAX_SPLITS},
        {"shape.single_split_chunks", shape->single_split_chunks, 0, INT32_MAX},
        {"shape.partial_type", shape->partial_type, 0, KMLA_FP32},
        {"shape.slot_list", shape->slot_list, 0, 1},
        {"shape.reader", shape->reader, 0, KMLA_READER_HOPPER},
        // The reader's grid has one more layer for the rows past the last offset.
        {"shape.requests (ragged)", (int64_t)shape->requests + shape->ragged, 1, 65535},
    };
    kmla_status status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK) {
        status = kmla_i_check_length_rule(&shape->lengths, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    int64_t uniform_rows = (int64_t)shape->requests * shape->rows_per_request;
    if (!shape->ragged && shape->rows != uniform_rows) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "shape.rows is %d; requests * rows_per_request is %lld, and not ragged",
                           (int)shape->rows, (long long)uniform_rows);
    }
    if (shape->tile != 0 && !kmla_i_find_tile(KMLA_READER_HOST, shape->tile)) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "shape.tile is %d; multiples of 8 up to %d are allowed, and 0 for the "
                           "planner's",
                           (int)shape->tile, KMLA_I_MOST_TILE);
    }
    int per_row = shape->lengths.lengths_kind == KMLA_LENGTHS_PER_ROW;
    if (shape->slot_list && (shape->ragged || !per_row)) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "shape.slot_list has a list per row, so it wants KMLA_LENGTHS_PER_ROW "
                           "and no ragged rows");
    }
    return KMLA_OK;
}

static int kmla_i_no_device(const kmla_device* device) {
    return !device || (device->compute_major == 0 && device->compute_minor == 0 &&
                       device->multiprocessors == 0 && device->shared_bytes == 0 &&
                       device->shared_bytes_sm == 0);
}

static kmla_status kmla_i_check_device(const kmla_device* device, kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"device.compute_major", device->compute_major, 0, 999},
        {"device.compute_minor", device->compute_minor, 0, 9},
        {"device.multiprocessors", device->multiprocessors, 1, 65535},
        {"device.shared_bytes", device->shared_bytes, 0, INT32_MAX},
        {"device.shared_bytes_sm", device->shared_bytes_sm, 0, INT32_MAX},
    };
    kmla_status status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK && device->compute_major < 8) {
        return kmla_i_fail(error, KMLA_ERROR_UNSUPPORTED,
                           "device.compute_major is %d (compute capability %d.%d); 8.0 is needed",
                           (int)device->compute_major, (int)device->compute_major,
                           (int)device->compute_minor);
    }
    return status;
}

static int32_t kmla_i_reader_step_tokens(int32_t kv_format) {
    return kv_format == KMLA_KV_BF16 ? KMLA_I_STEP_TOKENS : KMLA_I_FP8_STEP_TOKENS;
}

// Shared memory of a reader block, in the order in which reader.cuh lays it out.
static int32_t kmla_i_reader_shared_bytes(int32_t kv_format, int32_t tile) {
    int32_t packed = kv_format == KMLA_KV_PACKED;
    int32_t bf16 = kv_format == KMLA_KV_BF16;
    int32_t pitch = packed ? KMLA_I_PITCH_PACKED : bf16 ? KMLA_I_PITCH_BF16 : KMLA_I_PITCH_E4M3;
    int32_t step = kmla_i_reader_step_tokens(kv_format);
    int32_t records = KMLA_I_STAGES * step * pitch;
    int32_t units = tile / 8 * (step / 32); // of 16 tokens x 8 vectors: a half of the warps'
    int32_t exchange = 2 * units * (units > 4 ? 1 : 3) * 512;
    int32_t weights = tile * (step + 8) * 2 * (bf16 ? 2 : 1);
    int32_t ratios = packed ? step * 4 * 2 : 0;
    int32_t exponents = packed ? step * 4 : 0;
    int32_t copies = packed ? 32 * 32 : 0; // made ready
    int32_t small = KMLA_I_MISC_BYTES + tile * (16 + 4 + 8); // and ranges, factors, targets
    return small + records + exchange + weights + ratios + exponents + copies;
}

// Shared memory of a Hopper reader's block, as hopper.cuh lays it out, with a ring of `runs`.
static int32_t kmla_i_hopper_shared_bytes(int32_t kv_format, int32_t tile, int32_t runs) {
    int32_t packed = kv_format == KMLA_KV_PACKED;
    int32_t small = KMLA_I_HOPPER_MISC_BYTES + tile * (16 + 4 + 8);
    int32_t aligned = (small + 1023) / 1024 * 1024;
    int32_t query = tile * KMLA_QUERY_DIMS * 2;
    int32_t weights = 2 * tile * KMLA_I_HOPPER_STEP_TOKENS * 2;
    int32_t pitch = packed ? KMLA_I_PITCH_PACKED : KMLA_I_PITCH_E4M3;
    int32_t records = runs * KMLA_I_STEP_TOKENS * pitch;
    int32_t ratios = packed ? 2 * 4 * KMLA_I_HOPPER_STEP_TOKENS * 2 : 0;
    int32_t state = 7 * tile * 4;
    int32_t sums = KMLA_I_HOPPER_THREADS / 2 * (tile / 8) * 8;
    return aligned + query + weights + records + ratios + state + sums;
}

// The longest ring that fits.
static int32_t kmla_i_hopper_runs(const kmla_device* device, int32_t kv_format, int32_t tile) {
    int32_t runs = KMLA_I_HOPPER_MOST_RUNS;
    while (runs > KMLA_I_HOPPER_LEAST_RUNS &&
           kmla_i_hopper_shared_bytes(kv_format, tile, runs) > device->shared_bytes) {
        --runs;
    }
    return runs;
}

// Reader blocks that an SM of the card holds at once: two where registers (never with BF16 KV or
// the largest tile) and shared memory allow it.
static int32_t kmla_i_resident_blocks(const kmla_device* device, int32_t kv_format, int32_t tile) {
    int32_t block_bytes = kmla_i_reader_shared_bytes(kv_format, tile) +
                          KMLA_I_BLOCK_RESERVED_BYTES;
    int registers = kv_format != KMLA_KV_BF16 && tile <= 16;
    return registers && device->shared_bytes_sm / block_bytes >= 2 ? 2 : 1;
}

// Rows whose vectors one group of blocks reads together, with one walk over their KV.
static int32_t kmla_i_rows_per_group(const kmla_shape* shape) {
    return shape->slot_list ? 1 : shape->rows_per_request;
}

static void kmla_i_set_tile(kmla_plan* plan, int32_t tile) {
    int32_t kv_format = plan->shape.kv_format;
    plan->tile = tile;
    plan->threads = KMLA_I_READER_THREADS;
    plan->tiles_per_request = (int32_t)kmla_i_ceil_div(
        (int64_t)kmla_i_rows_per_group(&plan->shape) * plan->shape.heads, tile);
    if (plan->reader == KMLA_READER_HOPPER) {
        plan->resident = 1;
        plan->threads = KMLA_I_HOPPER_THREADS;
        plan->stages = kmla_i_hopper_runs(&plan->device, kv_format, tile);
        plan->shared_bytes = kmla_i_hopper_shared_bytes(kv_format, tile, plan->stages);
    } else if (plan->reader == KMLA_READER_PORTABLE) {
        plan->resident = kmla_i_resident_blocks(&plan->device, kv_format, tile);
        plan->stages = KMLA_I_STAGES;
        plan->shared_bytes = kmla_i_reader_shared_bytes(kv_format, tile);
    }
}

// ---- The cost model of tiles and splits. Figures as in kmla_i_tiles.

#define KMLA_I_COST_MERGE_US 0.5            // the merge, and what it takes for each split
#define KMLA_I_COST_MERGE_SPLIT_US 0.12
#define KMLA_I_COST_BYTES_PER_US 3.0e6      // partials, written and read back: 3 TB/s
#define KMLA_I_COST_READ_BYTES_PER_US 3.6e6 // records, read by all blocks together

static int64_t kmla_i_reader_blocks(const kmla_plan* plan, int32_t splits) {
    return (int64_t)plan->tiles_per_request * plan->groups * splits;
}

static int64_t kmla_i_waves(const kmla_plan* plan) {
    int64_t at_once = (int64_t)plan->device.multiprocessors * plan->resident;
    return kmla_i_ceil_div(kmla_i_reader_blocks(plan, plan->splits), at_once);
}

// Steps that a block's share of chunks takes.
static double kmla_i_steps(const kmla_plan* plan, int64_t chunks) {
    int32_t tokens = plan->reader == KMLA_READER_HOPPER
                         ? KMLA_I_HOPPER_STEP_TOKENS
                         : kmla_i_reader_step_tokens(plan->shape.kv_format);
    return (double)(chunks * (KMLA_CHUNK_TOKENS / tokens));
}

// Blocks of the last wave have SMs to themselves if there are few of them.
static double kmla_i_block_us(const kmla_plan* plan, int32_t splits, int64_t blocks) {
    const kmla_i_tile_cost* cost = kmla_i_find_tile(plan->reader, plan->tile);
    double steps = kmla_i_steps(plan, kmla_i_ceil_div(plan->chunks, splits));
    int shared = plan->resident > 1 && blocks > plan->device.multiprocessors;
    return cost->block_us + steps * (shared ? cost->shared_us : cost->alone_us);
}

static double kmla_i_reader_us(const kmla_plan* plan, int32_t splits) {
    int64_t at_once = (int64_t)plan->device.multiprocessors * plan->resident;
    int64_t blocks = kmla_i_reader_blocks(plan, splits);
    int64_t last = blocks % at_once, whole = blocks / at_once;
    double us = (double)whole * kmla_i_block_us(plan, splits, at_once) +
                (last ? kmla_i_block_us(plan, splits, last) : 0.0);
    double bytes = (double)plan->groups * (double)plan->chunks * KMLA_CHUNK_TOKENS *
                   (double)kmla_kv_record_bytes(plan->shape.kv_format);
    double read_us = kmla_i_find_tile(plan->reader, plan->tile)->block_us +
                     bytes / KMLA_I_COST_READ_BYTES_PER_US;
    return us > read_us ? us : read_us;
}

static double kmla_i_merge_us(const kmla_plan* plan, int32_t splits) {
    if (splits == 1) {
        return 0.0;
    }
    double vectors = (double)plan->shape.rows * plan->shape.heads;
    double vector_bytes = KMLA_LATENT_DIMS * kmla_i_element_bytes(plan->shape.partial_type);
    double traffic_bytes = 2.0 * splits * vectors * vector_bytes;
    return KMLA_I_COST_MERGE_US + splits * KMLA_I_COST_MERGE_SPLIT_US +
           traffic_bytes / KMLA_I_COST_BYTES_PER_US;
}

static double kmla_i_decode_us(const kmla_plan* plan, int32_t splits) {
    return kmla_i_reader_us(plan, splits) + kmla_i_merge_us(plan, splits);
}

// The count of splits with the least estimated time; the smaller one of equals.
static int32_t kmla_i_choose_splits(const kmla_plan* plan) {
    int32_t most = (int32_t)kmla_i_min(plan->chunks, KMLA_MAX_SPLITS);
    int32_t best = 1;
    for (int32_t splits = 2; splits <= most; ++splits) {
        if (kmla_i_decode_us(plan, splits) < kmla_i_decode_us(plan, best)) {
            best = splits;
        }
    }
    return best;
}

// Sets tile and splits, of which the caller may have given either: of all that fit the card, those
// with the least estimated time; the smaller tile of equals.
static kmla_status kmla_i_choose_tile_and_splits(kmla_plan* plan, kmla_error* error) {
    const kmla_shape* shape = &plan->shape;
    kmla_plan tried = *plan;
    double best_us = 0.0;
    int32_t least_bytes = 0;
    plan->tile = 0;
    for (int32_t i = 0; i < KMLA_I_TILES; ++i) {
        if (kmla_i_tiles[i].reader != plan->reader ||
            (shape->tile && shape->tile != kmla_i_tiles[i].tile)) {
            continue;
        }
        kmla_i_set_tile(&tried, kmla_i_tiles[i].tile);
        if (least_bytes == 0 || tried.shared_bytes < least_bytes) {
            least_bytes = tried.shared_bytes;
        }
        if (tried.shared_bytes > plan->device.shared_bytes) {
            continue;
        }
        tried.splits = shape->splits ? shape->splits : kmla_i_choose_splits(&tried);
        double us = kmla_i_decode_us(&tried, tried.splits);
        if (plan->tile == 0 || us < best_us) {
            best_us = us;
            *plan = tried;
        }
    }
    if (least_bytes == 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "shape.tile is %d, which shape.reader %d lacks", (int)shape->tile,
                           (int)plan->reader);
    }
    if (plan->tile == 0) {
        return kmla_i_fail(error, KMLA_ERROR_UNSUPPORTED,
                           "device.shared_bytes is %d; a block needs at least %d",
                           (int)plan->device.shared_bytes, (int)least_bytes);
    }
    return KMLA_OK;
}

// The reader of a shape on a card: the caller's, else the fastest that takes it.
static kmla_status kmla_i_choose_reader(kmla_plan* plan, kmla_error* error) {
    const kmla_shape* shape = &plan->shape;
    int32_t least_bytes =
        kmla_i_hopper_shared_bytes(shape->kv_format, 8, KMLA_I_HOPPER_LEAST_RUNS);
    int hopper = plan->device.compute_major == 9 && plan->device.compute_minor == 0 &&
                 shape->kv_format != KMLA_KV_BF16 && plan->device.shared_bytes >= least_bytes;
    if (shape->reader == KMLA_READER_HOPPER && !hopper) {
        return kmla_i_fail(error, KMLA_ERROR_UNSUPPORTED,
                           "shape.reader asks for the Hopper reader, which takes FP8 KV on compute "
                           "capability 9.0; this is KV format %d on %d.%d, whose "
                           "device.shared_bytes is %d; a block needs at least %d",
                           (int)shape->kv_format, (int)plan->device.compute_major,
                           (int)plan->device.compute_minor, (int)plan->device.shared_bytes,
                           (int)least_bytes);
    }
    plan->reader = shape->reader  ? shape->reader
                   : hopper       ? KMLA_READER_HOPPER
                                  : KMLA_READER_PORTABLE;
    return KMLA_OK;
}

static void kmla_i_write_reason(kmla_plan* plan) {
    char timing[96] = "host reader";
    if (plan->reader != KMLA_READER_HOST) {
        long long tenths_us = (long long)(kmla_i_decode_us(plan, plan->splits) * 10.0 + 0.5);
        long long waves = (long long)kmla_i_waves(plan);
        snprintf(timing, sizeof timing, "%lld blocks on %d SMs in %lld wave%s, est. %lld.%d us",
                 (long long)kmla_i_reader_blocks(plan, plan->splits),
                 (int)plan->device.multiprocessors, waves, waves == 1 ? "" : "s", tenths_us / 10,
                 (int)(tenths_us % 10));
    }
    snprintf(plan->reason, sizeof plan->reason,
             "%s, tile %d (%s): %lld vectors are %d tiles, x %d; splits %d (%s): %s",
             plan->reader == KMLA_READER_HOPPER ? "Hopper" : "portable", (int)plan->tile,
             plan->shape.tile ? "caller" : "planner",
             (long long)kmla_i_rows_per_group(&plan->shape) * plan->shape.heads,
             (int)plan->tiles_per_request, (int)plan->groups, (int)plan->splits,
             plan->shape.splits ? "caller" : "planner", timing);
}

KMLA_API kmla_status kmla_plan_decode(const kmla_shape* shape, const kmla_device* device,
                                      kmla_plan* plan, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("shape", shape, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("plan", plan, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    kmla_plan made; // the caller's plan is written only when all is well
    memset(&made, 0, sizeof made);
    made.version = KMLA_VERSION;
    made.shape = kmla_i_full_shape(shape);
    status = kmla_i_check_shape(&made.shape, error);
    if (status != KMLA_OK) {
        return status;
    }
    made.groups = made.shape.slot_list ? made.shape.rows : made.shape.requests;
    made.chunks = (int32_t)kmla_i_ceil_div(made.shape.capacity_tokens, KMLA_CHUNK_TOKENS);
    made.splits_chosen_by = made.shape.splits ? KMLA_CHOSEN_BY_CALLER : KMLA_CHOSEN_BY_PLANNER;
    if (kmla_i_no_device(device)) {
        made.reader = KMLA_READER_HOST;
        made.splits = made.shape.splits ? made.shape.splits : 1;
        kmla_i_set_tile(&made, made.shape.tile ? made.shape.tile : 8);
    } else {
        made.device = *device;
        status = kmla_i_check_device(&made.device, error);
        if (status == KMLA_OK) {
            status = kmla_i_choose_reader(&made, error);
        }
        if (status == KMLA_OK) {
            status = kmla_i_choose_tile_and_splits(&made, error);
        }
    }
    if (status != KMLA_OK) {
        return status;
    }
    made.chunks_per_split = (int32_t)kmla_i_ceil_div(made.chunks, made.splits);
    made.launches = made.reader == KMLA_READER_HOST ? 0 : made.splits > 1 ? 2 : 1;
    status = kmla_workspace_bytes(made.shape.rows, made.shape.heads, made.splits,
                                  made.shape.partial_type, &made.workspace_bytes, error);
    if (status != KMLA_OK) {
        return status;
    }
    kmla_i_write_reason(&made);
    made.shape.reader = made.reader;
    made.shape.tile = made.tile;
    made.shape.splits = made.splits;
    *plan = made;
    return KMLA_OK;
}

#ifndef KIMI_MLA_NO_GPU
KMLA_API int32_t kmla_plan_variant(const kmla_plan* plan) {
    return plan ? plan->reader * 10000 + plan->shape.kv_format * 1000 + plan->tile : 0;
}
#endif

// 1 if plan a takes less than plan b.
static int kmla_i_is_smaller_plan(const kmla_plan* a, const kmla_plan* b) {
    if (a->shape.rows != b->shape.rows) {
        return a->shape.rows < b->shape.rows;
    }
    if (a->shape.requests != b->shape.requests) {
        return a->shape.requests < b->shape.requests;
    }
    return a->shape.capacity_tokens < b->shape.capacity_tokens;
}

KMLA_API kmla_status kmla_pick_plan(const kmla_plan* const* plans, int32_t count, int32_t requests,
                                    int32_t rows, int64_t tokens, int32_t* index,
                                    kmla_error* error) {
    const kmla_i_limit limits[] = {
        {"count", count, 1, INT32_MAX},
        {"requests", requests, 0, KMLA_MAX_ROWS},
        {"rows", rows, 0, KMLA_MAX_ROWS},
        {"tokens", tokens, 0, KMLA_MAX_CAPACITY_TOKENS},
    };
    kmla_status status = kmla_i_check_pointer("plans", plans, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("index", index, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    }
    int32_t best = -1;
    for (int32_t i = 0; status == KMLA_OK && i < count; ++i) {
        status = kmla_i_check_pointer("plans[i]", plans[i], error);
        if (status == KMLA_OK && plans[i]->shape.requests >= requests &&
            plans[i]->shape.rows >= rows && plans[i]->shape.capacity_tokens >= tokens &&
            (best < 0 || kmla_i_is_smaller_plan(plans[i], plans[best]))) {
            best = i;
        }
    }
    if (status == KMLA_OK && best < 0) {
        status = kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                             "none of %d plans covers %d requests, %d rows and %lld tokens",
                             (int)count, (int)requests, (int)rows, (long long)tokens);
    }
    if (status == KMLA_OK) {
        *index = best;
    }
    return status;
}

// =============================================================================
// >>planning   Implementation: what DCP ranks send each other
// =============================================================================

// An array [stored heads][R] of units, which lie row_stride apart in what its strides count.
static kmla_slices kmla_i_slices(const kmla_gather* g, int64_t unit_bytes, int64_t row_stride) {
    const int64_t head_bytes = g->desc.rows * unit_bytes;
    kmla_slices slices;
    slices.head_stride = g->desc.rows * row_stride;
    slices.row_stride = row_stride;
    slices.offset_bytes = (uint64_t)(g->first_head * head_bytes);
    slices.slice_bytes = (uint64_t)(g->slice_heads * head_bytes);
    slices.bytes = (uint64_t)(g->desc.stored_heads * head_bytes);
    return slices;
}

KMLA_API kmla_status kmla_plan_gather(const kmla_gather_desc* desc, kmla_gather* out,
                                      kmla_error* error) {
    kmla_gather made;
    kmla_status status = kmla_i_check_pointer("desc", desc, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("out", out, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    memset(&made, 0, sizeof made);
    made.desc = *desc;
    made.desc.ranks = (int32_t)kmla_i_default(desc->ranks, 1);
    const kmla_i_limit limits[] = {
        {"desc.heads", desc->heads, 1, KMLA_MAX_HEADS},
        {"desc.ranks", made.desc.ranks, 1, KMLA_MAX_SPLITS}, // as many as a combine has parts
        {"desc.rank", desc->rank, 0, (int64_t)made.desc.ranks - 1},
        {"desc.rows", desc->rows, 1, KMLA_MAX_ROWS},
        {"desc.query_format", desc->query_format, 0, KMLA_QUERY_E4M3},
        {"desc.out_type", desc->out_type, 0, KMLA_FP32},
        {"desc.equal_slices", desc->equal_slices, 0, 1},
    };
    status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status != KMLA_OK) {
        return status;
    }
    const int32_t ranks = made.desc.ranks;
    const int32_t share = desc->heads / ranks, longer = desc->heads % ranks;
    const int32_t widest = share + (longer > 0);
    made.exchanges = ranks > 1;
    made.local_heads = share + (desc->rank < longer);
    made.slice_heads = desc->equal_slices ? widest : made.local_heads;
    made.first_head = desc->equal_slices
                          ? desc->rank * widest
                          : desc->rank * share + (int32_t)kmla_i_min(desc->rank, longer);
    made.gathered_heads = desc->equal_slices ? ranks * widest : desc->heads;
    made.desc.stored_heads = (int32_t)kmla_i_default(desc->stored_heads, made.gathered_heads);
    const kmla_i_limit stored[] = {
        {"gathered heads (desc.equal_slices)", made.gathered_heads, 1, KMLA_MAX_HEADS},
        {"desc.stored_heads", made.desc.stored_heads, made.gathered_heads, KMLA_MAX_HEADS},
    };
    status = kmla_i_check_limits(stored, KMLA_I_COUNT(stored), error);
    if (status != KMLA_OK) {
        return status;
    }
    const int64_t record_bytes = (int64_t)kmla_query_record_bytes(desc->query_format);
    made.query = kmla_i_slices(&made, record_bytes, record_bytes);
    made.out = kmla_i_slices(&made, KMLA_LATENT_DIMS * kmla_i_element_bytes(desc->out_type),
                             KMLA_LATENT_DIMS);
    made.lse = kmla_i_slices(&made, sizeof(float), 1);
    *out = made;
    return KMLA_OK;
}

// =============================================================================
// >>arguments   Implementation: what checks of arguments are made of
// =============================================================================

#define KMLA_I_RECORD_ALIGNMENT 16        // of records, payloads and their strides, in bytes
#define KMLA_I_MAX_EXTENT (INT64_MAX / 4) // bytes: so that sums of a few extents do not overflow

typedef struct kmla_i_address {
    const char* name;
    uint64_t value, alignment;
    int32_t required; // else 0 is fine
} kmla_i_address;

static kmla_status kmla_i_check_addresses(const kmla_i_address* addresses, int32_t count,
                                          kmla_error* error) {
    for (int32_t i = 0; i < count; ++i) {
        const kmla_i_address* a = &addresses[i];
        if (a->required && a->value == 0) {
            return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is 0", a->name);
        }
        if (a->value % a->alignment != 0) {
            return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is 0x%llx, no multiple of %llu",
                               a->name, (unsigned long long)a->value,
                               (unsigned long long)a->alignment);
        }
    }
    return KMLA_OK;
}

// A stride with its default filled in. List a dimension after those inside it: defaults are
// made of the inner strides, so a wrong one is found before what was computed from it.
typedef struct kmla_i_stride {
    const char* name;
    int64_t value, count;     // of how many elements apart, how many times
    int64_t unit_bytes;       // of one element
    int64_t alignment;        // in bytes
} kmla_i_stride;

static kmla_status kmla_i_check_strides(const kmla_i_stride* strides, int32_t count,
                                        kmla_error* error) {
    for (int32_t i = 0; i < count; ++i) {
        const kmla_i_stride* s = &strides[i];
        if (s->value < 1) {
            return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is %lld; it is to be positive",
                               s->name, (long long)s->value);
        }
        int64_t bytes = kmla_i_multiply(s->value, s->unit_bytes);
        if (kmla_i_multiply(bytes, s->count) > KMLA_I_MAX_EXTENT) {
            return kmla_i_fail(error, KMLA_ERROR_OVERFLOW, "%s is %lld; %lld times it is too far",
                               s->name, (long long)s->value, (long long)s->count);
        }
        if (bytes % s->alignment != 0) {
            return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                               "%s is %lld, that is %lld bytes, no multiple of %lld", s->name,
                               (long long)s->value, (long long)bytes, (long long)s->alignment);
        }
    }
    return KMLA_OK;
}

// What an output has of two dimensions, `inner` elements each, is to lie apart. Either dimension
// may be the outer one. Both strides are checked already.
static kmla_status kmla_i_check_apart(const kmla_i_stride* a, const kmla_i_stride* b, int64_t inner,
                                      kmla_error* error) {
    int a_inside_b = a->value >= inner && b->value >= (a->count - 1) * a->value + inner;
    int b_inside_a = b->value >= inner && a->value >= (b->count - 1) * b->value + inner;
    if (a_inside_b || b_inside_a) {
        return KMLA_OK;
    }
    return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                       "%s is %lld (%lld times) and %s is %lld (%lld times): outputs of %lld "
                       "would overlap",
                       a->name, (long long)a->value, (long long)a->count, b->name,
                       (long long)b->value, (long long)b->count, (long long)inner);
}

static kmla_status kmla_i_check_scale(const char* name, float value, kmla_error* error) {
    if (value > 0.0f && value <= FLT_MAX) {
        return KMLA_OK;
    }
    return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is %g; finite and positive is allowed", name,
                       (double)value);
}

// The KV pool of the reader and of the writer. page_pitch_bytes has its default filled in.
static kmla_status kmla_i_check_pool(uint64_t kv, uint64_t kv_pages, uint64_t page_pitch_bytes,
                                     int32_t page_tokens, int32_t kv_format, kmla_error* error) {
    uint64_t least = (uint64_t)page_tokens * kmla_kv_record_bytes(kv_format);
    if (kv_pages == 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "args.kv_pages is 0; 1 is the least");
    }
    if (page_pitch_bytes < least || page_pitch_bytes % KMLA_I_RECORD_ALIGNMENT != 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "args.page_pitch_bytes is %llu; multiples of %d from %llu on are fine",
                           (unsigned long long)page_pitch_bytes, KMLA_I_RECORD_ALIGNMENT,
                           (unsigned long long)least);
    }
    if (kv_pages > (uint64_t)KMLA_I_MAX_EXTENT / page_pitch_bytes ||
        kv > UINT64_MAX - kv_pages * page_pitch_bytes) {
        return kmla_i_fail(error, KMLA_ERROR_OVERFLOW,
                           "args.kv_pages is %llu; so many pages of args.page_pitch_bytes, %llu, "
                           "do not fit 64 bits",
                           (unsigned long long)kv_pages, (unsigned long long)page_pitch_bytes);
    }
    return KMLA_OK;
}

// An output [rows][heads][512] and its optional lse [rows][heads]: the decode's and the combine's.
typedef struct kmla_i_output {
    uint64_t out, lse;
    int64_t rows, row_stride, lse_row_stride;
    int64_t heads, head_stride, lse_head_stride;
    int32_t out_type;
} kmla_i_output;

static kmla_status kmla_i_check_output(const kmla_i_output* o, kmla_error* error) {
    const kmla_i_limit limit = {"args.out_type", o->out_type, 0, KMLA_FP32};
    const kmla_i_address addresses[] = {
        {"args.out", o->out, KMLA_I_RECORD_ALIGNMENT, 1},
        {"args.lse", o->lse, 4, 0},
    };
    int32_t unit = kmla_i_element_bytes(o->out_type);
    const kmla_i_stride strides[] = {
        {"args.out_head_stride", o->head_stride, o->heads, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.out_row_stride", o->row_stride, o->rows, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.lse_head_stride", o->lse_head_stride, o->heads, 4, 4},
        {"args.lse_row_stride", o->lse_row_stride, o->rows, 4, 4},
    };
    kmla_status status = kmla_i_check_limits(&limit, 1, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_addresses(addresses, KMLA_I_COUNT(addresses), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_strides(strides, KMLA_I_COUNT(strides), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_apart(&strides[0], &strides[1], KMLA_LATENT_DIMS, error);
    }
    if (status == KMLA_OK && o->lse) {
        status = kmla_i_check_apart(&strides[2], &strides[3], 1, error);
    }
    return status;
}

// =============================================================================
// >>arguments   Implementation: decode
// =============================================================================

static kmla_status kmla_i_check_whole_plan(const kmla_plan* plan, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("plan", plan, error);
    if (status != KMLA_OK) {
        return status;
    }
    if (plan->version != KMLA_VERSION) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "plan.version is %d, this header's is %d; make it by kmla_plan_decode",
                           (int)plan->version, KMLA_VERSION);
    }
    const kmla_i_limit limits[] = {
        {"plan.reader", plan->reader, 0, KMLA_READER_HOPPER},
        {"plan.tile", plan->tile, 8, KMLA_I_MOST_TILE},
        {"plan.tiles_per_request", plan->tiles_per_request, 1, INT32_MAX},
        {"plan.groups", plan->groups, 1, KMLA_MAX_ROWS},
        {"plan.splits", plan->splits, 1, KMLA_MAX_SPLITS},
        {"plan.chunks_per_split", plan->chunks_per_split, 1, INT32_MAX},
    };
    status = kmla_i_check_shape(&plan->shape, error);
    return status != KMLA_OK ? status
                             : kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
}

// The arguments with every default filled in. Safe before the arguments are checked.
static kmla_decode kmla_i_dense_decode(const kmla_plan* plan, const kmla_decode* args) {
    const kmla_shape* shape = &plan->shape;
    kmla_decode d = *args;
    int64_t query_bytes = (int64_t)kmla_query_record_bytes(shape->query_format);
    uint64_t page_bytes = (uint64_t)shape->page_tokens * kmla_kv_record_bytes(shape->kv_format);
    d.query_head_stride_bytes = kmla_i_default(d.query_head_stride_bytes, query_bytes);
    d.query_row_stride_bytes = kmla_i_default(
        d.query_row_stride_bytes, kmla_i_multiply(shape->heads, d.query_head_stride_bytes));
    d.page_pitch_bytes = d.page_pitch_bytes ? d.page_pitch_bytes : page_bytes;
    d.block_table_stride = kmla_i_default(d.block_table_stride, d.block_table_width);
    d.slot_list_stride = kmla_i_default(d.slot_list_stride, d.slot_list_width);
    d.out_head_stride = kmla_i_default(d.out_head_stride, KMLA_LATENT_DIMS);
    d.out_row_stride =
        kmla_i_default(d.out_row_stride, kmla_i_multiply(shape->heads, d.out_head_stride));
    d.lse_head_stride = kmla_i_default(d.lse_head_stride, 1);
    d.lse_row_stride =
        kmla_i_default(d.lse_row_stride, kmla_i_multiply(shape->heads, d.lse_head_stride));
    return d;
}

// Block table or slot list, and row offsets. `d` has its defaults filled in.
static kmla_status kmla_i_check_tables(const kmla_shape* shape, const kmla_decode* d,
                                       kmla_error* error) {
    if (shape->slot_list ? d->block_table : d->slot_list) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "args.%s is given; shape.slot_list is %d",
                           shape->slot_list ? "block_table" : "slot_list", (int)shape->slot_list);
    }
    if (d->row_offsets && !shape->ragged) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "args.row_offsets is given, but shape.ragged is 0");
    }
    const kmla_i_address addresses[] = {
        {"args.block_table", d->block_table, 4, !shape->slot_list},
        {"args.slot_list", d->slot_list, 4, shape->slot_list},
        {"args.row_offsets", d->row_offsets, 4, shape->ragged},
        {"args.lengths", d->lengths, 4, 1},
    };
    kmla_status status = kmla_i_check_addresses(addresses, KMLA_I_COUNT(addresses), error);
    if (status != KMLA_OK) {
        return status;
    }
    int64_t pages = kmla_i_ceil_div(shape->capacity_tokens, shape->page_tokens);
    const kmla_i_limit block_width = {"args.block_table_width", d->block_table_width, pages,
                                      KMLA_I_MAX_EXTENT};
    const kmla_i_limit slot_width = {"args.slot_list_width", d->slot_list_width,
                                     shape->capacity_tokens, KMLA_I_MAX_EXTENT};
    const kmla_i_stride block_stride = {"args.block_table_stride", d->block_table_stride,
                                        shape->requests, 4, 4};
    const kmla_i_stride slot_stride = {"args.slot_list_stride", d->slot_list_stride, shape->rows, 4,
                                       4};
    status = kmla_i_check_limits(shape->slot_list ? &slot_width : &block_width, 1, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_strides(shape->slot_list ? &slot_stride : &block_stride, 1, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    // The numbers in a table are int32, so no table can name more pages or slots than this.
    uint64_t per_page = shape->slot_list ? (uint64_t)shape->page_tokens : 1;
    uint64_t most_pages = ((uint64_t)1 << 31) / per_page;
    if (d->kv_pages > most_pages) {
        return kmla_i_fail(error, KMLA_ERROR_OVERFLOW,
                           "args.kv_pages is %llu; an int32 table can name %llu",
                           (unsigned long long)d->kv_pages, (unsigned long long)most_pages);
    }
    return KMLA_OK;
}

static kmla_status kmla_i_check_workspace(const kmla_plan* plan, const kmla_decode* args,
                                          kmla_error* error) {
    uint64_t need = 0;
    kmla_status status = kmla_workspace_bytes(plan->shape.rows, plan->shape.heads, plan->splits,
                                              plan->shape.partial_type, &need, error);
    if (status != KMLA_OK || need == 0) {
        return status;
    }
    if (args->workspace == 0 || args->workspace_bytes < need) {
        return kmla_i_fail(error, KMLA_ERROR_WORKSPACE,
                           "args.workspace is 0x%llx and args.workspace_bytes is %llu; %d splits "
                           "need %llu bytes",
                           (unsigned long long)args->workspace,
                           (unsigned long long)args->workspace_bytes, (int)plan->splits,
                           (unsigned long long)need);
    }
    const kmla_i_address address = {"args.workspace", args->workspace, KMLA_I_RECORD_ALIGNMENT, 1};
    return kmla_i_check_addresses(&address, 1, error);
}

// As kmla_check_decode; on success `dense` holds the arguments with their defaults filled in.
static kmla_status kmla_i_check_decode(const kmla_plan* plan, const kmla_decode* args,
                                       kmla_decode* dense, kmla_error* error) {
    kmla_status status = kmla_i_check_whole_plan(plan, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("args", args, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_shape* shape = &plan->shape;
    *dense = kmla_i_dense_decode(plan, args);
    const kmla_i_limit limits[] = {
        {"args.check_pages", dense->check_pages, 0, 1},
        {"args.lse_unused_", dense->lse_unused_, 0, 0},
    };
    const kmla_i_address addresses[] = {
        {"args.query", dense->query, KMLA_I_RECORD_ALIGNMENT, 1},
        {"args.kv", dense->kv, KMLA_I_RECORD_ALIGNMENT, 1},
    };
    const kmla_i_stride strides[] = {
        {"args.query_head_stride_bytes", dense->query_head_stride_bytes, shape->heads, 1,
         KMLA_I_RECORD_ALIGNMENT},
        {"args.query_row_stride_bytes", dense->query_row_stride_bytes, shape->rows, 1,
         KMLA_I_RECORD_ALIGNMENT},
    };
    const kmla_i_output output = {dense->out,             dense->lse,             shape->rows,
                                  dense->out_row_stride,  dense->lse_row_stride,  shape->heads,
                                  dense->out_head_stride, dense->lse_head_stride, dense->out_type};
    status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK) {
        status = kmla_i_check_scale("args.scale", dense->scale, error);
    }
    if (status == KMLA_OK && shape->query_format == KMLA_QUERY_E4M3) {
        status = kmla_i_check_scale("args.query_scale", dense->query_scale, error);
    }
    if (status == KMLA_OK && shape->kv_format == KMLA_KV_E4M3) {
        status = kmla_i_check_scale("args.kv_scale", dense->kv_scale, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_addresses(addresses, KMLA_I_COUNT(addresses), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_strides(strides, KMLA_I_COUNT(strides), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_pool(dense->kv, dense->kv_pages, dense->page_pitch_bytes,
                                   shape->page_tokens, shape->kv_format, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_tables(shape, dense, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_output(&output, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_workspace(plan, dense, error);
    }
    return status;
}

KMLA_API kmla_status kmla_check_decode(const kmla_plan* plan, const kmla_decode* args,
                                       kmla_error* error) {
    kmla_decode dense;
    return kmla_i_check_decode(plan, args, &dense, error);
}

// =============================================================================
// >>arguments   Implementation: combine and writers
// =============================================================================

static kmla_combine kmla_i_dense_combine(const kmla_combine* args) {
    kmla_combine c = *args;
    c.part_head_stride = kmla_i_default(c.part_head_stride, KMLA_LATENT_DIMS);
    c.part_row_stride =
        kmla_i_default(c.part_row_stride, kmla_i_multiply(c.heads, c.part_head_stride));
    c.part_out_stride =
        kmla_i_default(c.part_out_stride, kmla_i_multiply(c.rows, c.part_row_stride));
    c.part_lse_head_stride = kmla_i_default(c.part_lse_head_stride, 1);
    c.part_lse_row_stride =
        kmla_i_default(c.part_lse_row_stride, kmla_i_multiply(c.heads, c.part_lse_head_stride));
    c.part_lse_stride =
        kmla_i_default(c.part_lse_stride, kmla_i_multiply(c.rows, c.part_lse_row_stride));
    c.out_head_stride = kmla_i_default(c.out_head_stride, KMLA_LATENT_DIMS);
    c.out_row_stride =
        kmla_i_default(c.out_row_stride, kmla_i_multiply(c.heads, c.out_head_stride));
    c.lse_head_stride = kmla_i_default(c.lse_head_stride, 1);
    c.lse_row_stride =
        kmla_i_default(c.lse_row_stride, kmla_i_multiply(c.heads, c.lse_head_stride));
    return c;
}

KMLA_API kmla_status kmla_check_combine(const kmla_combine* args, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("args", args, error);
    if (status != KMLA_OK) {
        return status;
    }
    kmla_combine c = kmla_i_dense_combine(args);
    const kmla_i_limit limits[] = {
        {"args.parts", c.parts, 1, KMLA_MAX_SPLITS},
        {"args.rows", c.rows, 1, KMLA_MAX_ROWS},
        {"args.heads", c.heads, 1, KMLA_MAX_HEADS},
        {"args.part_type", c.part_type, 0, KMLA_FP32},
        {"args.share", c.share, 0, c.parts},
    };
    const kmla_i_address addresses[] = {
        {"args.part_out", c.part_out, KMLA_I_RECORD_ALIGNMENT, 1},
        {"args.part_lse", c.part_lse, 4, 1},
    };
    int32_t unit = kmla_i_element_bytes(c.part_type);
    const kmla_i_stride strides[] = {
        {"args.part_head_stride", c.part_head_stride, c.heads, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.part_row_stride", c.part_row_stride, c.rows, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.part_out_stride", c.part_out_stride, c.parts, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.part_lse_head_stride", c.part_lse_head_stride, c.heads, 4, 4},
        {"args.part_lse_row_stride", c.part_lse_row_stride, c.rows, 4, 4},
        {"args.part_lse_stride", c.part_lse_stride, c.parts, 4, 4},
    };
    const kmla_i_output output = {c.out,             c.lse,             c.rows,
                                  c.out_row_stride,  c.lse_row_stride,  c.heads,
                                  c.out_head_stride, c.lse_head_stride, c.out_type};
    status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK) {
        status = kmla_i_check_addresses(addresses, KMLA_I_COUNT(addresses), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_strides(strides, KMLA_I_COUNT(strides), error);
    }
    return status != KMLA_OK ? status : kmla_i_check_output(&output, error);
}

static kmla_kv_write kmla_i_dense_kv_write(const kmla_kv_write* args) {
    kmla_kv_write w = *args;
    w.page_tokens = (int32_t)kmla_i_default(w.page_tokens, 64);
    w.latent_stride = kmla_i_default(w.latent_stride, KMLA_LATENT_DIMS);
    w.rope_stride = kmla_i_default(w.rope_stride, KMLA_ROPE_DIMS);
    if (w.page_pitch_bytes == 0) {
        w.page_pitch_bytes = (uint64_t)w.page_tokens * kmla_kv_record_bytes(w.kv_format);
    }
    return w;
}

KMLA_API kmla_status kmla_check_kv_write(const kmla_kv_write* args, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("args", args, error);
    if (status != KMLA_OK) {
        return status;
    }
    kmla_kv_write w = kmla_i_dense_kv_write(args);
    const kmla_i_limit limits[] = {
        {"args.tokens", w.tokens, 1, INT32_MAX},
        {"args.kv_format", w.kv_format, 0, KMLA_KV_BF16},
        {"args.source_type", w.source_type, 0, KMLA_FP32},
        {"args.scale_rule", w.scale_rule, 0, KMLA_SCALE_POWER_OF_TWO},
        {"args.page_tokens", w.page_tokens, 1, INT32_MAX},
    };
    const kmla_i_address addresses[] = {
        {"args.latent", w.latent, KMLA_I_RECORD_ALIGNMENT, 1},
        {"args.rope", w.rope, KMLA_I_RECORD_ALIGNMENT, 1},
        {"args.slots", w.slots, 8, 1},
        {"args.kv", w.kv, KMLA_I_RECORD_ALIGNMENT, 1},
    };
    int32_t unit = kmla_i_element_bytes(w.source_type);
    const kmla_i_stride strides[] = {
        {"args.latent_stride", w.latent_stride, w.tokens, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.rope_stride", w.rope_stride, w.tokens, unit, KMLA_I_RECORD_ALIGNMENT},
    };
    status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK && w.kv_format == KMLA_KV_E4M3) {
        status = kmla_i_check_scale("args.kv_scale", w.kv_scale, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_addresses(addresses, KMLA_I_COUNT(addresses), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_strides(strides, KMLA_I_COUNT(strides), error);
    }
    return status != KMLA_OK ? status
                             : kmla_i_check_pool(w.kv, w.kv_pages, w.page_pitch_bytes,
                                                 w.page_tokens, w.kv_format, error);
}

static kmla_query_write kmla_i_dense_query_write(const kmla_query_write* args) {
    kmla_query_write w = *args;
    int64_t record_bytes = (int64_t)kmla_query_record_bytes(w.query_format);
    w.source_head_stride = kmla_i_default(w.source_head_stride, KMLA_QUERY_DIMS);
    w.source_row_stride =
        kmla_i_default(w.source_row_stride, kmla_i_multiply(w.heads, w.source_head_stride));
    w.query_head_stride_bytes = kmla_i_default(w.query_head_stride_bytes, record_bytes);
    w.query_row_stride_bytes = kmla_i_default(
        w.query_row_stride_bytes, kmla_i_multiply(w.heads, w.query_head_stride_bytes));
    return w;
}

KMLA_API kmla_status kmla_check_query_write(const kmla_query_write* args, kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("args", args, error);
    if (status != KMLA_OK) {
        return status;
    }
    kmla_query_write w = kmla_i_dense_query_write(args);
    const kmla_i_limit limits[] = {
        {"args.rows", w.rows, 1, KMLA_MAX_ROWS},
        {"args.heads", w.heads, 1, KMLA_MAX_HEADS},
        {"args.query_format", w.query_format, 0, KMLA_QUERY_E4M3},
        {"args.source_type", w.source_type, 0, KMLA_FP32},
        {"args.unused_", w.unused_, 0, 0},
    };
    const kmla_i_address addresses[] = {
        {"args.source", w.source, KMLA_I_RECORD_ALIGNMENT, 1},
        {"args.query", w.query, KMLA_I_RECORD_ALIGNMENT, 1},
    };
    int32_t unit = kmla_i_element_bytes(w.source_type);
    const kmla_i_stride strides[] = {
        {"args.source_head_stride", w.source_head_stride, w.heads, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.source_row_stride", w.source_row_stride, w.rows, unit, KMLA_I_RECORD_ALIGNMENT},
        {"args.query_head_stride_bytes", w.query_head_stride_bytes, w.heads, 1,
         KMLA_I_RECORD_ALIGNMENT},
        {"args.query_row_stride_bytes", w.query_row_stride_bytes, w.rows, 1,
         KMLA_I_RECORD_ALIGNMENT},
    };
    status = kmla_i_check_limits(limits, KMLA_I_COUNT(limits), error);
    if (status == KMLA_OK && w.query_format == KMLA_QUERY_E4M3) {
        status = kmla_i_check_scale("args.query_scale", w.query_scale, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_addresses(addresses, KMLA_I_COUNT(addresses), error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_strides(strides, KMLA_I_COUNT(strides), error);
    }
    int64_t record_bytes = (int64_t)kmla_query_record_bytes(w.query_format);
    return status != KMLA_OK ? status
                             : kmla_i_check_apart(&strides[2], &strides[3], record_bytes, error);
}

// =============================================================================
// >>arguments   Implementation: a gather's layout as arguments
// =============================================================================

static kmla_status kmla_i_check_gather(const kmla_gather* gather, const void* args,
                                       kmla_error* error) {
    kmla_status status = kmla_i_check_pointer("gather", gather, error);
    return status != KMLA_OK ? status : kmla_i_check_pointer("args", args, error);
}

static kmla_status kmla_i_check_own_heads(const kmla_gather* gather, kmla_error* error) {
    const kmla_i_limit limit = {"gather.local_heads", gather->local_heads, 1, KMLA_MAX_HEADS};
    return kmla_i_check_limits(&limit, 1, error);
}

KMLA_API kmla_status kmla_gather_write(const kmla_gather* gather, uint64_t query,
                                       kmla_query_write* args, kmla_error* error) {
    kmla_status status = kmla_i_check_gather(gather, args, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_own_heads(gather, error);
    }
    if (status == KMLA_OK) {
        args->rows = gather->desc.rows;
        args->heads = gather->local_heads;
        args->query_format = gather->desc.query_format;
        args->query = query + gather->query.offset_bytes;
        args->query_row_stride_bytes = gather->query.row_stride;
        args->query_head_stride_bytes = gather->query.head_stride;
    }
    return status;
}

KMLA_API kmla_status kmla_gather_decode(const kmla_gather* gather, uint64_t query, uint64_t out,
                                        uint64_t lse, kmla_decode* args, kmla_error* error) {
    kmla_status status = kmla_i_check_gather(gather, args, error);
    if (status == KMLA_OK) {
        args->query = query;
        args->query_row_stride_bytes = gather->query.row_stride;
        args->query_head_stride_bytes = gather->query.head_stride;
        args->out = out;
        args->out_row_stride = gather->out.row_stride;
        args->out_head_stride = gather->out.head_stride;
        args->out_type = gather->desc.out_type;
        args->lse = lse;
        args->lse_row_stride = gather->lse.row_stride;
        args->lse_head_stride = gather->lse.head_stride;
    }
    return status;
}

KMLA_API kmla_status kmla_gather_combine(const kmla_gather* gather, int32_t transport,
                                         uint64_t part_out, uint64_t part_lse, kmla_combine* args,
                                         kmla_error* error) {
    const kmla_i_limit limit = {"transport", transport, 0, KMLA_TRANSPORT_REDUCE_SCATTER};
    const int shares = transport == KMLA_TRANSPORT_REDUCE_SCATTER;
    kmla_status status = kmla_i_check_gather(gather, args, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_limits(&limit, 1, error);
    }
    if (status == KMLA_OK && !shares) {
        status = kmla_i_check_own_heads(gather, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    // Parts are whole arrays of all heads, or everybody's slices of this rank's.
    const int32_t part_heads = shares ? gather->desc.stored_heads : gather->slice_heads;
    args->parts = gather->desc.ranks;
    args->rows = gather->desc.rows;
    args->heads = shares ? gather->gathered_heads : gather->local_heads;
    args->part_type = gather->desc.out_type;
    args->share = shares ? gather->desc.rank + 1 : 0;
    args->part_out = part_out;
    args->part_out_stride = part_heads * gather->out.head_stride;
    args->part_row_stride = gather->out.row_stride;
    args->part_head_stride = gather->out.head_stride;
    args->part_lse = part_lse;
    args->part_lse_stride = part_heads * gather->lse.head_stride;
    args->part_lse_row_stride = gather->lse.row_stride;
    args->part_lse_head_stride = gather->lse.head_stride;
    if (shares) {
        args->out_type = gather->desc.out_type;
        args->out_row_stride = gather->out.row_stride;
        args->out_head_stride = gather->out.head_stride;
        args->lse_row_stride = gather->lse.row_stride;
        args->lse_head_stride = gather->lse.head_stride;
    }
    return KMLA_OK;
}

// =============================================================================
// >>arguments   Implementation: tables, in the checking mode
// =============================================================================

// Rows of a request, and where they begin. `row_offsets` is NULL for uniform rows.
static int32_t kmla_i_request_rows(const kmla_shape* shape, const int32_t* row_offsets,
                                   int32_t request, int32_t* first_row) {
    if (!shape->ragged) {
        *first_row = request * shape->rows_per_request;
        return shape->rows_per_request;
    }
    *first_row = row_offsets[request];
    return row_offsets[request + 1] - row_offsets[request];
}

// Tokens [begin, end) that a row sees, clamped to the capacity; a row's own length is clamped
// before the window is taken. `row` counts within its request's `rows`; `length` is what the
// length rule calls for.
static void kmla_i_visible_range(const kmla_shape* shape, int64_t length, int32_t rows,
                                 int32_t row, int64_t* begin, int64_t* end) {
    if (shape->lengths.lengths_kind == KMLA_LENGTHS_PER_ROW) {
        length = kmla_i_min(length, shape->capacity_tokens);
    }
    kmla_i_row_range(&shape->lengths, length, rows, row, begin, end);
    *end = kmla_i_min(*end, shape->capacity_tokens);
    *begin = kmla_i_min(*begin, *end);
}

static kmla_status kmla_i_check_row_offsets(const kmla_shape* shape, const int32_t* row_offsets,
                                            kmla_error* error) {
    const kmla_i_limit first = {"row_offsets[0]", row_offsets[0], 0, 0};
    kmla_status status = kmla_i_check_limits(&first, 1, error);
    for (int32_t i = 0; status == KMLA_OK && i < shape->requests; ++i) {
        int64_t step = (int64_t)row_offsets[i + 1] - row_offsets[i];
        if (step < 0 || step > shape->rows_per_request || row_offsets[i + 1] > shape->rows) {
            status = kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                                 "row_offsets[%d] is %d after %d; a request has 0..%d rows and "
                                 "all have %d",
                                 (int)i + 1, (int)row_offsets[i + 1], (int)row_offsets[i],
                                 (int)shape->rows_per_request, (int)shape->rows);
        }
    }
    return status;
}

// Every page that tokens [begin, end) lie in, by the block table's row of their request.
static kmla_status kmla_i_check_row_pages(const kmla_shape* shape, const kmla_decode* d,
                                          const int32_t* pages, int32_t row, int64_t begin,
                                          int64_t end, kmla_error* error) {
    int64_t size = shape->page_tokens;
    for (int64_t token = begin; token < end; token = (token / size + 1) * size) {
        int32_t page = pages[token / size];
        if (page < 0 || (uint64_t)page >= d->kv_pages) {
            return kmla_i_fail(error, KMLA_ERROR_PAGE,
                               "row %d, token %lld: page %d is outside the pool of %llu pages",
                               (int)row, (long long)token, (int)page,
                               (unsigned long long)d->kv_pages);
        }
    }
    return KMLA_OK;
}

// Every slot of tokens [begin, end), by the row's own slot list. -1 is no token.
static kmla_status kmla_i_check_row_slots(const kmla_shape* shape, const kmla_decode* d,
                                          const int32_t* slots, int32_t row, int64_t begin,
                                          int64_t end, kmla_error* error) {
    uint64_t pool_slots = d->kv_pages * (uint64_t)shape->page_tokens;
    for (int64_t token = begin; token < end; ++token) {
        int32_t slot = slots[token];
        if (slot < -1 || (slot >= 0 && (uint64_t)slot >= pool_slots)) {
            return kmla_i_fail(error, KMLA_ERROR_PAGE,
                               "row %d, token %lld: slot %d is outside the pool of %llu slots",
                               (int)row, (long long)token, (int)slot,
                               (unsigned long long)pool_slots);
        }
    }
    return KMLA_OK;
}

KMLA_API kmla_status kmla_check_pages(const kmla_plan* plan, const kmla_decode* args,
                                      const int32_t* table, const int32_t* lengths,
                                      const int32_t* row_offsets, kmla_error* error) {
    kmla_decode d;
    kmla_status status = kmla_i_check_decode(plan, args, &d, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("table", table, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_pointer("lengths", lengths, error);
    }
    if (status == KMLA_OK && plan->shape.ragged) {
        status = kmla_i_check_pointer("row_offsets", row_offsets, error);
        if (status == KMLA_OK) {
            status = kmla_i_check_row_offsets(&plan->shape, row_offsets, error);
        }
    }
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_shape* shape = &plan->shape;
    for (int32_t request = 0; request < shape->requests && status == KMLA_OK; ++request) {
        int32_t first_row;
        int32_t rows = kmla_i_request_rows(shape, row_offsets, request, &first_row);
        for (int32_t i = 0; i < rows && status == KMLA_OK; ++i) {
            int32_t row = first_row + i;
            int per_row = shape->lengths.lengths_kind == KMLA_LENGTHS_PER_ROW;
            int64_t begin, end;
            kmla_i_visible_range(shape, lengths[per_row ? row : request], rows, i, &begin, &end);
            status = shape->slot_list
                         ? kmla_i_check_row_slots(shape, &d, table + row * d.slot_list_stride, row,
                                                  begin, end, error)
                         : kmla_i_check_row_pages(shape, &d,
                                                  table + request * d.block_table_stride, row,
                                                  begin, end, error);
        }
    }
    return status;
}
// =============================================================================
// >>host   Host reader, merge, combine and writers
// =============================================================================

#define KMLA_I_HOST_VECTORS 8 // of a task: they share each decoded record, and take 52 KiB of stack
#define KMLA_I_HOST_LANES 16  // running sums of one score
#define KMLA_I_HOST_MOST_TASKS 0x7fffffff

// The byte at an address and offset, both 64 bits wide.
static uint8_t* kmla_i_at(uint64_t address, int64_t offset_bytes) {
    return (uint8_t*)(uintptr_t)(address + (uint64_t)offset_bytes);
}

static uint16_t kmla_i_load_bf16_bits(const uint8_t* from, int64_t index) {
    uint16_t bits;
    memcpy(&bits, from + index * 2, sizeof(bits));
    return bits;
}

static float kmla_i_load_bf16(const uint8_t* from, int64_t index) {
    return kmla_bf16_to_float(kmla_i_load_bf16_bits(from, index));
}

static float kmla_i_load_fp32(const uint8_t* from, int64_t index) {
    float value;
    memcpy(&value, from + index * 4, sizeof(value));
    return value;
}

// Elements of a plain array as fp32.
static void kmla_i_load_array(const uint8_t* from, int32_t type, int32_t count, float* values) {
    for (int32_t i = 0; i < count; i++) {
        values[i] = type == KMLA_FP32 ? kmla_i_load_fp32(from, i) : kmla_i_load_bf16(from, i);
    }
}

static void kmla_i_store_array(const float* values, int32_t type, int32_t count, uint8_t* to) {
    for (int32_t i = 0; i < count; i++) {
        if (type == KMLA_FP32) {
            memcpy(to + i * 4, &values[i], 4);
        } else {
            const uint16_t bits = kmla_float_to_bf16(values[i]);
            memcpy(to + i * 2, &bits, 2);
        }
    }
}

// Bits between the machine's order and the little-endian one of records: nothing to do on most.
static int kmla_i_big_endian(void) {
    const uint16_t one = 1;
    uint8_t first;
    memcpy(&first, &one, 1);
    return first == 0;
}

static uint16_t kmla_i_little16(uint16_t bits) {
    return kmla_i_big_endian() ? (uint16_t)(bits << 8 | bits >> 8) : bits;
}

static uint32_t kmla_i_little32(uint32_t bits) {
    return kmla_i_big_endian() ? (uint32_t)kmla_i_little16((uint16_t)bits) << 16 |
                                     kmla_i_little16((uint16_t)(bits >> 16))
                               : bits;
}

// BF16 of a record as fp32.
static void kmla_i_load_record_bf16(const uint8_t* from, int32_t count, float* values) {
    for (int32_t i = 0; i < count; i++) {
        values[i] = kmla_bf16_to_float(kmla_i_little16(kmla_i_load_bf16_bits(from, i)));
    }
}

// -----------------------------------------------------------------------------
// Writers. Byte for byte the device's: divisions, products and comparisons only, each rounded
// once, so that no compiler's contraction can change a bit.
// -----------------------------------------------------------------------------

// The largest magnitude of a group. NaN elements do not count (their codes are NaN whatever the
// scale); an infinite one counts as FLT_MAX, so that scales are finite and it saturates.
static float kmla_i_group_maximum(const float* values) {
    float maximum = 0.0f;
    for (int32_t i = 0; i < KMLA_GROUP_DIMS; i++) {
        const float magnitude = fabsf(values[i]);
        maximum = magnitude > maximum ? magnitude : maximum;
    }
    return maximum > FLT_MAX ? FLT_MAX : maximum;
}

// The least power of two that is not below a positive normal number, by its bits.
static float kmla_i_power_of_two_up(float value) {
    const uint32_t bits = kmla_i_bits(value);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
    return kmla_i_float(exponent << 23);
}

// 1 / a power of two whose inverse is normal too: the exponent mirrored around 1.0's.
static float kmla_i_power_of_two_inverse(float power) {
    return kmla_i_float((254u << 23) - kmla_i_bits(power));
}

static float kmla_i_kv_scale(float maximum, int32_t scale_rule) {
    const float exact = maximum / 448.0f;
    const float scale = exact > FLT_MIN ? exact : FLT_MIN;
    return scale_rule == KMLA_SCALE_POWER_OF_TWO ? kmla_i_power_of_two_up(scale) : scale;
}

// A finite maximum gives 2^-13 .. 2^120: the scale and its inverse are always normal.
static float kmla_i_query_scale(float maximum) {
    const float exact = maximum * (1.0f / 448.0f);
    return kmla_i_power_of_two_up(exact > 1e-4f ? exact : 1e-4f);
}

static void kmla_i_encode_quotients(const float* values, float divisor, int32_t count,
                                    uint8_t* codes) {
    for (int32_t i = 0; i < count; i++) {
        codes[i] = kmla_float_to_e4m3(values[i] / divisor);
    }
}

// One 128-dim group by the KV rule. Returns its scale.
static float kmla_i_encode_kv_group(const float* values, int32_t scale_rule, uint8_t* codes) {
    const float scale = kmla_i_kv_scale(kmla_i_group_maximum(values), scale_rule);
    kmla_i_encode_quotients(values, scale, KMLA_GROUP_DIMS, codes);
    return scale;
}

// One 128-dim group by the query rule. Returns its scale.
static float kmla_i_encode_query_group(const float* values, uint8_t* codes) {
    const float scale = kmla_i_query_scale(kmla_i_group_maximum(values));
    const float inverse = kmla_i_power_of_two_inverse(scale);
    for (int32_t i = 0; i < KMLA_GROUP_DIMS; i++) {
        codes[i] = kmla_float_to_e4m3(values[i] * inverse);
    }
    return scale;
}

// BF16 sources keep their bits, NaN payloads included; fp32 is rounded.
static void kmla_i_write_bf16(const uint8_t* from, int32_t type, int32_t count, uint8_t* to) {
    for (int32_t i = 0; i < count; i++) {
        const uint16_t bits = kmla_i_little16(type == KMLA_BF16
                                                  ? kmla_i_load_bf16_bits(from, i)
                                                  : kmla_float_to_bf16(kmla_i_load_fp32(from, i)));
        memcpy(to + i * 2, &bits, 2);
    }
}

// The scale rule of a packed query, beside KMLA_SCALE_* for KV.
#define KMLA_I_SCALE_QUERY 2

// One packed record of a latent and a rope source.
static void kmla_i_write_packed(const uint8_t* latent, const uint8_t* rope, int32_t type,
                                int32_t scale_rule, uint8_t* record) {
    for (int32_t first = 0; first < KMLA_LATENT_DIMS; first += KMLA_GROUP_DIMS) {
        float values[KMLA_GROUP_DIMS];
        kmla_i_load_array(latent + first * kmla_i_element_bytes(type), type, KMLA_GROUP_DIMS,
                          values);
        const float scale = scale_rule == KMLA_I_SCALE_QUERY
                                ? kmla_i_encode_query_group(values, record + first)
                                : kmla_i_encode_kv_group(values, scale_rule, record + first);
        const uint32_t bits = kmla_i_little32(kmla_i_bits(scale));
        memcpy(record + KMLA_PACKED_SCALE_OFFSET + first / KMLA_GROUP_DIMS * 4, &bits, 4);
    }
    kmla_i_write_bf16(rope, type, KMLA_ROPE_DIMS, record + KMLA_PACKED_ROPE_OFFSET);
}

// One E4M3 record: codes of the values divided by the tensor's scale.
static void kmla_i_write_e4m3(const uint8_t* latent, const uint8_t* rope, int32_t type,
                              float tensor_scale, uint8_t* record) {
    float values[KMLA_QUERY_DIMS];
    kmla_i_load_array(latent, type, KMLA_LATENT_DIMS, values);
    kmla_i_load_array(rope, type, KMLA_ROPE_DIMS, values + KMLA_LATENT_DIMS);
    kmla_i_encode_quotients(values, tensor_scale, KMLA_QUERY_DIMS, record);
}

KMLA_API kmla_status kmla_host_write_kv(const kmla_kv_write* args, kmla_error* error) {
    const kmla_status status = kmla_check_kv_write(args, error);
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_kv_write write = kmla_i_dense_kv_write(args);
    const int64_t type_bytes = kmla_i_element_bytes(write.source_type);
    const int64_t record_bytes = (int64_t)kmla_kv_record_bytes(write.kv_format);
    for (int64_t token = 0; token < write.tokens; token++) {
        int64_t slot;
        memcpy(&slot, kmla_i_at(write.slots, token * 8), sizeof(slot));
        if (slot < 0 || (uint64_t)(slot / write.page_tokens) >= write.kv_pages) {
            continue;
        }
        uint8_t* record = kmla_i_at(write.kv, slot / write.page_tokens *
                                                  (int64_t)write.page_pitch_bytes +
                                              slot % write.page_tokens * record_bytes);
        const uint8_t* latent =
            kmla_i_at(write.latent, token * write.latent_stride * type_bytes);
        const uint8_t* rope = kmla_i_at(write.rope, token * write.rope_stride * type_bytes);
        if (write.kv_format == KMLA_KV_PACKED) {
            kmla_i_write_packed(latent, rope, write.source_type, write.scale_rule, record);
        } else if (write.kv_format == KMLA_KV_E4M3) {
            kmla_i_write_e4m3(latent, rope, write.source_type, write.kv_scale, record);
        } else {
            kmla_i_write_bf16(latent, write.source_type, KMLA_LATENT_DIMS, record);
            kmla_i_write_bf16(rope, write.source_type, KMLA_ROPE_DIMS,
                              record + KMLA_LATENT_DIMS * 2);
        }
    }
    return KMLA_OK;
}

KMLA_API kmla_status kmla_host_write_query(const kmla_query_write* args, kmla_error* error) {
    const kmla_status status = kmla_check_query_write(args, error);
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_query_write write = kmla_i_dense_query_write(args);
    const int64_t type_bytes = kmla_i_element_bytes(write.source_type);
    for (int64_t row = 0; row < write.rows; row++) {
        for (int64_t head = 0; head < write.heads; head++) {
            const uint8_t* source =
                kmla_i_at(write.source, (row * write.source_row_stride +
                                         head * write.source_head_stride) * type_bytes);
            const uint8_t* rope = source + KMLA_LATENT_DIMS * type_bytes;
            uint8_t* record = kmla_i_at(write.query, row * write.query_row_stride_bytes +
                                                         head * write.query_head_stride_bytes);
            if (write.query_format == KMLA_QUERY_PACKED) {
                kmla_i_write_packed(source, rope, write.source_type, KMLA_I_SCALE_QUERY, record);
            } else if (write.query_format == KMLA_QUERY_E4M3) {
                kmla_i_write_e4m3(source, rope, write.source_type, write.query_scale, record);
            } else {
                kmla_i_write_bf16(source, write.source_type, KMLA_QUERY_DIMS, record);
            }
        }
    }
    return KMLA_OK;
}

// -----------------------------------------------------------------------------
// Merge of splits and combine of ranks: the same sums, two rules for odd log-sum-exps.
// -----------------------------------------------------------------------------

// In the workspace, not a value but a note: this split saw all that the row sees and has written
// the output itself, so that it is not rounded to a partial. No sum of scores has this lse.
#define KMLA_I_LSE_DONE INFINITY

enum { KMLA_I_RULE_MERGE = 0, KMLA_I_RULE_COMBINE = 1 };

// The log-sum-exp of one part. NaN and infinities count as empty in a combine; in a merge NaN
// stays, as one split came upon NaN and the row's answer is NaN.
static float kmla_i_part_lse(const kmla_combine* parts, int32_t part, int64_t row, int64_t head,
                             int32_t rule) {
    const int64_t index = part * parts->part_lse_stride + row * parts->part_lse_row_stride +
                          head * parts->part_lse_head_stride;
    const float lse = kmla_i_load_fp32(kmla_i_at(parts->part_lse, 0), index);
    const int finite = lse >= -FLT_MAX && lse <= FLT_MAX;
    return rule == KMLA_I_RULE_COMBINE && !finite ? -INFINITY : lse;
}

static void kmla_i_store_result(const kmla_combine* parts, int64_t row, int64_t head,
                                const float* out, float lse) {
    const int64_t at = row * parts->out_row_stride + head * parts->out_head_stride;
    kmla_i_store_array(out, parts->out_type, KMLA_LATENT_DIMS,
                       kmla_i_at(parts->out, at * kmla_i_element_bytes(parts->out_type)));
    if (parts->lse != 0) {
        const int64_t index = row * parts->lse_row_stride + head * parts->lse_head_stride;
        memcpy(kmla_i_at(parts->lse, index * 4), &lse, 4);
    }
}

// Weighs the parts of one vector, in ascending order. A payload of weight 0 is not read. For a
// share all weights count, but only its own part's payload.
static void kmla_i_weigh_parts(const kmla_combine* parts, int64_t row, int64_t head,
                               int32_t rule) {
    float maximum = -INFINITY;
    for (int32_t part = 0; part < parts->parts; part++) {
        const float lse = kmla_i_part_lse(parts, part, row, head, rule);
        if (lse == KMLA_I_LSE_DONE) {
            return;
        }
        maximum = lse > maximum ? lse : maximum;
    }
    float out[KMLA_LATENT_DIMS] = {0};
    float total = 0.0f;
    for (int32_t part = 0; part < parts->parts; part++) {
        const float lse = kmla_i_part_lse(parts, part, row, head, rule);
        const float weight = lse == -INFINITY ? 0.0f : expf(lse - maximum);
        total += weight;
        if (weight == 0.0f || (parts->share && part != parts->share - 1)) {
            continue;
        }
        const int64_t at = (parts->share ? 0 : part * parts->part_out_stride) +
                           row * parts->part_row_stride + head * parts->part_head_stride;
        float payload[KMLA_LATENT_DIMS];
        kmla_i_load_array(
            kmla_i_at(parts->part_out, at * kmla_i_element_bytes(parts->part_type)),
            parts->part_type, KMLA_LATENT_DIMS, payload);
        for (int32_t d = 0; d < KMLA_LATENT_DIMS; d++) {
            out[d] += weight * payload[d];
        }
    }
    if (total == 0.0f) {
        kmla_i_store_result(parts, row, head, out, -INFINITY);
        return;
    }
    for (int32_t d = 0; d < KMLA_LATENT_DIMS; d++) {
        out[d] /= total;
    }
    kmla_i_store_result(parts, row, head, out, maximum + logf(total));
}

KMLA_API kmla_status kmla_host_combine(const kmla_combine* args, kmla_error* error) {
    const kmla_status status = kmla_check_combine(args, error);
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_combine parts = kmla_i_dense_combine(args);
    for (int64_t row = 0; row < parts.rows; row++) {
        for (int64_t head = 0; head < parts.heads; head++) {
            kmla_i_weigh_parts(&parts, row, head, KMLA_I_RULE_COMBINE);
        }
    }
    return KMLA_OK;
}

// -----------------------------------------------------------------------------
// Reader
// -----------------------------------------------------------------------------

// A decode while it runs: the same for every task, which only read it.
typedef struct kmla_i_host_job {
    const kmla_plan* plan;
    kmla_decode args;   // strides filled in
    kmla_combine parts; // the workspace as parts, and the outputs
    uint64_t items;     // pieces of work
    uint64_t tasks;     // tasks that share them: task i takes items i, i + tasks, ...
    float e4m3[256];    // the value of every code
} kmla_i_host_job;

// Softmax over some tokens, unnormalised: all is relative to the largest score among them.
typedef struct kmla_i_host_sums {
    float maximum;                  // of the scores
    float total;                    // sum of exp(score - maximum)
    float latent[KMLA_LATENT_DIMS]; // sum of exp(score - maximum) * latent
} kmla_i_host_sums;

// One query vector on its way through the tokens of a split.
typedef struct kmla_i_host_vector {
    int64_t row;
    int64_t head;
    int64_t table;          // its row of the block table or slot list
    int64_t begin;          // the split's part of the tokens that it sees
    int64_t end;
    int32_t sees_all;       // that part is all of them
    float query[KMLA_QUERY_DIMS];
    kmla_i_host_sums all;   // of the chunks so far
    kmla_i_host_sums chunk; // of the one that is being read
} kmla_i_host_vector;

// Where a row stands in its request.
typedef struct kmla_i_host_place {
    int32_t request; // -1: the row is past the last request
    int32_t index;   // among the request's rows
    int32_t rows;    // of the request
} kmla_i_host_place;

static kmla_i_host_place kmla_i_place_row(const kmla_i_host_job* job, int64_t row) {
    const kmla_shape* shape = &job->plan->shape;
    kmla_i_host_place place;
    if (!shape->ragged) {
        place.request = (int32_t)(row / shape->rows_per_request);
        place.index = (int32_t)(row % shape->rows_per_request);
        place.rows = shape->rows_per_request;
        return place;
    }
    const int32_t* offsets = (const int32_t*)kmla_i_at(job->args.row_offsets, 0);
    int32_t low = 0; // the last request that begins at or before the row
    int32_t high = shape->requests;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (offsets[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const int live = offsets[low] <= row && row < offsets[low + 1];
    place.request = live ? low : -1;
    place.index = live ? (int32_t)(row - offsets[low]) : 0;
    place.rows = live ? offsets[low + 1] - offsets[low] : 0;
    return place;
}

// The local tokens [begin, end) that a row sees, clamped to the capacity.
static void kmla_i_row_tokens(const kmla_i_host_job* job, int64_t row, kmla_i_host_place place,
                              int64_t* begin, int64_t* end) {
    const kmla_shape* shape = &job->plan->shape;
    const int32_t* lengths = (const int32_t*)kmla_i_at(job->args.lengths, 0);
    *begin = 0;
    *end = 0;
    if (place.request < 0) {
        return;
    }
    const int per_row = shape->lengths.lengths_kind == KMLA_LENGTHS_PER_ROW;
    const int32_t length = lengths[per_row ? row : place.request];
    kmla_i_visible_range(shape, length, place.rows, place.index, begin, end);
}

// The record of a row's token, NULL if the table says that there is none.
static const uint8_t* kmla_i_find_record(const kmla_i_host_job* job, int64_t table,
                                         int64_t token) {
    const kmla_shape* shape = &job->plan->shape;
    const kmla_decode* args = &job->args;
    int64_t page;
    int64_t offset;
    if (shape->slot_list) {
        const int32_t* slots = (const int32_t*)kmla_i_at(args->slot_list, 0);
        const int32_t slot = slots[table * args->slot_list_stride + token];
        page = slot < 0 ? -1 : slot / shape->page_tokens;
        offset = slot % shape->page_tokens;
    } else {
        const int32_t* pages = (const int32_t*)kmla_i_at(args->block_table, 0);
        page = pages[table * args->block_table_stride + token / shape->page_tokens];
        offset = token % shape->page_tokens;
    }
    if (page < 0) {
        return NULL;
    }
    return kmla_i_at(args->kv, page * (int64_t)args->page_pitch_bytes +
                                   offset * (int64_t)kmla_kv_record_bytes(shape->kv_format));
}

// The 576 values of a record. `kv_format` names the layout, which queries share.
static void kmla_i_load_record(const kmla_i_host_job* job, int32_t kv_format, float tensor_scale,
                               const uint8_t* record, float* values) {
    if (kv_format == KMLA_KV_BF16) {
        kmla_i_load_record_bf16(record, KMLA_QUERY_DIMS, values);
        return;
    }
    if (kv_format == KMLA_KV_E4M3) {
        for (int32_t d = 0; d < KMLA_QUERY_DIMS; d++) {
            values[d] = job->e4m3[record[d]] * tensor_scale;
        }
        return;
    }
    for (int32_t first = 0; first < KMLA_LATENT_DIMS; first += KMLA_GROUP_DIMS) {
        uint32_t bits;
        memcpy(&bits, record + KMLA_PACKED_SCALE_OFFSET + first / KMLA_GROUP_DIMS * 4, 4);
        const float scale = kmla_i_float(kmla_i_little32(bits));
        for (int32_t d = first; d < first + KMLA_GROUP_DIMS; d++) {
            values[d] = job->e4m3[record[d]] * scale;
        }
    }
    kmla_i_load_record_bf16(record + KMLA_PACKED_ROPE_OFFSET, KMLA_ROPE_DIMS,
                            values + KMLA_LATENT_DIMS);
}

// The query of a row and head; in e4m3 mode what the packed query writer would have stored.
static void kmla_i_load_query(const kmla_i_host_job* job, int64_t row, int64_t head,
                              float* query) {
    const kmla_shape* shape = &job->plan->shape;
    const uint8_t* record =
        kmla_i_at(job->args.query, row * job->args.query_row_stride_bytes +
                                       head * job->args.query_head_stride_bytes);
    const int32_t layout = shape->query_format == KMLA_QUERY_PACKED ? KMLA_KV_PACKED
                           : shape->query_format == KMLA_QUERY_E4M3 ? KMLA_KV_E4M3
                                                                    : KMLA_KV_BF16;
    kmla_i_load_record(job, layout, job->args.query_scale, record, query);
    if (layout == KMLA_KV_BF16 && shape->mode == KMLA_MODE_E4M3_QUERY) {
        uint8_t packed[KMLA_PACKED_BYTES];
        kmla_i_write_packed((const uint8_t*)query, (const uint8_t*)(query + KMLA_LATENT_DIMS),
                            KMLA_FP32, KMLA_I_SCALE_QUERY, packed);
        kmla_i_load_record(job, KMLA_KV_PACKED, 1.0f, packed, query);
    }
}

// A dot product of 576: 16 sums of the dims equal modulo 16, each ascending, then added in
// halves (i and i + 8, i and i + 4, ...). Independent sums are what compilers can vectorise.
static float kmla_i_dot(const float* a, const float* b) {
    float lanes[KMLA_I_HOST_LANES] = {0};
    for (int32_t d = 0; d < KMLA_QUERY_DIMS; d += KMLA_I_HOST_LANES) {
        for (int32_t lane = 0; lane < KMLA_I_HOST_LANES; lane++) {
            lanes[lane] += a[d + lane] * b[d + lane];
        }
    }
    for (int32_t half = KMLA_I_HOST_LANES / 2; half > 0; half /= 2) {
        for (int32_t lane = 0; lane < half; lane++) {
            lanes[lane] += lanes[lane + half];
        }
    }
    return lanes[0];
}

static void kmla_i_clear_sums(kmla_i_host_sums* sums) {
    sums->maximum = -INFINITY;
    sums->total = 0.0f;
    memset(sums->latent, 0, sizeof(sums->latent));
}

// Makes sums relative to a score that is above their maximum.
static void kmla_i_raise_maximum(kmla_i_host_sums* sums, float maximum) {
    const float rescale = expf(sums->maximum - maximum); // 0 if there was none
    sums->maximum = maximum;
    sums->total *= rescale;
    for (int32_t d = 0; d < KMLA_LATENT_DIMS; d++) {
        sums->latent[d] *= rescale;
    }
}

static void kmla_i_see_token(kmla_i_host_sums* sums, float score, const float* token) {
    if (score > sums->maximum) {
        kmla_i_raise_maximum(sums, score);
    }
    // A NaN score gives weight NaN, and so a NaN total and output. Score -inf has weight 0.
    const float weight = score == -INFINITY ? 0.0f : expf(score - sums->maximum);
    if (weight == 0.0f) {
        return;
    }
    sums->total += weight;
    for (int32_t d = 0; d < KMLA_LATENT_DIMS; d++) {
        sums->latent[d] += weight * token[d];
    }
}

// Moves a chunk's sums to all's. Adding chunks, not tokens, to the long sums keeps a million
// small weights from being rounded against a total that is far above them.
static void kmla_i_end_chunk(kmla_i_host_vector* vector) {
    kmla_i_host_sums* all = &vector->all;
    kmla_i_host_sums* chunk = &vector->chunk;
    if (chunk->total == 0.0f) {
        return;
    }
    if (chunk->maximum > all->maximum) {
        kmla_i_raise_maximum(all, chunk->maximum);
    }
    const float weight = expf(chunk->maximum - all->maximum);
    all->total += weight * chunk->total;
    for (int32_t d = 0; d < KMLA_LATENT_DIMS; d++) {
        all->latent[d] += weight * chunk->latent[d];
    }
    kmla_i_clear_sums(chunk);
}

static void kmla_i_begin_vector(const kmla_i_host_job* job, int64_t index, int32_t split,
                                kmla_i_host_vector* vector) {
    const kmla_plan* plan = job->plan;
    const kmla_shape* shape = &plan->shape;
    vector->row = index / shape->heads;
    vector->head = index % shape->heads;
    const kmla_i_host_place place = kmla_i_place_row(job, vector->row);
    vector->table = shape->slot_list ? vector->row : place.request;
    int64_t begin;
    int64_t end;
    kmla_i_row_tokens(job, vector->row, place, &begin, &end);
    vector->begin = begin;
    vector->end = end;
    if (plan->splits > 1) {
        kmla_split_range(shape->split_mode, plan->splits, split, shape->capacity_tokens,
                         shape->single_split_chunks, begin, end, &vector->begin, &vector->end,
                         NULL);
    }
    const int reads = vector->begin < vector->end;
    vector->sees_all =
        plan->splits == 1 || (reads && vector->begin <= begin && vector->end >= end);
    kmla_i_clear_sums(&vector->all);
    kmla_i_clear_sums(&vector->chunk);
    if (reads) {
        kmla_i_load_query(job, vector->row, vector->head, vector->query);
    }
}

// Writes the output if the split saw all, else its partial. An empty one has no payload.
static void kmla_i_end_vector(const kmla_i_host_job* job, int32_t split,
                              kmla_i_host_vector* vector) {
    const kmla_combine* parts = &job->parts;
    kmla_i_host_sums* all = &vector->all;
    const int empty = all->total == 0.0f;
    float lse = -INFINITY;
    if (!empty) {
        lse = all->maximum + logf(all->total);
        for (int32_t d = 0; d < KMLA_LATENT_DIMS; d++) {
            all->latent[d] /= all->total;
        }
    }
    if (vector->sees_all) {
        kmla_i_store_result(parts, vector->row, vector->head, all->latent, lse);
        lse = KMLA_I_LSE_DONE;
    } else if (!empty) {
        const int64_t at = split * parts->part_out_stride +
                           vector->row * parts->part_row_stride +
                           vector->head * parts->part_head_stride;
        kmla_i_store_array(all->latent, parts->part_type, KMLA_LATENT_DIMS,
                           kmla_i_at(parts->part_out, at * kmla_i_element_bytes(parts->part_type)));
    }
    if (parts->parts > 1) {
        const int64_t index = split * parts->part_lse_stride +
                              vector->row * parts->part_lse_row_stride +
                              vector->head * parts->part_lse_head_stride;
        memcpy(kmla_i_at(parts->part_lse, index * 4), &lse, 4);
    }
}

// Takes vectors of one table row through their tokens. A record is decoded once for all of them.
static void kmla_i_read_tokens(const kmla_i_host_job* job, kmla_i_host_vector* vectors,
                               int32_t count) {
    int64_t first = INT64_MAX;
    int64_t last = 0;
    for (int32_t i = 0; i < count; i++) {
        if (vectors[i].begin < vectors[i].end) {
            first = vectors[i].begin < first ? vectors[i].begin : first;
            last = vectors[i].end > last ? vectors[i].end : last;
        }
    }
    for (int64_t token = first; token < last; token++) {
        float values[KMLA_QUERY_DIMS];
        int decoded = 0; // a token that no vector sees may have no valid table entry
        for (int32_t i = 0; i < count; i++) {
            if (token < vectors[i].begin || token >= vectors[i].end) {
                continue;
            }
            if (!decoded) {
                const uint8_t* record = kmla_i_find_record(job, vectors[i].table, token);
                if (record == NULL) {
                    break;
                }
                kmla_i_load_record(job, job->plan->shape.kv_format, job->args.kv_scale, record,
                                   values);
                decoded = 1;
            }
            const float score = job->args.scale * kmla_i_dot(vectors[i].query, values);
            kmla_i_see_token(&vectors[i].chunk, score, values);
        }
        if ((token + 1) % KMLA_CHUNK_TOKENS == 0 || token + 1 == last) {
            for (int32_t i = 0; i < count; i++) {
                kmla_i_end_chunk(&vectors[i]);
            }
        }
    }
}

// One item: one split of up to KMLA_I_HOST_VECTORS vectors, of one or more table rows.
static void kmla_i_read_item(const kmla_i_host_job* job, uint64_t item) {
    const int32_t splits = job->plan->splits;
    const int32_t split = (int32_t)(item % (uint64_t)splits);
    const int64_t first = (int64_t)(item / (uint64_t)splits) * KMLA_I_HOST_VECTORS;
    const int64_t all = (int64_t)job->plan->shape.rows * job->plan->shape.heads;
    const int32_t count = (int32_t)kmla_i_min(all - first, KMLA_I_HOST_VECTORS);
    kmla_i_host_vector vectors[KMLA_I_HOST_VECTORS];
    for (int32_t i = 0; i < count; i++) {
        kmla_i_begin_vector(job, first + i, split, &vectors[i]);
    }
    for (int32_t begin = 0, end = 0; begin < count; begin = end) {
        while (end < count && vectors[end].table == vectors[begin].table) {
            end++;
        }
        kmla_i_read_tokens(job, vectors + begin, end - begin);
    }
    for (int32_t i = 0; i < count; i++) {
        kmla_i_end_vector(job, split, &vectors[i]);
    }
}

static void kmla_i_read_task(void* data, uint32_t index) {
    const kmla_i_host_job* job = (const kmla_i_host_job*)data;
    for (uint64_t item = index; item < job->items; item += job->tasks) {
        kmla_i_read_item(job, item);
    }
}

static void kmla_i_merge_task(void* data, uint32_t index) {
    const kmla_i_host_job* job = (const kmla_i_host_job*)data;
    const uint64_t heads = (uint64_t)job->plan->shape.heads;
    for (uint64_t item = index; item < job->items; item += job->tasks) {
        kmla_i_weigh_parts(&job->parts, (int64_t)(item / heads), (int64_t)(item % heads),
                           KMLA_I_RULE_MERGE);
    }
}

static void kmla_i_run_items(kmla_i_host_job* job, uint64_t items, kmla_task task,
                             const kmla_parallel* parallel) {
    job->items = items;
    job->tasks = items < KMLA_I_HOST_MOST_TASKS ? items : KMLA_I_HOST_MOST_TASKS;
    if (parallel != NULL && parallel->run != NULL) {
        parallel->run(parallel->user, (uint32_t)job->tasks, task, job);
        return;
    }
    for (uint32_t index = 0; index < job->tasks; index++) {
        task(job, index);
    }
}

// The workspace as the merge reads it: dense payloads [S][R][H][512], then lse [S][R][H].
static kmla_combine kmla_i_split_parts(const kmla_plan* plan, const kmla_decode* args) {
    const kmla_shape* shape = &plan->shape;
    const int64_t vectors = (int64_t)shape->rows * shape->heads;
    kmla_combine parts;
    memset(&parts, 0, sizeof(parts));
    parts.parts = plan->splits;
    parts.rows = shape->rows;
    parts.heads = shape->heads;
    parts.part_type = shape->partial_type;
    parts.part_out = args->workspace;
    parts.part_out_stride = vectors * KMLA_LATENT_DIMS;
    parts.part_row_stride = (int64_t)shape->heads * KMLA_LATENT_DIMS;
    parts.part_head_stride = KMLA_LATENT_DIMS;
    parts.part_lse = args->workspace + (uint64_t)(plan->splits * parts.part_out_stride *
                                                  kmla_i_element_bytes(parts.part_type));
    parts.part_lse_stride = vectors;
    parts.part_lse_row_stride = shape->heads;
    parts.part_lse_head_stride = 1;
    parts.out = args->out;
    parts.out_row_stride = args->out_row_stride;
    parts.out_head_stride = args->out_head_stride;
    parts.out_type = args->out_type;
    parts.lse = args->lse;
    parts.lse_row_stride = args->lse_row_stride;
    parts.lse_head_stride = args->lse_head_stride;
    return parts;
}

KMLA_API kmla_status kmla_host_decode(const kmla_plan* plan, const kmla_decode* args,
                                      const kmla_parallel* parallel, kmla_error* error) {
    kmla_i_host_job job;
    kmla_status status = kmla_i_check_decode(plan, args, &job.args, error);
    if (status != KMLA_OK) {
        return status;
    }
    if (args->check_pages) {
        const uint64_t table = plan->shape.slot_list ? args->slot_list : args->block_table;
        status = kmla_check_pages(plan, args, (const int32_t*)kmla_i_at(table, 0),
                                  (const int32_t*)kmla_i_at(args->lengths, 0),
                                  (const int32_t*)kmla_i_at(args->row_offsets, 0), error);
        if (status != KMLA_OK) {
            return status;
        }
    }
    job.plan = plan;
    job.parts = kmla_i_split_parts(plan, &job.args);
    for (int32_t code = 0; code < 256; code++) {
        job.e4m3[code] = kmla_e4m3_to_float((uint8_t)code);
    }
    const uint64_t vectors = (uint64_t)plan->shape.rows * (uint64_t)plan->shape.heads;
    const uint64_t blocks = (vectors + KMLA_I_HOST_VECTORS - 1) / KMLA_I_HOST_VECTORS;
    kmla_i_run_items(&job, blocks * (uint64_t)plan->splits, kmla_i_read_task, parallel);
    if (plan->splits > 1) {
        kmla_i_run_items(&job, vectors, kmla_i_merge_task, parallel);
    }
    return KMLA_OK;
}
#ifndef KIMI_MLA_NO_GPU

#define KMLA_I_STR_(...) #__VA_ARGS__
#define KMLA_I_STR(...) KMLA_I_STR_(__VA_ARGS__)
#define KMLA_I_FACT(name) "#define " #name " " KMLA_I_STR(name) "\n"

#define KMLA_I_KERNEL_ARGS                                                                        \
    struct kmla_i_reader_args {                                                                   \
        uint64_t query, kv, table, row_offsets, lengths;                                          \
        uint64_t out, lse, part_out, part_lse; /* part_*: only if splits > 1 */                   \
        int64_t query_row_stride, query_head_stride; /* bytes */                                  \
        uint64_t page_pitch;                         /* bytes */                                  \
        int64_t table_stride;                        /* entries */                                \
        int64_t out_row_stride, out_head_stride, lse_row_stride, lse_head_stride; /* elements */  \
        int32_t groups, rows, rows_per_group, heads; /* a group shares its KV: request or row */  \
        int32_t page_tokens, page_shift; /* log2 of page_tokens, -1 if that is no power of 2 */   \
        int32_t capacity, splits, chunks_per_split, single_split_chunks;                          \
        int32_t balanced, ragged, slot_list, query_format, e4m3_query, partial_type, out_type;    \
        int32_t per_request, draft, window, dcp_ranks, dcp_rank, dcp_interleave;                  \
        float score_scale; /* softmax scale * log2(e) * kv_scale * query_scale */                 \
        float kv_scale;    /* E4M3 KV, else 1 */                                                  \
    };                                                                                            \
    struct kmla_i_combine_args { /* the merge's too: parts are splits, strides are dense */       \
        uint64_t part_out, part_lse, out, lse;                                                    \
        int64_t part_out_stride, part_row_stride, part_head_stride;                               \
        int64_t part_lse_stride, part_lse_row_stride, part_lse_head_stride;                       \
        int64_t out_row_stride, out_head_stride, lse_row_stride, lse_head_stride;                 \
        int32_t parts, rows, heads, part_type, out_type, share;                                   \
    };                                                                                            \
    struct kmla_i_kv_write_args {                                                                 \
        uint64_t latent, rope, slots, kv, kv_slots, page_pitch;                                   \
        int64_t latent_stride, rope_stride; /* elements */                                        \
        int32_t tokens, kv_format, source_type, power_of_two, page_tokens;                        \
        float kv_scale;                                                                           \
    };                                                                                            \
    struct kmla_i_query_write_args {                                                              \
        uint64_t source, query;                                                                   \
        int64_t source_row_stride, source_head_stride; /* elements */                             \
        int64_t query_row_stride, query_head_stride;   /* bytes */                                \
        int32_t rows, heads, query_format, source_type;                                           \
        float query_scale;                                                                        \
    };

KMLA_I_KERNEL_ARGS

// The facts as text, then the structs: the first lines of the device source.
#define KMLA_I_FACTS                                                                              \
    KMLA_I_FACT(KMLA_LATENT_DIMS)                                                                 \
    KMLA_I_FACT(KMLA_ROPE_DIMS)                                                                   \
    KMLA_I_FACT(KMLA_QUERY_DIMS)                                                                  \
    KMLA_I_FACT(KMLA_GROUP_DIMS)                                                                  \
    KMLA_I_FACT(KMLA_CHUNK_TOKENS)                                                                \
    KMLA_I_FACT(KMLA_PACKED_BYTES)                                                                \
    KMLA_I_FACT(KMLA_PACKED_SCALE_OFFSET)                                                         \
    KMLA_I_FACT(KMLA_PACKED_ROPE_OFFSET)                                                          \
    KMLA_I_FACT(KMLA_E4M3_BYTES)                                                                  \
    KMLA_I_FACT(KMLA_BF16_BYTES)                                                                  \
    KMLA_I_FACT(KMLA_KV_PACKED)                                                                   \
    KMLA_I_FACT(KMLA_KV_E4M3)                                                                     \
    KMLA_I_FACT(KMLA_KV_BF16)                                                                     \
    KMLA_I_FACT(KMLA_QUERY_BF16)                                                                  \
    KMLA_I_FACT(KMLA_QUERY_PACKED)                                                                \
    KMLA_I_FACT(KMLA_QUERY_E4M3)                                                                  \
    KMLA_I_FACT(KMLA_BF16)                                                                        \
    KMLA_I_FACT(KMLA_FP32)                                                                        \
    KMLA_I_FACT(KMLA_I_READER_THREADS)                                                            \
    KMLA_I_FACT(KMLA_I_SUPPORT_THREADS)                                                           \
    KMLA_I_FACT(KMLA_I_STEP_TOKENS)                                                               \
    KMLA_I_FACT(KMLA_I_FP8_STEP_TOKENS)                                                           \
    KMLA_I_FACT(KMLA_I_HOPPER_THREADS)                                                            \
    KMLA_I_FACT(KMLA_I_HOPPER_STEP_TOKENS)                                                        \
    KMLA_I_FACT(KMLA_I_HOPPER_MISC_BYTES)                                                         \
    KMLA_I_FACT(KMLA_I_PITCH_PACKED)                                                              \
    KMLA_I_FACT(KMLA_I_PITCH_E4M3)                                                                \
    KMLA_I_FACT(KMLA_I_PITCH_BF16)                                                                \
    KMLA_I_FACT(KMLA_I_MISC_BYTES)                                                                \
    KMLA_I_FACT(KMLA_I_REFERENCE_BELOW)                                                           \
    KMLA_I_FACT(KMLA_I_REFERENCE_GROWTH)

static const char kmla_i_device_facts[] = KMLA_I_FACTS;
static const char kmla_i_device_structs[] = KMLA_I_STR(KMLA_I_KERNEL_ARGS) "\n";

#endif // KIMI_MLA_NO_GPU

// =============================================================================
// GPU side: libraries, compile, prepare, launch
// =============================================================================
#ifndef KIMI_MLA_NO_GPU

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef KMLA_MALLOC
#define KMLA_MALLOC(bytes) malloc(bytes)
#define KMLA_FREE(pointer) free(pointer)
#endif

// -----------------------------------------------------------------------------
// What this file needs of cuda.h, nvrtc.h and windows.h, declared here
// -----------------------------------------------------------------------------

#if defined(_WIN32)
#define KMLA_I_CALL __stdcall
#ifdef __cplusplus
extern "C" {
#endif
struct HINSTANCE__; // what windows.h says, so that both may be included
#if defined(_WIN64)
typedef long long(__stdcall* kmla_i_windows_function)(void);
#else
typedef int(__stdcall* kmla_i_windows_function)(void);
#endif
__declspec(dllimport) struct HINSTANCE__* __stdcall LoadLibraryA(const char* name);
__declspec(dllimport) struct HINSTANCE__* __stdcall GetModuleHandleA(const char* name);
__declspec(dllimport) int __stdcall MoveFileExA(const char* from, const char* to,
                                                unsigned long flags);
__declspec(dllimport) kmla_i_windows_function __stdcall GetProcAddress(
    struct HINSTANCE__* library, const char* name);
#ifdef __cplusplus
}
#endif
#else
#define KMLA_I_CALL
#include <dlfcn.h>
#endif

// Arguments of cuLaunchKernelEx.
typedef struct kmla_i_launch_attribute {
    int32_t id;
    int32_t padding;
    union {
        int32_t value;
        char bytes[64];
    } value;
} kmla_i_launch_attribute;

typedef struct kmla_i_launch_config {
    uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void* stream;
    kmla_i_launch_attribute* attributes;
    uint32_t attribute_count;
} kmla_i_launch_config;

// Constants of cuda.h and nvrtc.h.
#define KMLA_I_DEVICE_MULTIPROCESSORS 16
#define KMLA_I_DEVICE_COMPUTE_MAJOR 75
#define KMLA_I_DEVICE_COMPUTE_MINOR 76
#define KMLA_I_DEVICE_SHARED_BYTES_SM 81
#define KMLA_I_DEVICE_SHARED_BYTES 97 // opt-in limit of a block
#define KMLA_I_FUNCTION_REGISTERS 4
#define KMLA_I_FUNCTION_DYNAMIC_SHARED 8
#define KMLA_I_LAUNCH_PROGRAMMATIC 6     // programmatic stream serialization
#define KMLA_I_PROGRAMMATIC_DRIVER 12030 // the first driver that also captures such launches
#define KMLA_I_RESOURCE_SM 1             // of cuCtxGetDevResource
#define KMLA_I_STUB_LIBRARY 34
#define KMLA_I_CAPTURE_IMPLICIT 906
#define KMLA_I_NVRTC_BUILTINS_FAILED 7
#define KMLA_I_NVRTC_HOPPER 12000 // the first release that knows sm_90a

// What cuCtxGetDevResource fills.
typedef struct kmla_i_resource {
    int32_t type;
    char padding[92];
    uint32_t multiprocessors;
    char room[156]; // 44 of them are in use with CUDA 13
} kmla_i_resource;

// X(result, field, symbol, needed, parameters). Symbols carry the suffix of the ABI that is meant.
#define KMLA_I_CUDA_FUNCTIONS(X)                                                                   \
    X(int, init, "cuInit", 1, (unsigned int flags))                                                \
    X(int, driver_version, "cuDriverGetVersion", 1, (int* version))                                \
    X(int, error_name, "cuGetErrorName", 1, (int result, const char** name))                       \
    X(int, error_string, "cuGetErrorString", 1, (int result, const char** string))                 \
    X(int, context_current, "cuCtxGetCurrent", 1, (void** context))                                \
    X(int, context_device, "cuCtxGetDevice", 1, (int* device))                                     \
    X(int, context_push, "cuCtxPushCurrent_v2", 1, (void* context))                                \
    X(int, context_pop, "cuCtxPopCurrent_v2", 1, (void** context))                                 \
    X(int, context_id, "cuCtxGetId", 0, (void* context, unsigned long long* id))                   \
    X(int, context_resource, "cuCtxGetDevResource", 0,                                             \
      (void* context, kmla_i_resource* resource, int type))                                        \
    X(int, device_attribute, "cuDeviceGetAttribute", 1, (int* value, int attribute, int device))   \
    X(int, module_load, "cuModuleLoadData", 1, (void** module, const void* image))                 \
    X(int, module_unload, "cuModuleUnload", 1, (void* module))                                     \
    X(int, module_function, "cuModuleGetFunction", 1,                                              \
      (void** function, void* module, const char* name))                                           \
    X(int, function_attribute, "cuFuncGetAttribute", 1,                                            \
      (int* value, int attribute, void* function))                                                 \
    X(int, function_set, "cuFuncSetAttribute", 1, (void* function, int attribute, int value))      \
    X(int, function_load, "cuFuncLoad", 0, (void* function))                                       \
    X(int, launch, "cuLaunchKernel", 1,                                                            \
      (void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,              \
       unsigned int block_x, unsigned int block_y, unsigned int block_z,                           \
       unsigned int shared_bytes, void* stream, void** parameters, void** extra))                  \
    X(int, launch_with, "cuLaunchKernelEx", 0,                                                     \
      (const kmla_i_launch_config* config, void* function, void** parameters, void** extra))       \
    X(int, copy_to_host, "cuMemcpyDtoHAsync_v2", 1,                                                \
      (void* host, uint64_t device, size_t bytes, void* stream))                                   \
    X(int, stream_capturing, "cuStreamIsCapturing", 1, (void* stream, int* capturing))             \
    X(int, stream_synchronize, "cuStreamSynchronize", 1, (void* stream))

#define KMLA_I_NVRTC_FUNCTIONS(X)                                                                  \
    X(int, version, "nvrtcVersion", 1, (int* major, int* minor))                                   \
    X(const char*, error_string, "nvrtcGetErrorString", 1, (int result))                           \
    X(int, architecture_count, "nvrtcGetNumSupportedArchs", 1, (int* count))                       \
    X(int, architectures, "nvrtcGetSupportedArchs", 1, (int* architectures))                       \
    X(int, create, "nvrtcCreateProgram", 1,                                                        \
      (void** program, const char* source, const char* name, int header_count,                     \
       const char* const* headers, const char* const* header_names))                               \
    X(int, compile, "nvrtcCompileProgram", 1,                                                      \
      (void* program, int option_count, const char* const* options))                               \
    X(int, log_bytes, "nvrtcGetProgramLogSize", 1, (void* program, size_t* bytes))                 \
    X(int, log, "nvrtcGetProgramLog", 1, (void* program, char* log))                               \
    X(int, cubin_bytes, "nvrtcGetCUBINSize", 1, (void* program, size_t* bytes))                    \
    X(int, cubin, "nvrtcGetCUBIN", 1, (void* program, char* cubin))                                \
    X(int, destroy, "nvrtcDestroyProgram", 1, (void** program))

#define KMLA_I_FUNCTION_POINTER(result, field, symbol, needed, parameters)                         \
    result(KMLA_I_CALL* field) parameters;
typedef struct kmla_i_cuda {
    KMLA_I_CUDA_FUNCTIONS(KMLA_I_FUNCTION_POINTER)
} kmla_i_cuda;
#undef KMLA_I_CALL
#define KMLA_I_CALL // NVRTC has no calling convention of its own
typedef struct kmla_i_nvrtc {
    KMLA_I_NVRTC_FUNCTIONS(KMLA_I_FUNCTION_POINTER)
    int32_t release; // major * 1000 + minor * 10
    char library[256];
} kmla_i_nvrtc;
#undef KMLA_I_FUNCTION_POINTER
#undef KMLA_I_CALL

// -----------------------------------------------------------------------------
// The object
// -----------------------------------------------------------------------------

// The name of a kernel is that of its device function.
typedef struct kmla_i_support {
    void* module;
    void* merge;
    void* combine;
    void* write_kv;
    void* write_query;
} kmla_i_support;

typedef struct kmla_i_reader {
    int32_t variant;
    void* module;
    void* function;
} kmla_i_reader;

#define KMLA_I_MAX_READERS 64 // there are 9 variants per reader

struct kmla_gpu {
    kmla_i_cuda cuda;
    char cuda_library[256];
    int32_t driver_version;
    int32_t without_cuda;
    int32_t without_nvrtc;
    kmla_i_nvrtc nvrtc;
    kmla_cache cache;
    void* context; // of the first prepare, else NULL
    unsigned long long context_id;
    kmla_device device; // of that context
    kmla_i_support support;
    kmla_i_reader readers[KMLA_I_MAX_READERS];
    int32_t reader_count;
};

// A run of whole lines of a device file; tools/embed.c makes the table of them.
typedef struct kmla_i_device_part {
    const char* file;
    int32_t first_line;
    const char* text;
} kmla_i_device_part;
#ifndef KIMI_MLA_NO_NVRTC
static size_t kmla_i_device_part_list(const kmla_i_device_part** parts);
#endif
static uint64_t kmla_i_device_parts_hash(void); // of the texts, kept also where they are left out

// -----------------------------------------------------------------------------
// Text and errors
// -----------------------------------------------------------------------------

// Text in a fixed buffer: what does not fit is counted and left out. Always ends in 0.
typedef struct kmla_i_text {
    char* data;
    size_t room;   // bytes of data, the final 0 included
    size_t length; // of the whole text, without the final 0
} kmla_i_text;

static void kmla_i_text_add(kmla_i_text* text, const char* more) {
    const size_t bytes = strlen(more);
    if (text->length + 1 < text->room) {
        const size_t room = text->room - text->length - 1;
        const size_t kept = bytes < room ? bytes : room;
        memcpy(text->data + text->length, more, kept);
        text->data[text->length + kept] = 0;
    }
    text->length += bytes;
}

// Both strings, one after the other; cut off where the room ends.
static void kmla_i_text_join(char* to, size_t room, const char* first, const char* second) {
    kmla_i_text text = {to, room, 0};
    to[0] = 0;
    kmla_i_text_add(&text, first);
    kmla_i_text_add(&text, second);
}

static kmla_status kmla_i_fail_library(kmla_error* error, kmla_status status, const char* library,
                                       const char* message) {
    kmla_i_fail(error, status, "%s", message);
    if (error) {
        kmla_i_text_join(error->library, sizeof error->library, library, "");
    }
    return status;
}

static kmla_status kmla_i_fail_cuda(const kmla_gpu* gpu, kmla_error* error, const char* call,
                                    int result) {
    const char* name = NULL;
    const char* string = NULL;
    gpu->cuda.error_name(result, &name);
    gpu->cuda.error_string(result, &string);
    kmla_i_fail(error, KMLA_ERROR_CUDA, "%s failed: %s (%d): %s", call,
                name ? name : "unknown error", result, string ? string : "no description");
    if (error) {
        error->cuda_result = result;
        error->driver_version = gpu->driver_version;
        kmla_i_text_join(error->library, sizeof error->library, gpu->cuda_library, "");
    }
    return KMLA_ERROR_CUDA;
}

// -----------------------------------------------------------------------------
// Libraries
// -----------------------------------------------------------------------------

#if defined(_WIN32)
#define KMLA_I_CUDA_NAME "nvcuda.dll"

static void* kmla_i_library_open(const char* name) { return (void*)LoadLibraryA(name); }
static const char* kmla_i_library_fault(void) { return "LoadLibrary failed"; }

static int kmla_i_library_symbol(void* library, const char* name, void* pointer) {
    struct HINSTANCE__* handle = (struct HINSTANCE__*)library;
    void (*symbol)(void) = (void (*)(void))GetProcAddress(handle, name);
    memcpy(pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}
#else
#define KMLA_I_CUDA_NAME "libcuda.so.1"

static void* kmla_i_library_open(const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }

// Why the last kmla_i_library_open failed.
static const char* kmla_i_library_fault(void) {
    const char* fault = dlerror();
    return fault ? fault : "no reason is known";
}

static int kmla_i_library_symbol(void* library, const char* name, void* pointer) {
    void* symbol = dlsym(library, name); // copied, as C knows no cast to a function pointer
    memcpy(pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}
#endif

static kmla_status kmla_i_missing_symbol(kmla_error* error, const char* library,
                                         const char* symbol) {
    char message[256];
    snprintf(message, sizeof message, "the library has no function %s", symbol);
    return kmla_i_fail_library(error, KMLA_ERROR_SYMBOL, library, message);
}

// A library that cannot be opened by the path that the caller gave.
static kmla_status kmla_i_fail_path(kmla_error* error, const char* argument, const char* path) {
    char message[512];
    snprintf(message, sizeof message, "%s cannot be opened: %s", argument, kmla_i_library_fault());
    return kmla_i_fail_library(error, KMLA_ERROR_LIBRARY, path, message);
}

#define KMLA_I_LOAD_SYMBOL(result, field, symbol, needed, parameters)                              \
    if (!kmla_i_library_symbol(library, symbol, &functions->field) && (needed)) {                  \
        return kmla_i_missing_symbol(error, name, symbol);                                         \
    }

// cuInit is once a process, and creates no context.
static kmla_status kmla_i_cuda_init(const kmla_gpu* gpu, kmla_error* error) {
    int result = gpu->cuda.init(0);
    if (result == 0) {
        return KMLA_OK;
    }
    kmla_i_fail_cuda(gpu, error, "cuInit", result);
    if (result == KMLA_I_STUB_LIBRARY) {
        kmla_i_fail_library(error, KMLA_ERROR_LIBRARY, gpu->cuda_library,
                            "this libcuda is the stub that a CUDA toolkit has for linking, not a "
                            "driver: a stubs folder is in the loader's search path, or the "
                            "driver's own libcuda is not");
        if (error) {
            error->cuda_result = result;
        }
        return KMLA_ERROR_LIBRARY;
    }
    return KMLA_ERROR_CUDA;
}

static kmla_status kmla_i_cuda_open(const kmla_gpu_desc* desc, kmla_gpu* gpu, kmla_error* error) {
    kmla_i_cuda* functions = &gpu->cuda;
    char* name = gpu->cuda_library;
    void* library = desc->cuda_handle;
    int version = 0;
    if (library) {
        kmla_i_text_join(name, sizeof gpu->cuda_library, "the caller's CUDA handle", "");
    } else {
        const char* path = desc->cuda_path ? desc->cuda_path : KMLA_I_CUDA_NAME;
        kmla_i_text_join(name, sizeof gpu->cuda_library, path, "");
        library = kmla_i_library_open(path);
    }
    if (!library && desc->cuda_path) {
        return kmla_i_fail_path(error, "cuda_path", name);
    }
    if (!library) {
        return kmla_i_fail_library(error, KMLA_ERROR_LIBRARY, name,
                                   "the CUDA driver was not found; tried " KMLA_I_CUDA_NAME
                                   " in the loader's search path");
    }
    KMLA_I_CUDA_FUNCTIONS(KMLA_I_LOAD_SYMBOL)
    if (functions->driver_version(&version) == 0) {
        gpu->driver_version = version;
    }
    return kmla_i_cuda_init(gpu, error);
}

// -----------------------------------------------------------------------------
// Libraries: NVRTC
// -----------------------------------------------------------------------------
#ifndef KIMI_MLA_NO_NVRTC

// The first line of a log that speaks of an error, else its first line.
static void kmla_i_first_error_line(const char* log, char* line, size_t room) {
    const char* start = strstr(log, "error");
    size_t length;
    if (!start) {
        start = log;
    }
    while (start > log && start[-1] != '\n') {
        --start;
    }
    length = strcspn(start, "\n");
    if (length >= room) {
        length = room - 1;
    }
    memcpy(line, start, length);
    line[length] = 0;
}

static kmla_status kmla_i_fail_nvrtc(const kmla_i_nvrtc* nvrtc, kmla_error* error,
                                     kmla_status status, int result, const char* message) {
    kmla_i_fail_library(error, status, nvrtc->library, message);
    if (error) {
        error->nvrtc_result = result;
        error->nvrtc_version = nvrtc->release;
    }
    return status;
}

static kmla_status kmla_i_fail_nvrtc_call(const kmla_i_nvrtc* nvrtc, kmla_error* error,
                                          kmla_status status, const char* call, int result) {
    char message[256];
    snprintf(message, sizeof message, "%s failed: %s (%d)", call, nvrtc->error_string(result),
             result);
    return kmla_i_fail_nvrtc(nvrtc, error, status, result, message);
}

// The names of NVRTC and the first release of CUDA that has them; 0 is any. Newest first.
typedef struct kmla_i_nvrtc_name {
    const char* name;
    int32_t release;
} kmla_i_nvrtc_name;

static const kmla_i_nvrtc_name kmla_i_nvrtc_names[] = {
#if defined(_WIN32)
    {"nvrtc64_130_0.dll", 13000}, {"nvrtc64_120_0.dll", 12000}, {"nvrtc64_112_0.dll", 11020}
#else
    {"libnvrtc.so.13", 13000},   {"libnvrtc.so.12", 12000},
    {"libnvrtc.so.11.2", 11020}, {"libnvrtc.so", 0},
#endif
};

// Where NVRTC is looked for after the loader's own folders: below these roots.
typedef struct kmla_i_nvrtc_place {
    const char* variable; // of the environment, NULL: below is the whole path
    const char* below;
} kmla_i_nvrtc_place;

static const kmla_i_nvrtc_place kmla_i_nvrtc_places[] = {
#if defined(_WIN32)
    {"CUDA_PATH", "\\bin\\x64\\"}, {"CUDA_PATH", "\\bin\\"},
    {"CUDA_HOME", "\\bin\\x64\\"}, {"CUDA_HOME", "\\bin\\"},
#else
    {"CUDA_PATH", "/lib64/"}, {"CUDA_PATH", "/lib/"}, // lib64: toolkits; lib: pip wheels
    {"CUDA_HOME", "/lib64/"}, {"CUDA_HOME", "/lib/"},
    {NULL, "/usr/local/cuda/lib64/"},
#endif
};

#define KMLA_I_FOLDER_BYTES 1000

// The folder of a place with its last slash, "" if its variable is not set or far too long.
static void kmla_i_nvrtc_folder(const kmla_i_nvrtc_place* place, char* folder) {
    const char* root = place->variable ? getenv(place->variable) : "";
    folder[0] = 0;
    if (root && (root[0] || !place->variable) &&
        strlen(root) + strlen(place->below) < KMLA_I_FOLDER_BYTES) {
        kmla_i_text_join(folder, KMLA_I_FOLDER_BYTES, root, place->below);
    }
}

// Opens the first of NVRTC's names in a folder ("" is the loader's own). `newer` 0 takes releases
// that the driver's CUDA has too (all, if that is not known), 1 the others.
static void* kmla_i_nvrtc_open_in(const char* folder, int newer, int32_t driver_version,
                                  char* name, size_t room) {
    char path[KMLA_I_FOLDER_BYTES + 24]; // the longest name has 17
    void* library = NULL;
    int32_t i;
    for (i = 0; i < KMLA_I_COUNT(kmla_i_nvrtc_names) && !library; ++i) {
        int is_newer = driver_version && kmla_i_nvrtc_names[i].release > driver_version;
        if (is_newer == newer) {
            kmla_i_text_join(path, sizeof path, folder, kmla_i_nvrtc_names[i].name);
            kmla_i_text_join(name, room, path, "");
            library = kmla_i_library_open(path);
        }
    }
    return library;
}

// A library that the process has, from wherever it came.
static void* kmla_i_library_loaded(const char* name) {
#if defined(_WIN32)
    return (void*)GetModuleHandleA(name);
#elif defined(RTLD_NOLOAD)
    return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
#else
    (void)name;
    return NULL;
#endif
}

static void* kmla_i_nvrtc_loaded(char* name, size_t room) {
    void* library = NULL;
    int32_t i;
    for (i = 0; i < KMLA_I_COUNT(kmla_i_nvrtc_names) && !library; ++i) {
        kmla_i_text_join(name, room, kmla_i_nvrtc_names[i].name, "");
        library = kmla_i_library_loaded(name);
    }
    return library;
}

static void* kmla_i_nvrtc_search(int32_t driver_version, char* name, size_t room) {
    void* library = kmla_i_nvrtc_loaded(name, room);
    int newer;
    int32_t i;
    for (newer = 0; newer < 2 && !library; ++newer) {
        library = kmla_i_nvrtc_open_in("", newer, driver_version, name, room);
        for (i = 0; i < KMLA_I_COUNT(kmla_i_nvrtc_places) && !library; ++i) {
            char folder[KMLA_I_FOLDER_BYTES];
            kmla_i_nvrtc_folder(&kmla_i_nvrtc_places[i], folder);
            if (folder[0]) {
                library = kmla_i_nvrtc_open_in(folder, newer, driver_version, name, room);
            }
        }
    }
    return library;
}

// Every name and every folder that kmla_i_nvrtc_search tries.
static kmla_status kmla_i_nvrtc_not_found(kmla_error* error) {
    char message[sizeof error->message] = "";
    kmla_i_text text = {message, sizeof message, 0};
    int32_t i;
    kmla_i_text_add(&text, "NVRTC was not found; tried");
    for (i = 0; i < KMLA_I_COUNT(kmla_i_nvrtc_names); ++i) {
        kmla_i_text_add(&text, i ? ", " : " ");
        kmla_i_text_add(&text, kmla_i_nvrtc_names[i].name);
    }
    kmla_i_text_add(&text, " in the loader's search path");
    for (i = 0; i < KMLA_I_COUNT(kmla_i_nvrtc_places); ++i) {
        char folder[KMLA_I_FOLDER_BYTES];
        kmla_i_nvrtc_folder(&kmla_i_nvrtc_places[i], folder);
        if (folder[0]) {
            kmla_i_text_add(&text, ", ");
            kmla_i_text_add(&text, folder);
        }
    }
    return kmla_i_fail_library(error, KMLA_ERROR_LIBRARY, "libnvrtc", message);
}

// Gives the log to the caller, and a refusal's first line to the error.
static kmla_status kmla_i_report_log(const kmla_i_nvrtc* nvrtc, void* program, int compile_result,
                                     const char* options, const kmla_log* log,
                                     kmla_error* error) {
    size_t bytes = 0;
    char* text = NULL;
    char line[320];
    char message[sizeof error->message];
    const char* call = "nvrtcGetProgramLogSize";
    int result = nvrtc->log_bytes(program, &bytes);
    if (result == 0 && bytes > 1) {
        text = (char*)KMLA_MALLOC(bytes);
        if (!text) {
            return kmla_i_fail(error, KMLA_ERROR_MEMORY, "no memory for NVRTC's log");
        }
        call = "nvrtcGetProgramLog";
        result = nvrtc->log(program, text);
    }
    if (result == 0 && text && log && log->write) {
        log->write(log->user, text);
    }
    kmla_i_first_error_line(result == 0 && text ? text : "no log", line, sizeof line);
    KMLA_FREE(text);
    if (compile_result == 0) {
        return result ? kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_COMPILE, call, result)
                      : KMLA_OK;
    }
    snprintf(message, sizeof message, "nvrtcCompileProgram of NVRTC %d.%d failed: %s: %s%s%s",
             nvrtc->release / 1000, nvrtc->release % 1000 / 10,
             nvrtc->error_string(compile_result), line, options[0] ? "; options " : "", options);
    return kmla_i_fail_nvrtc(nvrtc, error,
                             compile_result == KMLA_I_NVRTC_BUILTINS_FAILED ? KMLA_ERROR_LIBRARY
                                                                            : KMLA_ERROR_COMPILE,
                             compile_result, message);
}

// NVRTC looks for its second library, the builtins, when it first compiles. A text that it must
// refuse has it do so now.
static kmla_status kmla_i_check_builtins(const kmla_i_nvrtc* nvrtc, kmla_error* error) {
    void* program = NULL;
    kmla_status status = KMLA_OK;
    int result = nvrtc->create(&program, "#error", "builtins.cu", 0, NULL, NULL);
    if (result != 0) {
        return kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_LIBRARY, "nvrtcCreateProgram",
                                      result);
    }
    result = nvrtc->compile(program, 0, NULL);
    if (result == KMLA_I_NVRTC_BUILTINS_FAILED) {
        status = kmla_i_report_log(nvrtc, program, result, "", NULL, error);
    }
    nvrtc->destroy(&program);
    return status;
}

static kmla_status kmla_i_nvrtc_open(const kmla_gpu_desc* desc, kmla_gpu* gpu, kmla_error* error) {
    kmla_i_nvrtc* functions = &gpu->nvrtc;
    char* name = functions->library;
    int major = 0, minor = 0, result;
    void* library = desc->nvrtc_handle;
    if (library) {
        kmla_i_text_join(name, sizeof functions->library, "the caller's NVRTC handle", "");
    } else if (desc->nvrtc_path) {
        kmla_i_text_join(name, sizeof functions->library, desc->nvrtc_path, "");
        library = kmla_i_library_open(desc->nvrtc_path);
    } else {
        library =
            kmla_i_nvrtc_search(gpu->driver_version, name, sizeof functions->library);
    }
    if (!library) {
        return desc->nvrtc_path ? kmla_i_fail_path(error, "nvrtc_path", name)
                                : kmla_i_nvrtc_not_found(error);
    }
    KMLA_I_NVRTC_FUNCTIONS(KMLA_I_LOAD_SYMBOL)
    result = functions->version(&major, &minor);
    if (result != 0) {
        return kmla_i_fail_nvrtc_call(functions, error, KMLA_ERROR_LIBRARY, "nvrtcVersion", result);
    }
    functions->release = major * 1000 + minor * 10;
    return kmla_i_check_builtins(functions, error);
}

#else // KIMI_MLA_NO_NVRTC

static kmla_status kmla_i_nvrtc_open(const kmla_gpu_desc* desc, kmla_gpu* gpu, kmla_error* error) {
    (void)desc, (void)gpu, (void)error;
    return KMLA_OK;
}

#endif // KIMI_MLA_NO_NVRTC

// -----------------------------------------------------------------------------
// Open
// -----------------------------------------------------------------------------

KMLA_API kmla_status kmla_gpu_open(const kmla_gpu_desc* desc, kmla_gpu** gpu, kmla_error* error) {
    static const kmla_gpu_desc defaults = {NULL, NULL, NULL, NULL, 0, 0, {NULL, NULL, NULL}};
    kmla_gpu* opened;
    kmla_status status = KMLA_OK;
    if (!gpu) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "gpu is NULL");
    }
    if (!desc) {
        desc = &defaults;
    }
    if (!desc->cache.load != !desc->cache.store) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "cache.load and cache.store go together");
    }
    opened = (kmla_gpu*)KMLA_MALLOC(sizeof *opened);
    if (!opened) {
        return kmla_i_fail(error, KMLA_ERROR_MEMORY, "no memory for the GPU object");
    }
    memset(opened, 0, sizeof *opened);
    opened->without_cuda = desc->without_cuda;
    opened->without_nvrtc = desc->without_nvrtc;
    opened->cache = desc->cache;
    if (!desc->without_cuda) {
        status = kmla_i_cuda_open(desc, opened, error);
    }
    if (status == KMLA_OK && !desc->without_nvrtc) {
        status = kmla_i_nvrtc_open(desc, opened, error);
    }
    if (status != KMLA_OK) {
        KMLA_FREE(opened);
        return status;
    }
    *gpu = opened;
    return KMLA_OK;
}

// -----------------------------------------------------------------------------
// Contexts
// -----------------------------------------------------------------------------

static kmla_status kmla_i_current_context(const kmla_gpu* gpu, void** context, kmla_error* error) {
    int result;
    if (!gpu) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "gpu is NULL");
    }
    if (gpu->without_cuda) {
        return kmla_i_fail(error, KMLA_ERROR_LIBRARY,
                           "libcuda is needed, but the object was opened without_cuda");
    }
    *context = NULL;
    result = gpu->cuda.context_current(context);
    if (result != 0) {
        return kmla_i_fail_cuda(gpu, error, "cuCtxGetCurrent", result);
    }
    if (!*context) {
        return kmla_i_fail(error, KMLA_ERROR_CONTEXT, "no CUDA context is current on this thread");
    }
    if (gpu->context && *context != gpu->context) {
        return kmla_i_fail(error, KMLA_ERROR_CONTEXT,
                           "the current context is not the one that the kernels were prepared in");
    }
    return KMLA_OK;
}

// A green context has some of the card's SMs. If the driver does not say, the card's count stays.
static void kmla_i_count_multiprocessors(const kmla_gpu* gpu, void* context, int32_t* count) {
    kmla_i_resource resource;
    memset(&resource, 0, sizeof resource);
    if (gpu->cuda.context_resource && // else the driver is older than 12.4: no green contexts
        gpu->cuda.context_resource(context, &resource, KMLA_I_RESOURCE_SM) == 0 &&
        resource.multiprocessors > 0) {
        *count = (int32_t)resource.multiprocessors;
    }
}

static kmla_status kmla_i_device_of_context(const kmla_gpu* gpu, void* context,
                                            kmla_device* device, kmla_error* error) {
    static const int attributes[] = {KMLA_I_DEVICE_COMPUTE_MAJOR, KMLA_I_DEVICE_COMPUTE_MINOR,
                                     KMLA_I_DEVICE_MULTIPROCESSORS, KMLA_I_DEVICE_SHARED_BYTES,
                                     KMLA_I_DEVICE_SHARED_BYTES_SM}; // in kmla_device's order
    int values[5] = {0, 0, 0, 0, 0};
    int ordinal = 0, i;
    int result = gpu->cuda.context_device(&ordinal);
    if (result != 0) {
        return kmla_i_fail_cuda(gpu, error, "cuCtxGetDevice", result);
    }
    for (i = 0; i < 5; ++i) {
        result = gpu->cuda.device_attribute(&values[i], attributes[i], ordinal);
        if (result != 0) {
            return kmla_i_fail_cuda(gpu, error, "cuDeviceGetAttribute", result);
        }
    }
    device->compute_major = values[0];
    device->compute_minor = values[1];
    device->multiprocessors = values[2];
    kmla_i_count_multiprocessors(gpu, context, &device->multiprocessors);
    device->shared_bytes = values[3];
    device->shared_bytes_sm = values[4];
    return KMLA_OK;
}

KMLA_API kmla_status kmla_gpu_device(kmla_gpu* gpu, kmla_device* device, kmla_error* error) {
    void* context = NULL;
    kmla_status status;
    if (!device) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "device is NULL");
    }
    status = kmla_i_current_context(gpu, &context, error);
    return status == KMLA_OK ? kmla_i_device_of_context(gpu, context, device, error) : status;
}

// -----------------------------------------------------------------------------
// Images: a CUBIN behind a head that says what it is of, so that it may lie in a file
// -----------------------------------------------------------------------------

// The head, little-endian: magic, the int32 and the uint64 in this order. The checksum is of all
// that comes before it and of the CUBIN.
typedef struct kmla_i_image_head {
    int32_t version;                     // KMLA_VERSION
    int32_t variant;                     // as in kmla_image
    int32_t compute_major;
    int32_t compute_minor;
    int32_t suffix;                      // of the architecture: 'a' of sm_90a, else 0
    int32_t shared_bytes;                // as in the plan; 0 for the support kernels
    int32_t resident;
    int32_t stages;
    uint64_t source_hash;
    uint64_t cubin_bytes;
    uint64_t checksum;
} kmla_i_image_head;

#define KMLA_I_IMAGE_MAGIC "KMLA IMG"
#define KMLA_I_IMAGE_HEAD_BYTES 64
#define KMLA_I_IMAGE_CHECKSUM_OFFSET 56
#define KMLA_I_HASH_START 0xCBF29CE484222325ull // FNV-1a

static uint64_t kmla_i_hash(uint64_t hash, const void* data, size_t bytes) {
    const unsigned char* from = (const unsigned char*)data;
    size_t i;
    for (i = 0; i < bytes; ++i) {
        hash = (hash ^ from[i]) * 0x100000001B3ull;
    }
    return hash;
}

// Of all that the compiler reads: the files of the device source, the facts and the structs.
static uint64_t kmla_i_source_hash(void) {
    uint64_t hash = kmla_i_device_parts_hash();
    hash = kmla_i_hash(hash, kmla_i_device_facts, sizeof kmla_i_device_facts - 1);
    return kmla_i_hash(hash, kmla_i_device_structs, sizeof kmla_i_device_structs - 1);
}

// The Hopper reader's instructions are sm_90a's alone.
static int32_t kmla_i_architecture_suffix(const kmla_plan* plan) {
    return plan && plan->reader == KMLA_READER_HOPPER ? 'a' : 0;
}

// What the head of a plan's image says, up to the CUBIN's size and the checksum.
static kmla_i_image_head kmla_i_image_head_of(const kmla_plan* plan, const kmla_device* device) {
    kmla_i_image_head head;
    memset(&head, 0, sizeof head);
    head.version = KMLA_VERSION;
    head.compute_major = device->compute_major;
    head.compute_minor = device->compute_minor;
    head.suffix = kmla_i_architecture_suffix(plan);
    if (plan) {
        head.variant = kmla_plan_variant(plan);
        head.shared_bytes = plan->shared_bytes;
        head.resident = plan->resident;
        head.stages = plan->stages;
    }
    head.source_hash = kmla_i_source_hash();
    return head;
}

static uint64_t kmla_i_read_little(const unsigned char** from, int bytes) {
    uint64_t value = 0;
    int i;
    for (i = 0; i < bytes; ++i) {
        value |= (uint64_t)*(*from)++ << (8 * i);
    }
    return value;
}

static int32_t kmla_i_read_int32(const unsigned char** from) {
    return (int32_t)(uint32_t)kmla_i_read_little(from, 4);
}

static uint64_t kmla_i_image_checksum(const unsigned char* data, size_t bytes) {
    uint64_t hash = kmla_i_hash(KMLA_I_HASH_START, data, KMLA_I_IMAGE_CHECKSUM_OFFSET);
    return kmla_i_hash(hash, data + KMLA_I_IMAGE_HEAD_BYTES, bytes - KMLA_I_IMAGE_HEAD_BYTES);
}

// Takes an image's head, if the image is whole and this header's own.
static kmla_status kmla_i_read_image(const void* data, size_t bytes, kmla_i_image_head* head,
                                     kmla_error* error) {
    const unsigned char* from = (const unsigned char*)data;
    if (!data || bytes == 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "image is empty");
    }
    if ((uintptr_t)data % 8 != 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "image is not aligned to 8 bytes");
    }
    if (bytes < KMLA_I_IMAGE_HEAD_BYTES) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image is cut off: it has %llu bytes, its head alone has %d",
                           (unsigned long long)bytes, KMLA_I_IMAGE_HEAD_BYTES);
    }
    if (memcmp(from, KMLA_I_IMAGE_MAGIC, 8) != 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image is none that kmla_gpu_compile made: its magic is wrong");
    }
    from += 8;
    head->version = kmla_i_read_int32(&from);
    head->variant = kmla_i_read_int32(&from);
    head->compute_major = kmla_i_read_int32(&from);
    head->compute_minor = kmla_i_read_int32(&from);
    head->suffix = kmla_i_read_int32(&from);
    head->shared_bytes = kmla_i_read_int32(&from);
    head->resident = kmla_i_read_int32(&from);
    head->stages = kmla_i_read_int32(&from);
    head->source_hash = kmla_i_read_little(&from, 8);
    head->cubin_bytes = kmla_i_read_little(&from, 8);
    head->checksum = kmla_i_read_little(&from, 8);
    if (head->version != KMLA_VERSION) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image was made by version %d of the header, this is version %d",
                           (int)head->version, KMLA_VERSION);
    }
    if (head->source_hash != kmla_i_source_hash()) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image was made of another device source: its hash is %016llx, this "
                           "header's is %016llx",
                           (unsigned long long)head->source_hash,
                           (unsigned long long)kmla_i_source_hash());
    }
    if (head->cubin_bytes == 0 || head->cubin_bytes != bytes - KMLA_I_IMAGE_HEAD_BYTES) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image has a CUBIN of %llu bytes, its head says %llu",
                           (unsigned long long)(bytes - KMLA_I_IMAGE_HEAD_BYTES),
                           (unsigned long long)head->cubin_bytes);
    }
    if (head->checksum != kmla_i_image_checksum((const unsigned char*)data, bytes)) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image is damaged: its checksum is not that of its bytes");
    }
    return KMLA_OK;
}

KMLA_API kmla_status kmla_image_open(const void* data, size_t bytes, kmla_image* image,
                                     kmla_error* error) {
    kmla_i_image_head head;
    kmla_status status;
    if (!image) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "image is NULL");
    }
    status = kmla_i_read_image(data, bytes, &head, error);
    if (status == KMLA_OK) {
        image->data = (void*)data;
        image->bytes = bytes;
        image->variant = head.variant;
        image->compute_major = head.compute_major;
        image->compute_minor = head.compute_minor;
        image->borrowed = 1;
    }
    return status;
}

KMLA_API void kmla_image_free(kmla_image* image) {
    if (image) {
        if (!image->borrowed) {
            KMLA_FREE(image->data);
        }
        memset(image, 0, sizeof *image);
    }
}

// The image must be what the plan would be compiled to for this card. What counts is the head: the
// driver is given no size, and reads where the CUBIN leads it.
static kmla_status kmla_i_check_image(const kmla_image* image, const kmla_plan* plan,
                                      const kmla_device* device, kmla_error* error) {
    const kmla_i_image_head wanted = kmla_i_image_head_of(plan, device);
    kmla_i_image_head head;
    kmla_status status = kmla_i_read_image(image->data, image->bytes, &head, error);
    if (status != KMLA_OK) {
        return status;
    }
    if (head.variant != wanted.variant) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "image has variant %d, the plan needs %d",
                           (int)head.variant, (int)wanted.variant);
    }
    if (head.compute_major != wanted.compute_major || head.compute_minor != wanted.compute_minor ||
        head.suffix != wanted.suffix) {
        return kmla_i_fail(error, KMLA_ERROR_ARCHITECTURE,
                           "image is for compute capability %d.%d%s, the plan needs %d.%d%s on "
                           "this card",
                           (int)head.compute_major, (int)head.compute_minor,
                           head.suffix ? "a" : "", (int)wanted.compute_major,
                           (int)wanted.compute_minor, wanted.suffix ? "a" : "");
    }
    if (head.shared_bytes != wanted.shared_bytes || head.resident != wanted.resident ||
        head.stages != wanted.stages) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "image has shared_bytes %d, resident %d, stages %d; the plan has %d, "
                           "%d, %d",
                           (int)head.shared_bytes, (int)head.resident, (int)head.stages,
                           (int)wanted.shared_bytes, (int)wanted.resident, (int)wanted.stages);
    }
    return KMLA_OK;
}

// -----------------------------------------------------------------------------
// Plans that a GPU runs
// -----------------------------------------------------------------------------

static kmla_status kmla_i_check_gpu_reader(const kmla_plan* plan, kmla_error* error) {
    if (plan->reader == KMLA_READER_HOST) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "plan is for the host reader: it was made without a device");
    }
    return KMLA_OK;
}

// Of compile and prepare, where NULL stands for the support kernels.
static kmla_status kmla_i_check_plan_or_null(const kmla_plan* plan, kmla_error* error) {
    kmla_status status = plan ? kmla_i_check_whole_plan(plan, error) : KMLA_OK;
    return plan && status == KMLA_OK ? kmla_i_check_gpu_reader(plan, error) : status;
}

// -----------------------------------------------------------------------------
// Compile: give NVRTC the device source, take its CUBIN
// -----------------------------------------------------------------------------
#ifndef KIMI_MLA_NO_NVRTC

// Facts, the first file (it has the integer types), the argument structs, all other files.
static void kmla_i_add_device_source(kmla_i_text* text) {
    const kmla_i_device_part* parts;
    size_t count = kmla_i_device_part_list(&parts);
    size_t i;
    int first_file = 1;
    kmla_i_text_add(text, kmla_i_device_facts);
    for (i = 0; i < count; ++i) {
        if (parts[i].first_line == 1) { // later parts of a file just go on
            if (i > 0 && first_file) {
                kmla_i_text_add(text, kmla_i_device_structs);
                first_file = 0;
            }
            kmla_i_text_add(text, "#line 1 \"");
            kmla_i_text_add(text, parts[i].file);
            kmla_i_text_add(text, "\"\n");
        }
        kmla_i_text_add(text, parts[i].text);
    }
}

KMLA_API kmla_status kmla_device_source(char* text, size_t* bytes, kmla_error* error) {
    kmla_i_text source = {NULL, 0, 0};
    size_t room;
    if (!bytes) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "bytes is NULL");
    }
    room = *bytes;
    kmla_i_add_device_source(&source);
    *bytes = source.length + 1;
    if (!text) {
        return KMLA_OK;
    }
    if (room < *bytes) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "*bytes is %llu, the source needs %llu",
                           (unsigned long long)room, (unsigned long long)*bytes);
    }
    source.data = text;
    source.room = room;
    source.length = 0;
    kmla_i_add_device_source(&source);
    return KMLA_OK;
}

// The architecture must be the card's own: a step down would hide what the card can do.
static kmla_status kmla_i_check_architecture(const kmla_i_nvrtc* nvrtc, const kmla_plan* plan,
                                             const kmla_device* device, kmla_error* error) {
    int wanted = device->compute_major * 10 + device->compute_minor;
    int known[256]; // NVRTC 13.0 has 12
    int count = 0, i;
    char message[sizeof error->message];
    kmla_i_text text = {message, sizeof message, 0};
    int result = nvrtc->architecture_count(&count);
    if (result != 0 || count > KMLA_I_COUNT(known)) {
        return kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_COMPILE,
                                      "nvrtcGetNumSupportedArchs", result);
    }
    result = nvrtc->architectures(known);
    if (result != 0) {
        return kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_COMPILE, "nvrtcGetSupportedArchs",
                                      result);
    }
    if (kmla_i_architecture_suffix(plan) && nvrtc->release < KMLA_I_NVRTC_HOPPER) {
        snprintf(message, sizeof message,
                 "NVRTC %d.%d cannot compile for sm_90a, which the plan's Hopper reader needs and "
                 "NVRTC 12.0 brought; shape.reader = KMLA_READER_PORTABLE needs only sm_90",
                 nvrtc->release / 1000, nvrtc->release % 1000 / 10);
        return kmla_i_fail_nvrtc(nvrtc, error, KMLA_ERROR_ARCHITECTURE, 0, message);
    }
    snprintf(message, sizeof message,
             "NVRTC %d.%d cannot compile for compute capability %d.%d (sm_%d); it supports",
             nvrtc->release / 1000, nvrtc->release % 1000 / 10, device->compute_major,
             device->compute_minor, wanted);
    text.length = strlen(message);
    for (i = 0; i < count; ++i) {
        char name[32];
        if (known[i] == wanted) {
            return KMLA_OK;
        }
        snprintf(name, sizeof name, "%s sm_%d", i ? "," : "", known[i]);
        kmla_i_text_add(&text, name);
    }
    return kmla_i_fail_nvrtc(nvrtc, error, KMLA_ERROR_ARCHITECTURE, 0, message);
}

static void kmla_i_write_little(unsigned char** to, uint64_t value, int bytes) {
    for (; bytes > 0; --bytes, value >>= 8) {
        *(*to)++ = (unsigned char)(value & 255);
    }
}

// The reverse of kmla_i_read_image; the CUBIN lies behind the head already.
static void kmla_i_write_image_head(const kmla_i_image_head* head, unsigned char* data,
                                    size_t bytes) {
    unsigned char* to = data + 8;
    memcpy(data, KMLA_I_IMAGE_MAGIC, 8);
    kmla_i_write_little(&to, (uint32_t)head->version, 4);
    kmla_i_write_little(&to, (uint32_t)head->variant, 4);
    kmla_i_write_little(&to, (uint32_t)head->compute_major, 4);
    kmla_i_write_little(&to, (uint32_t)head->compute_minor, 4);
    kmla_i_write_little(&to, (uint32_t)head->suffix, 4);
    kmla_i_write_little(&to, (uint32_t)head->shared_bytes, 4);
    kmla_i_write_little(&to, (uint32_t)head->resident, 4);
    kmla_i_write_little(&to, (uint32_t)head->stages, 4);
    kmla_i_write_little(&to, head->source_hash, 8);
    kmla_i_write_little(&to, head->cubin_bytes, 8);
    kmla_i_write_little(&to, kmla_i_image_checksum(data, bytes), 8);
}

static kmla_status kmla_i_take_cubin(const kmla_i_nvrtc* nvrtc, void* program,
                                     const kmla_plan* plan, const kmla_device* device,
                                     kmla_image* image, kmla_error* error) {
    kmla_i_image_head head = kmla_i_image_head_of(plan, device);
    size_t bytes = 0;
    unsigned char* data;
    int result = nvrtc->cubin_bytes(program, &bytes);
    if (result != 0) {
        return kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_COMPILE, "nvrtcGetCUBINSize",
                                      result);
    }
    data = (unsigned char*)KMLA_MALLOC(KMLA_I_IMAGE_HEAD_BYTES + bytes);
    if (!data) {
        return kmla_i_fail(error, KMLA_ERROR_MEMORY, "no memory for an image");
    }
    result = nvrtc->cubin(program, (char*)data + KMLA_I_IMAGE_HEAD_BYTES);
    if (result != 0) {
        KMLA_FREE(data);
        return kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_COMPILE, "nvrtcGetCUBIN",
                                      result);
    }
    head.cubin_bytes = bytes;
    kmla_i_write_image_head(&head, data, KMLA_I_IMAGE_HEAD_BYTES + bytes);
    image->data = data;
    image->bytes = KMLA_I_IMAGE_HEAD_BYTES + bytes;
    image->variant = head.variant;
    image->compute_major = head.compute_major;
    image->compute_minor = head.compute_minor;
    return KMLA_OK;
}

// What a compile is told. The options are the whole difference of variants.
typedef struct kmla_i_options {
    char text[10][48];
    const char* list[11]; // of text; one more for what only changes the log
    int count;
} kmla_i_options;

static void kmla_i_add_option(kmla_i_options* options, const char* text) {
    char* kept = options->text[options->count];
    kmla_i_text_join(kept, sizeof options->text[0], text, "");
    options->list[options->count++] = kept;
}

static void kmla_i_add_define(kmla_i_options* options, const char* name, int32_t value) {
    char text[48];
    snprintf(text, sizeof text, "-D%s=%d", name, (int)value);
    kmla_i_add_option(options, text);
}

static void kmla_i_compile_options(const kmla_plan* plan, const kmla_device* device,
                                   kmla_i_options* options) {
    char architecture[48];
    options->count = 0;
    snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d%d%s",
             (int)device->compute_major, (int)device->compute_minor,
             kmla_i_architecture_suffix(plan) ? "a" : "");
    kmla_i_add_option(options, architecture);
    kmla_i_add_option(options, "--std=c++17");
    // Else what is fused, and so bits, would vary with the tile.
    kmla_i_add_option(options, "--fmad=false");
    if (plan) {
        if (plan->reader == KMLA_READER_HOPPER) {
            kmla_i_add_option(options, "-DKMLA_HOPPER");
        }
        kmla_i_add_define(options, "KMLA_KV_FORMAT", plan->shape.kv_format);
        kmla_i_add_define(options, "KMLA_TILE", plan->tile);
        kmla_i_add_define(options, "KMLA_RESIDENT", plan->resident);
        kmla_i_add_define(options, "KMLA_STAGES", plan->stages);
        kmla_i_add_define(options, "KMLA_SHARED_BYTES", plan->shared_bytes);
    }
}

// Compiles source text for one architecture.
static kmla_status kmla_i_compile_text(const kmla_i_nvrtc* nvrtc, const char* source,
                                       const kmla_plan* plan, const kmla_device* device,
                                       const kmla_log* log, kmla_image* image, kmla_error* error) {
    kmla_i_options options;
    char said[sizeof options.text] = "";
    kmla_i_text text = {said, sizeof said, 0};
    void* program = NULL;
    kmla_status status;
    int result, i;
    kmla_i_compile_options(plan, device, &options);
    if (log) {
        options.list[options.count++] = "--ptxas-options=-v"; // registers, spills, shared memory
    }
    for (i = 0; i < options.count; ++i) {
        kmla_i_text_add(&text, i ? " " : "");
        kmla_i_text_add(&text, options.list[i]);
    }
    result = nvrtc->create(&program, source, "kimi_mla.cu", 0, NULL, NULL);
    if (result != 0) {
        return kmla_i_fail_nvrtc_call(nvrtc, error, KMLA_ERROR_COMPILE, "nvrtcCreateProgram",
                                      result);
    }
    result = nvrtc->compile(program, options.count, options.list);
    status = kmla_i_report_log(nvrtc, program, result, said, log, error);
    if (status == KMLA_OK) {
        status = kmla_i_take_cubin(nvrtc, program, plan, device, image, error);
    }
    nvrtc->destroy(&program);
    return status;
}

static kmla_status kmla_i_check_reader_runs(const kmla_plan* plan, const kmla_device* device,
                                            kmla_error* error) {
    if (plan && plan->reader == KMLA_READER_HOPPER &&
        (device->compute_major != 9 || device->compute_minor != 0)) {
        return kmla_i_fail(error, KMLA_ERROR_ARCHITECTURE,
                           "plan.reader is the Hopper reader, for compute capability 9.0; the "
                           "device has %d.%d",
                           (int)device->compute_major, (int)device->compute_minor);
    }
    return KMLA_OK;
}

static kmla_status kmla_i_compile(const kmla_gpu* gpu, const kmla_plan* plan,
                                  const kmla_device* device, const kmla_log* log,
                                  kmla_image* image, kmla_error* error) {
    size_t source_bytes = 0;
    char* source;
    kmla_status status = kmla_i_check_architecture(&gpu->nvrtc, plan, device, error);
    if (status != KMLA_OK) {
        return status;
    }
    kmla_device_source(NULL, &source_bytes, NULL);
    source = (char*)KMLA_MALLOC(source_bytes);
    if (!source) {
        return kmla_i_fail(error, KMLA_ERROR_MEMORY, "no memory for the device source");
    }
    status = kmla_device_source(source, &source_bytes, error);
    if (status == KMLA_OK) {
        status = kmla_i_compile_text(&gpu->nvrtc, source, plan, device, log, image, error);
    }
    KMLA_FREE(source);
    return status;
}

// -----------------------------------------------------------------------------
// Cache of images: the caller's two functions, or the files further down
// -----------------------------------------------------------------------------

#define KMLA_I_MOST_IMAGE_BYTES ((size_t)1 << 28) // more is no image but a fault

// What decides about an image's bytes, hashed: version, source, NVRTC, and the options with the
// architecture. Architecture and variant come first in clear, for who looks at a list of keys.
static void kmla_i_cache_key(const kmla_i_image_head* head, int32_t nvrtc_release,
                             const kmla_i_options* options, char* key) {
    char facts[64];
    uint64_t hash;
    int i;
    snprintf(facts, sizeof facts, "%d %016llx %d", (int)head->version,
             (unsigned long long)head->source_hash, (int)nvrtc_release);
    hash = kmla_i_hash(KMLA_I_HASH_START, facts, strlen(facts) + 1);
    for (i = 0; i < options->count; ++i) { // each with its final 0
        hash = kmla_i_hash(hash, options->list[i], strlen(options->list[i]) + 1);
    }
    snprintf(key, KMLA_CACHE_KEY_BYTES, "sm_%d%d%s-%d-%016llx", (int)head->compute_major,
             (int)head->compute_minor, head->suffix ? "a" : "", (int)head->variant,
             (unsigned long long)hash);
}

// 1 and an image of the plan for this device, or 0: nothing is there, or nothing that is right.
static int kmla_i_cache_load(const kmla_cache* cache, const char* key, const kmla_plan* plan,
                             const kmla_device* device, kmla_image* image) {
    size_t bytes = cache->load ? cache->load(cache->user, key, NULL, 0) : 0;
    kmla_image loaded;
    memset(&loaded, 0, sizeof loaded);
    if (bytes == 0 || bytes > KMLA_I_MOST_IMAGE_BYTES) {
        return 0;
    }
    loaded.data = KMLA_MALLOC(bytes);
    loaded.bytes = bytes;
    if (!loaded.data || cache->load(cache->user, key, loaded.data, bytes) != bytes ||
        kmla_i_check_image(&loaded, plan, device, NULL) != KMLA_OK) {
        kmla_image_free(&loaded);
        return 0;
    }
    kmla_image_open(loaded.data, bytes, image, NULL);
    image->borrowed = 0;
    return 1;
}

// Takes an image from the cache if it may and can, else compiles it and has the cache keep it.
static kmla_status kmla_i_make_image(const kmla_gpu* gpu, const kmla_plan* plan,
                                     const kmla_device* device, const kmla_log* log, int may_load,
                                     kmla_image* image, int* loaded, kmla_error* error) {
    kmla_status status = kmla_i_check_reader_runs(plan, device, error);
    char key[KMLA_CACHE_KEY_BYTES];
    *loaded = 0;
    if (status == KMLA_OK && gpu->without_nvrtc) {
        status = kmla_i_fail(error, KMLA_ERROR_LIBRARY,
                             "NVRTC is needed to compile, but the object was opened "
                             "without_nvrtc");
    }
    if (status != KMLA_OK) {
        return status;
    }
    if (gpu->cache.load) {
        const kmla_i_image_head head = kmla_i_image_head_of(plan, device);
        kmla_i_options options;
        kmla_i_compile_options(plan, device, &options);
        kmla_i_cache_key(&head, gpu->nvrtc.release, &options, key);
        *loaded = may_load && kmla_i_cache_load(&gpu->cache, key, plan, device, image);
    }
    if (!*loaded) {
        status = kmla_i_compile(gpu, plan, device, log, image, error);
        if (status == KMLA_OK && gpu->cache.store) {
            gpu->cache.store(gpu->cache.user, key, image->data, image->bytes);
        }
    }
    return status;
}

#else // KIMI_MLA_NO_NVRTC

KMLA_API kmla_status kmla_device_source(char* text, size_t* bytes, kmla_error* error) {
    (void)text, (void)bytes;
    return kmla_i_fail(error, KMLA_ERROR_LIBRARY,
                       "the device source was left out by KIMI_MLA_NO_NVRTC");
}

static kmla_status kmla_i_make_image(const kmla_gpu* gpu, const kmla_plan* plan,
                                     const kmla_device* device, const kmla_log* log, int may_load,
                                     kmla_image* image, int* loaded, kmla_error* error) {
    (void)gpu, (void)plan, (void)device, (void)log, (void)may_load, (void)image;
    *loaded = 0;
    return kmla_i_fail(error, KMLA_ERROR_LIBRARY,
                       "compiling was left out by KIMI_MLA_NO_NVRTC: kmla_gpu_prepare needs images "
                       "that tools/kmla made");
}

#endif // KIMI_MLA_NO_NVRTC

KMLA_API kmla_status kmla_gpu_compile(kmla_gpu* gpu, const kmla_plan* plan,
                                      const kmla_device* device, const kmla_log* log,
                                      kmla_image* image, kmla_error* error) {
    kmla_image made;
    kmla_status status;
    int loaded;
    if (!gpu || !device || !image) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is NULL",
                           !gpu      ? "gpu"
                           : !device ? "device"
                                     : "image");
    }
    memset(&made, 0, sizeof made);
    status = kmla_i_check_plan_or_null(plan, error);
    if (status == KMLA_OK) {
        status = kmla_i_make_image(gpu, plan, device, log, !log, &made, &loaded, error);
    }
    if (status == KMLA_OK) {
        *image = made;
    }
    return status;
}

// -----------------------------------------------------------------------------
// Cache of files
// -----------------------------------------------------------------------------
#ifndef KIMI_MLA_NO_FILES

// The few calls that systems name differently. A file is its number, -1 is none.
#include <fcntl.h>
#include <sys/stat.h>
#if defined(_WIN32)
#include <direct.h>
#include <io.h>
#include <process.h>

#define KMLA_I_FILE_READ (_O_RDONLY | _O_BINARY | _O_NOINHERIT)
#define KMLA_I_FILE_CREATE (_O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT)
#define KMLA_I_FILE_MODE (_S_IREAD | _S_IWRITE)
#define KMLA_I_IS_FILE(mode) (((mode) & _S_IFMT) == _S_IFREG)
#define KMLA_I_IS_FOLDER(mode) (((mode) & _S_IFMT) == _S_IFDIR)
#define KMLA_I_COUNT_TYPE unsigned int // of read and write
#define kmla_i_open _open
#define kmla_i_read _read
#define kmla_i_write _write
#define kmla_i_close _close
#define kmla_i_process _getpid

static void kmla_i_make_folder(const char* path) { (void)_mkdir(path); }
static int kmla_i_to_disk(int file) { return _commit(file) == 0; }
static int kmla_i_replace(const char* from, const char* to) {
    return MoveFileExA(from, to, 1) != 0; // 1: in the place of an older one
}
static int kmla_i_others_may_write(const struct stat* folder) {
    (void)folder; // access lists say who may write, not these bits
    return 0;
}
#else
#include <unistd.h>

#ifdef O_CLOEXEC // not in strict C99
#define KMLA_I_FILE_FLAGS O_CLOEXEC
#else
#define KMLA_I_FILE_FLAGS 0
#endif
#define KMLA_I_FILE_READ (O_RDONLY | O_NONBLOCK | KMLA_I_FILE_FLAGS) // not to wait for a pipe
#define KMLA_I_FILE_CREATE (O_WRONLY | O_CREAT | O_EXCL | O_SYNC | KMLA_I_FILE_FLAGS)
#define KMLA_I_FILE_MODE 0600
#define KMLA_I_IS_FILE(mode) S_ISREG(mode)
#define KMLA_I_IS_FOLDER(mode) S_ISDIR(mode)
#define KMLA_I_COUNT_TYPE size_t
#define kmla_i_open open
#define kmla_i_read read
#define kmla_i_write write
#define kmla_i_close close
#define kmla_i_process getpid

static void kmla_i_make_folder(const char* path) { (void)mkdir(path, 0700); }
static int kmla_i_to_disk(int file) {
    (void)file; // every write was followed by fsync: O_SYNC, as strict C99 has no fsync
    return 1;
}
static int kmla_i_replace(const char* from, const char* to) { return rename(from, to) == 0; }
static int kmla_i_others_may_write(const struct stat* folder) {
    return (folder->st_uid != geteuid() && folder->st_uid != 0) || (folder->st_mode & 022) != 0;
}
#endif

#define KMLA_I_PATH_BYTES 1024
#define KMLA_I_FILE_ENDING_BYTES 48 // ".<process>.<number>.tmp" is shorter
#define KMLA_I_FILE_NAMES 64        // so many threads of a process may write one entry

static void kmla_i_file_path(const char* directory, const char* key, const char* ending,
                             char* path) {
    snprintf(path, KMLA_I_PATH_BYTES, "%s/%s%s", directory, key, ending);
}

static int kmla_i_file_take(int file, void* data, size_t bytes) {
    char* to = (char*)data;
    while (bytes > 0) {
        const long count = (long)kmla_i_read(file, to, (KMLA_I_COUNT_TYPE)bytes);
        if (count <= 0) {
            return 0;
        }
        to += count;
        bytes -= (size_t)count;
    }
    return 1;
}

static int kmla_i_file_put(int file, const void* data, size_t bytes) {
    const char* from = (const char*)data;
    while (bytes > 0) {
        const long count = (long)kmla_i_write(file, from, (KMLA_I_COUNT_TYPE)bytes);
        if (count <= 0) {
            return 0;
        }
        from += count;
        bytes -= (size_t)count;
    }
    return 1;
}

static size_t kmla_i_files_load(void* user, const char* key, void* data, size_t room) {
    char path[KMLA_I_PATH_BYTES];
    struct stat facts;
    size_t bytes = 0;
    int file;
    kmla_i_file_path((const char*)user, key, ".kmla", path);
    file = kmla_i_open(path, KMLA_I_FILE_READ);
    if (file < 0) {
        return 0;
    }
    if (fstat(file, &facts) == 0 && KMLA_I_IS_FILE(facts.st_mode) && facts.st_size > 0) {
        bytes = (size_t)facts.st_size;
    }
    if (data && bytes <= room && !kmla_i_file_take(file, data, bytes)) {
        bytes = 0;
    }
    kmla_i_close(file);
    return bytes;
}

// Nobody sees half an entry: it is written under a name of its own and renamed when it is on disk.
static void kmla_i_files_store(void* user, const char* key, const void* data, size_t bytes) {
    char path[KMLA_I_PATH_BYTES], temporary[KMLA_I_PATH_BYTES], ending[KMLA_I_FILE_ENDING_BYTES];
    int file = -1, number, whole;
    for (number = 0; file < 0 && number < KMLA_I_FILE_NAMES; ++number) {
        snprintf(ending, sizeof ending, ".%ld.%d.tmp", (long)kmla_i_process(), number);
        kmla_i_file_path((const char*)user, key, ending, temporary);
        file = kmla_i_open(temporary, KMLA_I_FILE_CREATE, KMLA_I_FILE_MODE);
    }
    if (file < 0) {
        return;
    }
    whole = kmla_i_file_put(file, data, bytes) && kmla_i_to_disk(file);
    whole = kmla_i_close(file) == 0 && whole;
    kmla_i_file_path((const char*)user, key, ".kmla", path);
    if (!whole || !kmla_i_replace(temporary, path)) {
        remove(temporary);
    }
}

KMLA_API kmla_status kmla_cache_files(const char* directory, kmla_cache* cache,
                                      kmla_error* error) {
    const size_t most = KMLA_I_PATH_BYTES - KMLA_CACHE_KEY_BYTES - KMLA_I_FILE_ENDING_BYTES;
    struct stat facts;
    if (!directory || !cache) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "%s is NULL",
                           directory ? "cache" : "directory");
    }
    if (!directory[0] || strlen(directory) > most) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "directory has %llu bytes; a cache takes 1 to %llu",
                           (unsigned long long)strlen(directory), (unsigned long long)most);
    }
    kmla_i_make_folder(directory); // if it cannot, the next line finds nothing
    if (stat(directory, &facts) != 0) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "directory %s does not exist and cannot be made", directory);
    }
    if (!KMLA_I_IS_FOLDER(facts.st_mode)) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT, "directory %s is none", directory);
    }
    if (kmla_i_others_may_write(&facts)) {
        return kmla_i_fail(error, KMLA_ERROR_ARGUMENT,
                           "directory %s is another user's or may be written by others, who could "
                           "put kernels there",
                           directory);
    }
    cache->load = kmla_i_files_load;
    cache->store = kmla_i_files_store;
    cache->user = (void*)directory;
    return KMLA_OK;
}

#endif // KIMI_MLA_NO_FILES

// -----------------------------------------------------------------------------
// Prepare and close
// -----------------------------------------------------------------------------

static const kmla_i_reader* kmla_i_find_reader(const kmla_gpu* gpu, int32_t variant) {
    int32_t i;
    for (i = 0; i < gpu->reader_count; ++i) {
        if (gpu->readers[i].variant == variant) {
            return &gpu->readers[i];
        }
    }
    return NULL;
}

// A function with its code on the card: with lazy loading a first launch would load it, and that
// is not legal while a stream is captured.
static kmla_status kmla_i_load_function(const kmla_gpu* gpu, void* module, const char* name,
                                        int32_t shared_bytes, void** function, kmla_error* error) {
    int registers;
    int result = gpu->cuda.module_function(function, module, name);
    if (result != 0) {
        return kmla_i_fail_cuda(gpu, error, "cuModuleGetFunction", result);
    }
    if (gpu->cuda.function_load) {
        result = gpu->cuda.function_load(*function);
    } else { // before driver 12.4 any question loads
        result = gpu->cuda.function_attribute(&registers, KMLA_I_FUNCTION_REGISTERS, *function);
    }
    if (result != 0) {
        return kmla_i_fail_cuda(gpu, error,
                                gpu->cuda.function_load ? "cuFuncLoad" : "cuFuncGetAttribute",
                                result);
    }
    if (shared_bytes > 0) {
        result = gpu->cuda.function_set(*function, KMLA_I_FUNCTION_DYNAMIC_SHARED, shared_bytes);
        if (result != 0) {
            return kmla_i_fail_cuda(gpu, error, "cuFuncSetAttribute", result);
        }
    }
    return KMLA_OK;
}

// A module, not a cuLibrary: an object belongs to one context anyway, and the kernels of a library
// would be loaded into it by their first launch, which may be in a capture.
static kmla_status kmla_i_load_image(const kmla_gpu* gpu, const kmla_image* image, void** module,
                                     kmla_error* error) {
    int result = gpu->cuda.module_load(module, (const char*)image->data + KMLA_I_IMAGE_HEAD_BYTES);
    if (result == 0) {
        return KMLA_OK;
    }
    kmla_i_fail_cuda(gpu, error, "cuModuleLoadData", result);
    if (error && gpu->nvrtc.release / 1000 > gpu->driver_version / 1000 && gpu->driver_version) {
        kmla_i_text text = {error->message, sizeof error->message, strlen(error->message)};
        kmla_i_text_add(&text, "; NVRTC is of a later CUDA than the driver");
    }
    if (error) {
        error->nvrtc_version = gpu->nvrtc.release;
    }
    return KMLA_ERROR_CUDA;
}

// Makes an image and loads it; one of the cache's, only if `may_load`.
static kmla_status kmla_i_make_and_load(const kmla_gpu* gpu, const kmla_plan* plan,
                                        const kmla_device* device, int may_load, int* loaded,
                                        void** module, kmla_error* error) {
    kmla_image made;
    kmla_status status;
    memset(&made, 0, sizeof made);
    status = kmla_i_make_image(gpu, plan, device, NULL, may_load, &made, loaded, error);
    if (status == KMLA_OK) {
        status = kmla_i_load_image(gpu, &made, module, error);
    }
    kmla_image_free(&made);
    return status;
}

// Loads the image, or the one that it makes if there is none.
static kmla_status kmla_i_load_module(const kmla_gpu* gpu, const kmla_plan* plan,
                                      const kmla_device* device, const kmla_image* image,
                                      void** module, kmla_error* error) {
    kmla_status status;
    int loaded;
    if (image) {
        status = kmla_i_check_image(image, plan, device, error);
        return status == KMLA_OK ? kmla_i_load_image(gpu, image, module, error) : status;
    }
    status = kmla_i_make_and_load(gpu, plan, device, 1, &loaded, module, error);
    if (status != KMLA_OK && loaded) { // the driver refuses what the cache has: rebuild it
        status = kmla_i_make_and_load(gpu, plan, device, 0, &loaded, module, error);
    }
    return status;
}

static kmla_status kmla_i_load_support(kmla_gpu* gpu, const kmla_device* device,
                                       const kmla_image* image, kmla_error* error) {
    kmla_i_support support;
    kmla_status status;
    memset(&support, 0, sizeof support);
    status = kmla_i_load_module(gpu, NULL, device, image, &support.module, error);
    if (status != KMLA_OK) {
        return status;
    }
    status = kmla_i_load_function(gpu, support.module, "kmla_merge", 0, &support.merge, error);
    if (status == KMLA_OK) {
        status =
            kmla_i_load_function(gpu, support.module, "kmla_combine", 0, &support.combine, error);
    }
    if (status == KMLA_OK) {
        status =
            kmla_i_load_function(gpu, support.module, "kmla_write_kv", 0, &support.write_kv, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_load_function(gpu, support.module, "kmla_write_query", 0,
                                      &support.write_query, error);
    }
    if (status != KMLA_OK) {
        gpu->cuda.module_unload(support.module);
        return status;
    }
    gpu->support = support;
    return KMLA_OK;
}

static kmla_status kmla_i_load_reader(kmla_gpu* gpu, const kmla_plan* plan,
                                      const kmla_device* device, const kmla_image* image,
                                      kmla_error* error) {
    kmla_i_reader reader;
    kmla_status status;
    memset(&reader, 0, sizeof reader);
    if (plan->shared_bytes > device->shared_bytes) {
        return kmla_i_fail(error, KMLA_ERROR_UNSUPPORTED,
                           "plan needs %d bytes of shared memory a block, the card has %d",
                           (int)plan->shared_bytes, (int)device->shared_bytes);
    }
    if (gpu->reader_count == KMLA_I_MAX_READERS) {
        return kmla_i_fail(error, KMLA_ERROR_UNSUPPORTED, "more than %d variants are prepared",
                           KMLA_I_MAX_READERS);
    }
    status = kmla_i_load_module(gpu, plan, device, image, &reader.module, error);
    if (status != KMLA_OK) {
        return status;
    }
    status = kmla_i_load_function(gpu, reader.module, "kmla_reader", plan->shared_bytes,
                                  &reader.function, error);
    if (status != KMLA_OK) {
        gpu->cuda.module_unload(reader.module);
        return status;
    }
    reader.variant = kmla_plan_variant(plan);
    gpu->readers[gpu->reader_count++] = reader;
    return KMLA_OK;
}

KMLA_API kmla_status kmla_gpu_prepare(kmla_gpu* gpu, const kmla_plan* plan, const kmla_image* image,
                                      kmla_error* error) {
    void* context;
    unsigned long long context_id = 0;
    kmla_device device;
    kmla_status status = kmla_i_check_plan_or_null(plan, error);
    if (status == KMLA_OK) {
        status = kmla_i_current_context(gpu, &context, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_device_of_context(gpu, context, &device, error);
    }
    if (status == KMLA_OK && gpu->cuda.context_id) {
        int result = gpu->cuda.context_id(context, &context_id);
        status = result ? kmla_i_fail_cuda(gpu, error, "cuCtxGetId", result) : KMLA_OK;
    }
    if (status == KMLA_OK && gpu->context && context_id != gpu->context_id) {
        status = kmla_i_fail(error, KMLA_ERROR_CONTEXT,
                             "the context that the kernels were prepared in is gone; the current "
                             "one only has its address");
    }
    if (status == KMLA_OK && !gpu->support.module) {
        status = kmla_i_load_support(gpu, &device, plan ? NULL : image, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    if (!gpu->context) { // from now on the object belongs to this context
        gpu->device = device;
        gpu->context = context;
        gpu->context_id = context_id;
    }
    if (plan && !kmla_i_find_reader(gpu, kmla_plan_variant(plan))) {
        status = kmla_i_load_reader(gpu, plan, &device, image, error);
    }
    return status;
}

static void kmla_i_unload_modules(const kmla_gpu* gpu) {
    int32_t i;
    for (i = 0; i < gpu->reader_count; ++i) {
        gpu->cuda.module_unload(gpu->readers[i].module);
    }
    gpu->cuda.module_unload(gpu->support.module);
}

KMLA_API void kmla_gpu_close(kmla_gpu* gpu) {
    unsigned long long id = 0;
    if (gpu && gpu->context && gpu->cuda.context_push(gpu->context) == 0) {
        // A new context may have a dead one's address, but never its id.
        if (!gpu->cuda.context_id ||
            (gpu->cuda.context_id(gpu->context, &id) == 0 && id == gpu->context_id)) {
            kmla_i_unload_modules(gpu);
        }
        gpu->cuda.context_pop(NULL);
    }
    KMLA_FREE(gpu);
}

// -----------------------------------------------------------------------------
// Launches
// -----------------------------------------------------------------------------

// How a kernel is launched.
typedef struct kmla_i_launch_shape {
    uint32_t grid_x, grid_y, grid_z;
    uint32_t threads;
    uint32_t shared_bytes;
    int32_t overlaps; // may start before the kernel ahead of it in the stream ends; it waits itself
} kmla_i_launch_shape;

static kmla_status kmla_i_launch(const kmla_gpu* gpu, void* function,
                                 const kmla_i_launch_shape* shape, void* args, void* stream,
                                 kmla_error* error) {
    void* parameters[1];
    int result;
    parameters[0] = args;
    if (shape->overlaps && gpu->cuda.launch_with && gpu->device.compute_major >= 9 &&
        gpu->driver_version >= KMLA_I_PROGRAMMATIC_DRIVER) {
        kmla_i_launch_attribute attribute;
        kmla_i_launch_config config;
        memset(&attribute, 0, sizeof attribute);
        attribute.id = KMLA_I_LAUNCH_PROGRAMMATIC;
        attribute.value.value = 1;
        config.grid_x = shape->grid_x;
        config.grid_y = shape->grid_y;
        config.grid_z = shape->grid_z;
        config.block_x = shape->threads;
        config.block_y = 1;
        config.block_z = 1;
        config.shared_bytes = shape->shared_bytes;
        config.stream = stream;
        config.attributes = &attribute;
        config.attribute_count = 1;
        result = gpu->cuda.launch_with(&config, function, parameters, NULL);
    } else {
        result =
            gpu->cuda.launch(function, shape->grid_x, shape->grid_y, shape->grid_z, shape->threads,
                             1, 1, shape->shared_bytes, stream, parameters, NULL);
    }
    return result ? kmla_i_fail_cuda(gpu, error, "cuLaunchKernel", result) : KMLA_OK;
}

// Before every launch: the right context is current and the support kernels are in it.
static kmla_status kmla_i_check_prepared(const kmla_gpu* gpu, kmla_error* error) {
    void* context;
    kmla_status status = kmla_i_current_context(gpu, &context, error);
    if (status == KMLA_OK && !gpu->support.module) {
        return kmla_i_fail(error, KMLA_ERROR_NOT_PREPARED,
                           "nothing was prepared: call kmla_gpu_prepare first, outside capture");
    }
    return status;
}

static size_t kmla_i_type_bytes(int32_t type) { return type == KMLA_FP32 ? 4 : 2; }

// log2 of a power of two, -1 for any other number: the kernel then divides.
static int32_t kmla_i_log2_exact(int32_t number) {
    int32_t shift = 0;
    while (shift < 30 && (1 << shift) < number) {
        shift++;
    }
    return (1 << shift) == number ? shift : -1;
}

// Where the partial lse lie: behind the payloads [S][R][H][512].
static uint64_t kmla_i_partial_lse(const kmla_plan* plan, uint64_t workspace) {
    return workspace + (uint64_t)plan->splits * (uint64_t)plan->shape.rows *
                           (uint64_t)plan->shape.heads * KMLA_LATENT_DIMS *
                           kmla_i_type_bytes(plan->shape.partial_type);
}

static void kmla_i_reader_launch_args(const kmla_plan* plan, const kmla_decode* args,
                                      struct kmla_i_reader_args* out) {
    const kmla_shape* shape = &plan->shape;
    memset(out, 0, sizeof *out);
    out->query = args->query;
    out->kv = args->kv;
    out->table = shape->slot_list ? args->slot_list : args->block_table;
    out->row_offsets = args->row_offsets;
    out->lengths = args->lengths;
    out->out = args->out;
    out->lse = args->lse;
    if (plan->splits > 1) {
        out->part_out = args->workspace;
        out->part_lse = kmla_i_partial_lse(plan, args->workspace);
    }
    out->query_row_stride = args->query_row_stride_bytes;
    out->query_head_stride = args->query_head_stride_bytes;
    out->page_pitch = args->page_pitch_bytes;
    out->table_stride = shape->slot_list ? args->slot_list_stride : args->block_table_stride;
    out->out_row_stride = args->out_row_stride;
    out->out_head_stride = args->out_head_stride;
    out->lse_row_stride = args->lse_row_stride;
    out->lse_head_stride = args->lse_head_stride;
    out->groups = plan->groups;
    out->rows = shape->rows;
    out->rows_per_group = shape->slot_list ? 1 : shape->rows_per_request;
    out->heads = shape->heads;
    out->page_tokens = shape->page_tokens;
    out->page_shift = kmla_i_log2_exact(shape->page_tokens);
    out->capacity = (int32_t)shape->capacity_tokens;
    out->splits = plan->splits;
    out->chunks_per_split = plan->chunks_per_split;
    out->single_split_chunks = shape->single_split_chunks;
    out->balanced = shape->split_mode == KMLA_SPLIT_BALANCED;
    out->ragged = shape->ragged;
    out->slot_list = shape->slot_list;
    out->query_format = shape->query_format;
    out->e4m3_query = shape->mode == KMLA_MODE_E4M3_QUERY;
    out->partial_type = shape->partial_type;
    out->out_type = args->out_type;
    out->per_request = shape->lengths.lengths_kind == KMLA_LENGTHS_PER_REQUEST;
    out->draft = shape->lengths.rows_kind == KMLA_ROWS_DRAFT;
    out->window = shape->lengths.window_tokens;
    out->dcp_ranks = shape->lengths.dcp.ranks;
    out->dcp_rank = shape->lengths.dcp.rank;
    out->dcp_interleave = shape->lengths.dcp.interleave;
    out->kv_scale = shape->kv_format == KMLA_KV_E4M3 ? args->kv_scale : 1.0f;
    // One scale for all of QK; log2(e) because the kernel's exponentials are of 2.
    out->score_scale = args->scale * 1.44269504f * out->kv_scale;
    if (shape->query_format == KMLA_QUERY_E4M3) {
        out->score_scale *= args->query_scale;
    }
}

// The merge is a combine of splits that lie densely in the workspace.
static void kmla_i_merge_launch_args(const kmla_plan* plan, const kmla_decode* args,
                                     struct kmla_i_combine_args* out) {
    const int64_t rows = plan->shape.rows, heads = plan->shape.heads;
    memset(out, 0, sizeof *out);
    out->part_out = args->workspace;
    out->part_lse = kmla_i_partial_lse(plan, args->workspace);
    out->out = args->out;
    out->lse = args->lse;
    out->part_head_stride = KMLA_LATENT_DIMS;
    out->part_row_stride = heads * KMLA_LATENT_DIMS;
    out->part_out_stride = rows * heads * KMLA_LATENT_DIMS;
    out->part_lse_head_stride = 1;
    out->part_lse_row_stride = heads;
    out->part_lse_stride = rows * heads;
    out->out_row_stride = args->out_row_stride;
    out->out_head_stride = args->out_head_stride;
    out->lse_row_stride = args->lse_row_stride;
    out->lse_head_stride = args->lse_head_stride;
    out->parts = plan->splits;
    out->rows = plan->shape.rows;
    out->heads = plan->shape.heads;
    out->part_type = plan->shape.partial_type;
    out->out_type = args->out_type;
}

// Checking mode: copies the tables to the host, in their own strides, and looks at every page.
static kmla_status kmla_i_check_device_tables(const kmla_gpu* gpu, const kmla_plan* plan,
                                              const kmla_decode* args, void* stream,
                                              kmla_error* error) {
    const kmla_shape* shape = &plan->shape;
    const int per_request = shape->lengths.lengths_kind == KMLA_LENGTHS_PER_REQUEST;
    const size_t table_rows = (size_t)(shape->slot_list ? shape->rows : shape->requests);
    const size_t stride =
        (size_t)(shape->slot_list ? args->slot_list_stride : args->block_table_stride);
    const size_t width =
        (size_t)(shape->slot_list ? args->slot_list_width : args->block_table_width);
    const uint64_t addresses[3] = {shape->slot_list ? args->slot_list : args->block_table,
                                   args->lengths, args->row_offsets};
    const size_t counts[3] = {(table_rows - 1) * stride + width,
                              (size_t)(per_request ? shape->requests : shape->rows),
                              shape->ragged ? (size_t)shape->requests + 1 : 0};
    int32_t* copies[3]; // table, lengths, row offsets: one after the other in one allocation
    kmla_status status = KMLA_OK;
    const char* call = "cuMemcpyDtoHAsync";
    int result, capturing = 0, i;

    result = gpu->cuda.stream_capturing(stream, &capturing);
    if (capturing || result == KMLA_I_CAPTURE_IMPLICIT) {
        return kmla_i_fail(error, KMLA_ERROR_CAPTURE,
                           "check_pages synchronises, and the stream is being captured");
    }
    if (result != 0) {
        return kmla_i_fail_cuda(gpu, error, "cuStreamIsCapturing", result);
    }
    copies[0] = (int32_t*)KMLA_MALLOC((counts[0] + counts[1] + counts[2]) * sizeof(int32_t));
    if (!copies[0]) {
        return kmla_i_fail(error, KMLA_ERROR_MEMORY, "no memory for copies of the tables");
    }
    copies[1] = copies[0] + counts[0];
    copies[2] = copies[1] + counts[1];
    for (i = 0; i < 3 && result == 0; ++i) {
        if (counts[i] > 0) {
            result = gpu->cuda.copy_to_host(copies[i], addresses[i], counts[i] * sizeof(int32_t),
                                            stream);
        }
    }
    if (result == 0) {
        call = "cuStreamSynchronize";
        result = gpu->cuda.stream_synchronize(stream);
    }
    if (result != 0) {
        status = kmla_i_fail_cuda(gpu, error, call, result);
    } else {
        status = kmla_check_pages(plan, args, copies[0], copies[1],
                                  shape->ragged ? copies[2] : NULL, error);
    }
    KMLA_FREE(copies[0]);
    return status;
}

static kmla_i_launch_shape kmla_i_reader_launch_shape(const kmla_plan* plan) {
    kmla_i_launch_shape shape;
    shape.grid_x = (uint32_t)plan->tiles_per_request;
    shape.grid_y = (uint32_t)plan->splits;
    shape.grid_z = (uint32_t)plan->groups + (plan->shape.ragged ? 1 : 0); // one more: dead rows
    shape.threads = (uint32_t)plan->threads;
    shape.shared_bytes = (uint32_t)plan->shared_bytes;
    shape.overlaps = 0;
    return shape;
}

static kmla_i_launch_shape kmla_i_merge_launch_shape(const kmla_plan* plan) {
    kmla_i_launch_shape shape;
    shape.grid_x = (uint32_t)plan->shape.heads;
    shape.grid_y = (uint32_t)plan->shape.rows;
    shape.grid_z = 1;
    shape.threads = KMLA_I_SUPPORT_THREADS;
    shape.shared_bytes = 0;
    shape.overlaps = 1;
    return shape;
}

KMLA_API kmla_status kmla_gpu_decode(kmla_gpu* gpu, const kmla_plan* plan, const kmla_decode* args,
                                     void* stream, kmla_error* error) {
    const kmla_i_reader* reader = NULL;
    struct kmla_i_reader_args reader_args;
    struct kmla_i_combine_args merge_args;
    kmla_i_launch_shape read, merge;
    kmla_decode dense;
    kmla_status status = kmla_i_check_decode(plan, args, &dense, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_gpu_reader(plan, error);
    }
    if (status == KMLA_OK) {
        status = kmla_i_check_prepared(gpu, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    reader = kmla_i_find_reader(gpu, kmla_plan_variant(plan));
    if (!reader) {
        return kmla_i_fail(error, KMLA_ERROR_NOT_PREPARED,
                           "variant %d was not prepared: call kmla_gpu_prepare with this plan "
                           "first, outside capture",
                           (int)kmla_plan_variant(plan));
    }
    if (args->check_pages) {
        status = kmla_i_check_device_tables(gpu, plan, &dense, stream, error);
        if (status != KMLA_OK) {
            return status;
        }
    }

    kmla_i_reader_launch_args(plan, &dense, &reader_args);
    read = kmla_i_reader_launch_shape(plan);
    status = kmla_i_launch(gpu, reader->function, &read, &reader_args, stream, error);
    if (status != KMLA_OK || plan->splits == 1) {
        return status;
    }

    kmla_i_merge_launch_args(plan, &dense, &merge_args);
    merge = kmla_i_merge_launch_shape(plan);
    return kmla_i_launch(gpu, gpu->support.merge, &merge, &merge_args, stream, error);
}

KMLA_API kmla_status kmla_gpu_combine(kmla_gpu* gpu, const kmla_combine* args, void* stream,
                                      kmla_error* error) {
    struct kmla_i_combine_args out;
    kmla_i_launch_shape shape = {0, 0, 1, KMLA_I_SUPPORT_THREADS, 0, 0};
    kmla_combine dense;
    kmla_status status = kmla_check_combine(args, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_prepared(gpu, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    dense = kmla_i_dense_combine(args);
    memset(&out, 0, sizeof out);
    out.part_out = dense.part_out;
    out.part_lse = dense.part_lse;
    out.out = dense.out;
    out.lse = dense.lse;
    out.part_out_stride = dense.part_out_stride;
    out.part_row_stride = dense.part_row_stride;
    out.part_head_stride = dense.part_head_stride;
    out.part_lse_stride = dense.part_lse_stride;
    out.part_lse_row_stride = dense.part_lse_row_stride;
    out.part_lse_head_stride = dense.part_lse_head_stride;
    out.out_row_stride = dense.out_row_stride;
    out.out_head_stride = dense.out_head_stride;
    out.lse_row_stride = dense.lse_row_stride;
    out.lse_head_stride = dense.lse_head_stride;
    out.parts = dense.parts;
    out.rows = dense.rows;
    out.heads = dense.heads;
    out.part_type = dense.part_type;
    out.out_type = dense.out_type;
    out.share = dense.share;
    shape.grid_x = (uint32_t)dense.heads;
    shape.grid_y = (uint32_t)dense.rows;
    return kmla_i_launch(gpu, gpu->support.combine, &shape, &out, stream, error);
}

// Blocks that give every one of count items a warp.
static uint32_t kmla_i_blocks_of_warps(int64_t count) {
    const int64_t warps = KMLA_I_SUPPORT_THREADS / 32;
    return (uint32_t)((count + warps - 1) / warps);
}

KMLA_API kmla_status kmla_gpu_write_kv(kmla_gpu* gpu, const kmla_kv_write* args, void* stream,
                                       kmla_error* error) {
    struct kmla_i_kv_write_args out;
    kmla_i_launch_shape shape = {0, 1, 1, KMLA_I_SUPPORT_THREADS, 0, 0};
    kmla_kv_write dense;
    kmla_status status = kmla_check_kv_write(args, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_prepared(gpu, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    dense = kmla_i_dense_kv_write(args);
    memset(&out, 0, sizeof out);
    out.latent = dense.latent;
    out.rope = dense.rope;
    out.slots = dense.slots;
    out.kv = dense.kv;
    out.kv_slots = dense.kv_pages * (uint64_t)dense.page_tokens;
    out.page_pitch = dense.page_pitch_bytes;
    out.latent_stride = dense.latent_stride;
    out.rope_stride = dense.rope_stride;
    out.tokens = dense.tokens;
    out.kv_format = dense.kv_format;
    out.source_type = dense.source_type;
    out.power_of_two = dense.scale_rule == KMLA_SCALE_POWER_OF_TWO;
    out.page_tokens = dense.page_tokens;
    out.kv_scale = dense.kv_format == KMLA_KV_E4M3 ? dense.kv_scale : 1.0f;
    shape.grid_x = kmla_i_blocks_of_warps(dense.tokens);
    return kmla_i_launch(gpu, gpu->support.write_kv, &shape, &out, stream, error);
}

KMLA_API kmla_status kmla_gpu_write_query(kmla_gpu* gpu, const kmla_query_write* args, void* stream,
                                          kmla_error* error) {
    struct kmla_i_query_write_args out;
    kmla_i_launch_shape shape = {0, 1, 1, KMLA_I_SUPPORT_THREADS, 0, 0};
    kmla_query_write dense;
    kmla_status status = kmla_check_query_write(args, error);
    if (status == KMLA_OK) {
        status = kmla_i_check_prepared(gpu, error);
    }
    if (status != KMLA_OK) {
        return status;
    }
    dense = kmla_i_dense_query_write(args);
    memset(&out, 0, sizeof out);
    out.source = dense.source;
    out.query = dense.query;
    out.source_row_stride = dense.source_row_stride;
    out.source_head_stride = dense.source_head_stride;
    out.query_row_stride = dense.query_row_stride_bytes;
    out.query_head_stride = dense.query_head_stride_bytes;
    out.rows = dense.rows;
    out.heads = dense.heads;
    out.query_format = dense.query_format;
    out.source_type = dense.source_type;
    out.query_scale = dense.query_format == KMLA_QUERY_E4M3 ? dense.query_scale : 1.0f;
    shape.grid_x = kmla_i_blocks_of_warps((int64_t)dense.rows * dense.heads);
    return kmla_i_launch(gpu, gpu->support.write_query, &shape, &out, stream, error);
}

#endif // KIMI_MLA_NO_GPU

// =============================================================================
// Device source: made by tools/embed.c from tools/device/; do not edit between the markers
// =============================================================================
#ifndef KIMI_MLA_NO_GPU

// >>device source begin
// clang-format off
#ifndef KIMI_MLA_NO_NVRTC
static const kmla_i_device_part kmla_i_device_parts[] = {
    {"instructions.cuh", 1,
     "// The only file that touches the machine: built-in variables, PTX, conversions. Everything after it\n"
     "// is plain C++, so a host compiler can run it over another version of this file.\n"
     "\n"
     "#pragma nv_diag_suppress 177 // an image does not use every function of these files\n"
     "\n"
     "typedef unsigned char uint8_t;\n"
     "typedef unsigned short uint16_t;\n"
     "typedef unsigned int uint32_t;\n"
     "typedef int int32_t;\n"
     "typedef unsigned long long uint64_t;\n"
     "typedef long long int64_t;\n"
     "\n"
     "#define KMLA_ARCH (__CUDA_ARCH__ / 10) // 80, 89, 90, 120, ...\n"
     "\n"
     "// e4m3 conversions are in PTX from sm_89 on, and in NVRTC for sm_89 from 12.1 on.\n"
     "#if KMLA_ARCH >= 90 || (KMLA_ARCH == 89 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)\n"
     "#define KMLA_HAS_E4M3_CONVERT 1\n"
     "#else\n"
     "#define KMLA_HAS_E4M3_CONVERT 0\n"
     "#endif\n"
     "#define KMLA_HAS_BULK_COPY (KMLA_ARCH >= 90 && __CUDACC_VER_MAJOR__ >= 12)\n"
     "// wgmma is of sm_90a alone.\n"
     "#if KMLA_ARCH == 90 && defined(__CUDA_ARCH_FEAT_SM90_ALL)\n"
     "#define KMLA_HAS_WGMMA 1\n"
     "#else\n"
     "#define KMLA_HAS_WGMMA 0\n"
     "#endif\n"
     "\n"
     "#define KMLA_DEVICE static __device__ __forceinline__\n"
     "// A kernel that takes one struct. At least `blocks` blocks should fit an SM.\n"
     "#define KMLA_KERNEL(name, args_type, threads, blocks) \\\n"
     "    extern \"C\" __global__ void __launch_bounds__(threads, blocks) \\\n"
     "        name(const __grid_constant__ args_type args)\n"
     "\n"
     "struct alignas(8) word2 {\n"
     "    uint32_t x, y;\n"
     "};\n"
     "struct alignas(16) word4 {\n"
     "    uint32_t x, y, z, w;\n"
     "};\n"
     "\n"
     "// ---- where am I\n"
     "\n"
     "KMLA_DEVICE int thread_index() { return (int)threadIdx.x; }\n"
     "KMLA_DEVICE int block_x() { return (int)blockIdx.x; }\n"
     "KMLA_DEVICE int block_y() { return (int)blockIdx.y; }\n"
     "KMLA_DEVICE int block_z() { return (int)blockIdx.z; }\n"
     "KMLA_DEVICE int grid_x() { return (int)gridDim.x; }\n"
     "\n"
     "// The value, of which nothing is known: what is computed from it in a loop stays there and takes no\n"
     "// registers elsewhere.\n"
     "KMLA_DEVICE int opaque(int value) {\n"
     "    asm volatile(\"\" : \"+r\"(value));\n"
     "    return value;\n"
     "}\n"
     "\n"
     "// Dynamic shared memory of the block, aligned to 1,024 bytes.\n"
     "KMLA_DEVICE uint8_t* shared_memory() {\n"
     "    extern __shared__ __align__(1024) uint8_t kmla_shared[];\n"
     "    return kmla_shared;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint32_t shared_address(const void* pointer) {\n"
     "    return (uint32_t)__cvta_generic_to_shared(pointer);\n"
     "}\n"
     "\n"
     "// ---- barriers, votes, shuffles\n"
     "\n"
     "KMLA_DEVICE void sync_block() { __syncthreads(); }\n"
     "// Barriers 1 to 15 of the block, of `threads` threads in whole warps; one may arrive and not wait.\n"
     "KMLA_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {\n"
     "    asm volatile(\"bar.sync %0, %1;\" ::\"r\"(id), \"r\"(threads) : \"memory\");\n"
     "}\n"
     "KMLA_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {\n"
     "    asm volatile(\"bar.arrive %0, %1;\" ::\"r\"(id), \"r\"(threads) : \"memory\");\n"
     "}\n"
     "// Barrier that also tells every thread whether any had a true predicate.\n"
     "KMLA_DEVICE bool sync_block_or(bool predicate) { return __syncthreads_or(predicate) != 0; }\n"
     "KMLA_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }\n"
     "KMLA_DEVICE float shuffle_xor(float value, int mask) {\n"
     "    return __shfl_xor_sync(0xffffffffu, value, mask);\n"
     "}\n"
     "KMLA_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {\n"
     "    return __shfl_xor_sync(0xffffffffu, value, mask);\n"
     "}\n"
     "KMLA_DEVICE float shuffle(float value, int lane) {\n"
     "    return __shfl_sync(0xffffffffu, value, lane);\n"
     "}\n"
     "KMLA_DEVICE uint64_t shuffle(uint64_t value, int lane) {\n"
     "    return __shfl_sync(0xffffffffu, value, lane);\n"
     "}\n"
     "\n"
     "// ---- numbers\n"
     "\n"
     "KMLA_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }\n"
     "KMLA_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }\n"
     "KMLA_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }\n"
     "KMLA_DEVICE float maximum(float a, float b) { return fmaxf(a, b); } // NaN loses\n"
     "KMLA_DEVICE uint32_t maximum(uint32_t a, uint32_t b) { return a > b \? a : b; }\n"
     "KMLA_DEVICE int minimum(int a, int b) { return a < b \? a : b; }\n"
     "KMLA_DEVICE int maximum(int a, int b) { return a > b \? a : b; }\n"
    },
    {"instructions.cuh", 102,
     "// Correctly rounded: the writers' bytes are the host's.\n"
     "KMLA_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }\n"
     "KMLA_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }\n"
     "\n"
     "// To one or two units in the last place; the value and its inverse are normal.\n"
     "KMLA_DEVICE float reciprocal(float value) {\n"
     "    float result;\n"
     "    asm(\"rcp.approx.ftz.f32 %0, %1;\" : \"=f\"(result) : \"f\"(value));\n"
     "    return result;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float exp2_fast(float value) {\n"
     "    float result;\n"
     "    asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(result) : \"f\"(value));\n"
     "    return result;\n"
     "}\n"
     "\n"
     "// Results below 2^-126 too.\n"
     "KMLA_DEVICE float exp2_wide(float value) {\n"
     "    float result;\n"
     "    asm(\"ex2.approx.f32 %0, %1;\" : \"=f\"(result) : \"f\"(value));\n"
     "    return result;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float log2_fast(float value) {\n"
     "    float result;\n"
     "    asm(\"lg2.approx.f32 %0, %1;\" : \"=f\"(result) : \"f\"(value));\n"
     "    return result;\n"
     "}\n"
     "\n"
     "// Bytes of {b,a} picked by the four nibbles of selector: 0..3 are a's, 4..7 b's.\n"
     "KMLA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {\n"
     "    return __byte_perm(a, b, selector);\n"
     "}\n"
     "\n"
     "// ---- 16-bit pairs; low half first\n"
     "\n"
     "KMLA_DEVICE uint32_t pack_f16(float low, float high) {\n"
     "    uint32_t pair;\n"
     "    asm(\"cvt.rn.f16x2.f32 %0, %1, %2;\" : \"=r\"(pair) : \"f\"(high), \"f\"(low));\n"
     "    return pair;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint32_t pack_bf16(float low, float high) {\n"
     "    uint32_t pair;\n"
     "    asm(\"cvt.rn.bf16x2.f32 %0, %1, %2;\" : \"=r\"(pair) : \"f\"(high), \"f\"(low));\n"
     "    return pair;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint32_t multiply_f16x2(uint32_t a, uint32_t b) {\n"
     "    uint32_t product;\n"
     "    asm(\"mul.rn.f16x2 %0, %1, %2;\" : \"=r\"(product) : \"r\"(a), \"r\"(b));\n"
     "    return product;\n"
     "}\n"
     "\n"
     "// Lane by lane, the number if the other is NaN.\n"
     "KMLA_DEVICE uint32_t minimum_f16x2(uint32_t a, uint32_t b) {\n"
     "    uint32_t result;\n"
     "    asm(\"min.f16x2 %0, %1, %2;\" : \"=r\"(result) : \"r\"(a), \"r\"(b));\n"
     "    return result;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint32_t maximum_f16x2(uint32_t a, uint32_t b) {\n"
     "    uint32_t result;\n"
     "    asm(\"max.f16x2 %0, %1, %2;\" : \"=r\"(result) : \"r\"(a), \"r\"(b));\n"
     "    return result;\n"
     "}\n"
     "\n"
     "#if KMLA_HAS_E4M3_CONVERT\n"
     "// Four E4M3 codes, exactly, as two pairs of f16: bytes 0 and 1, bytes 2 and 3.\n"
     "KMLA_DEVICE void e4m3x4_to_f16x2(uint32_t codes, uint32_t& low, uint32_t& high) {\n"
     "    asm(\"{ .reg .b16 l, h;\\n\"\n"
     "        \"mov.b32 {l, h}, %2;\\n\"\n"
     "        \"cvt.rn.f16x2.e4m3x2 %0, l;\\n\"\n"
     "        \"cvt.rn.f16x2.e4m3x2 %1, h; }\"\n"
     "        : \"=r\"(low), \"=r\"(high)\n"
     "        : \"r\"(codes));\n"
     "}\n"
     "#endif\n"
     "\n"
     "// ---- matrix products of a warp: d[16x8] += a[16x16] * b[16x8]\n"
     "\n"
     "KMLA_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {\n"
     "    asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 \"\n"
     "                 \"{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\"\n"
     "                 : \"+f\"(d[0]), \"+f\"(d[1]), \"+f\"(d[2]), \"+f\"(d[3])\n"
     "                 : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b0), \"r\"(b1));\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {\n"
     "    asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 \"\n"
     "                 \"{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\"\n"
     "                 : \"+f\"(d[0]), \"+f\"(d[1]), \"+f\"(d[2]), \"+f\"(d[3])\n"
     "                 : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b0), \"r\"(b1));\n"
     "}\n"
     "\n"
     "// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8.\n"
     "KMLA_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {\n"
     "    asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\"\n"
     "                 : \"=r\"(r[0]), \"=r\"(r[1]), \"=r\"(r[2]), \"=r\"(r[3])\n"
     "                 : \"r\"(shared_address(row))\n"
     "                 : \"memory\");\n"
     "}\n"
     "\n"
     "// ---- copies from global to shared memory\n"
     "\n"
     "// 16 bytes; with `read` false writes zeros and reads nothing.\n"
     "KMLA_DEVICE void copy_async_16(void* shared, const void* global, bool read) {\n"
     "    asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16, %2;\" ::\"r\"(shared_address(shared)),\n"
    },
    {"instructions.cuh", 211,
     "                 \"l\"(global), \"r\"(read \? 16 : 0)\n"
     "                 : \"memory\");\n"
     "}\n"
     "KMLA_DEVICE void copy_async_8(void* shared, const void* global) {\n"
     "    asm volatile(\"cp.async.ca.shared.global [%0], [%1], 8;\" ::\"r\"(shared_address(shared)),\n"
     "                 \"l\"(global)\n"
     "                 : \"memory\");\n"
     "}\n"
     "KMLA_DEVICE void copy_async_commit() { asm volatile(\"cp.async.commit_group;\" ::: \"memory\"); }\n"
     "// Waits until at most `pending` of this thread's committed groups are under way.\n"
     "template <int pending> KMLA_DEVICE void copy_async_wait() {\n"
     "    asm volatile(\"cp.async.wait_group %0;\" ::\"n\"(pending) : \"memory\");\n"
     "}\n"
     "\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "KMLA_DEVICE void barrier_init(uint64_t* barrier, uint32_t arrivals) {\n"
     "    asm volatile(\"mbarrier.init.shared::cta.b64 [%0], %1;\" ::\"r\"(shared_address(barrier)),\n"
     "                 \"r\"(arrivals)\n"
     "                 : \"memory\");\n"
     "}\n"
     "// Makes initialised barriers visible to the copy engine; a block barrier must follow.\n"
     "KMLA_DEVICE void barrier_init_fence() {\n"
     "    asm volatile(\"fence.mbarrier_init.release.cluster;\" ::: \"memory\");\n"
     "}\n"
     "// One arrival that also announces `bytes` of bulk copies.\n"
     "KMLA_DEVICE void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {\n"
     "    asm volatile(\"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\" ::\"r\"(\n"
     "                     shared_address(barrier)),\n"
     "                 \"r\"(bytes)\n"
     "                 : \"memory\");\n"
     "}\n"
     "KMLA_DEVICE void barrier_arrive(uint64_t* barrier) {\n"
     "    asm volatile(\"mbarrier.arrive.shared::cta.b64 _, [%0];\" ::\"r\"(shared_address(barrier))\n"
     "                 : \"memory\");\n"
     "}\n"
     "// One arrival when all of this thread's copy_async so far have landed.\n"
     "KMLA_DEVICE void copy_arrive(uint64_t* barrier) {\n"
     "    asm volatile(\"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\" ::\"r\"(\n"
     "                     shared_address(barrier))\n"
     "                 : \"memory\");\n"
     "}\n"
     "KMLA_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {\n"
     "    asm volatile(\"{\\n\"\n"
     "                 \".reg .pred done;\\n\"\n"
     "                 \"again:\\n\"\n"
     "                 \"mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n\"\n"
     "                 \"@!done bra again;\\n\"\n"
     "                 \"}\" ::\"r\"(shared_address(barrier)),\n"
     "                 \"r\"(parity)\n"
     "                 : \"memory\");\n"
     "}\n"
     "// `bytes` (a multiple of 16) from global to shared memory; completes on the barrier.\n"
     "KMLA_DEVICE void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {\n"
     "    asm volatile(\"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \"\n"
     "                 \"[%0], [%1], %2, [%3];\" ::\"r\"(shared_address(shared)),\n"
     "                 \"l\"(global), \"r\"(bytes), \"r\"(shared_address(barrier))\n"
     "                 : \"memory\");\n"
     "}\n"
     "#endif\n"
     "\n"
     "// ---- what the asynchronous proxy, of bulk copies and wgmma, sees\n"
     "\n"
     "// What this thread wrote to shared memory may be read or written over by the proxy after a barrier.\n"
     "KMLA_DEVICE void fence_async_reads() {\n"
     "#if KMLA_ARCH >= 90\n"
     "    asm volatile(\"fence.proxy.async.shared::cta;\" ::: \"memory\");\n"
     "#endif\n"
     "}\n"
     "\n"
     "#if KMLA_HAS_WGMMA\n"
     "// All warps of a warpgroup: gives registers back to the block, down to `count` a thread, or takes\n"
     "// some, up to `count`, which waits until others have given them back.\n"
     "template <uint32_t count> KMLA_DEVICE void registers_release() {\n"
     "    asm volatile(\"setmaxnreg.dec.sync.aligned.u32 %0;\" ::\"n\"(count));\n"
     "}\n"
     "template <uint32_t count> KMLA_DEVICE void registers_take() {\n"
     "    asm volatile(\"setmaxnreg.inc.sync.aligned.u32 %0;\" ::\"n\"(count));\n"
     "}\n"
     "\n"
     "// ---- matrix products of a warpgroup: d[64 x n] += a[64 x 16] * b[16 x n], asynchronously. A warp has\n"
     "// 16 rows, in mma.sync's fragments; b is in shared memory: rows of n, 128 bytes of k, swizzled.\n"
     "\n"
     "// Of the 1,024-byte aligned block of 8 rows x 128 bytes that `rows` lies in; + 32 bytes a k16 step.\n"
     "KMLA_DEVICE uint64_t matrix_descriptor(const void* rows) {\n"
     "    const uint64_t bytes_of_8_rows = 1024, swizzle_128 = 1;\n"
     "    return (uint64_t)((shared_address(rows) & 0x3FFFF) >> 4) | (uint64_t)1 << 16 |\n"
    },
    {"instructions.cuh", 297,
     "           (bytes_of_8_rows >> 4) << 32 | swizzle_128 << 62;\n"
     "}\n"
     "// Before the first product, and after registers of products were touched.\n"
     "KMLA_DEVICE void wgmma_fence() { asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\"); }\n"
     "KMLA_DEVICE void wgmma_commit() { asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\"); }\n"
     "// Until at most `pending` committed groups are under way.\n"
     "template <int pending> KMLA_DEVICE void wgmma_wait() {\n"
     "    asm volatile(\"wgmma.wait_group.sync.aligned %0;\" ::\"n\"(pending) : \"memory\");\n"
     "}\n"
     "\n"
     "// One for each n; d has n / 2 registers. Without `add` what d held does not count. The macros write out\n"
     "// d's registers: KMLA_D<n / 2> as operands, KMLA_R<n / 2> as their numbers.\n"
     "#define KMLA_D4(i) \"+f\"(d[i]), \"+f\"(d[i + 1]), \"+f\"(d[i + 2]), \"+f\"(d[i + 3])\n"
     "#define KMLA_D8(i) KMLA_D4(i), KMLA_D4(i + 4)\n"
     "#define KMLA_D16(i) KMLA_D8(i), KMLA_D8(i + 8)\n"
     "#define KMLA_D32(i) KMLA_D16(i), KMLA_D16(i + 16)\n"
     "#define KMLA_R4 \"%0,%1,%2,%3\"\n"
     "#define KMLA_R8 KMLA_R4 \",%4,%5,%6,%7\"\n"
     "#define KMLA_R12 KMLA_R8 \",%8,%9,%10,%11\"\n"
     "#define KMLA_R16 KMLA_R12 \",%12,%13,%14,%15\"\n"
     "#define KMLA_R20 KMLA_R16 \",%16,%17,%18,%19\"\n"
     "#define KMLA_R24 KMLA_R20 \",%20,%21,%22,%23\"\n"
     "#define KMLA_R28 KMLA_R24 \",%24,%25,%26,%27\"\n"
     "#define KMLA_R32 KMLA_R28 \",%28,%29,%30,%31\"\n"
     "#define KMLA_R36 KMLA_R32 \",%32,%33,%34,%35\"\n"
     "#define KMLA_R40 KMLA_R36 \",%36,%37,%38,%39\"\n"
     "#define KMLA_WGMMA(name, types, count, n, numbers, a0, a1, a2, a3, b, flag, ...)                   \\\n"
     "    KMLA_DEVICE void name(float (&d)[count], const uint32_t (&a)[4], uint64_t b_at, bool add) {    \\\n"
     "        asm volatile(\"{ .reg .pred p;\\n\"                                                           \\\n"
     "                     \"setp.ne.b32 p, %\" #flag \", 0;\\n\"                                             \\\n"
     "                     \"wgmma.mma_async.sync.aligned.m64n\" #n \"k16.f32.\" types \" {\" numbers \"}, \"    \\\n"
     "                     \"{%\" #a0 \",%\" #a1 \",%\" #a2 \",%\" #a3 \"}, %\" #b \", p, 1, 1, 0; }\"              \\\n"
     "                     : __VA_ARGS__                                                                 \\\n"
     "                     : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b_at), \"r\"((int)add));      \\\n"
     "    }\n"
     "#define KMLA_WGMMAS(name, types) \\\n"
     "    KMLA_WGMMA(name, types, 4, 8, KMLA_R4, 4, 5, 6, 7, 8, 9, \\\n"
     "               KMLA_D4(0)) \\\n"
     "    KMLA_WGMMA(name, types, 8, 16, KMLA_R8, 8, 9, 10, 11, 12, 13, \\\n"
     "               KMLA_D8(0)) \\\n"
     "    KMLA_WGMMA(name, types, 12, 24, KMLA_R12, 12, 13, 14, 15, 16, 17, \\\n"
     "               KMLA_D8(0), KMLA_D4(8)) \\\n"
     "    KMLA_WGMMA(name, types, 16, 32, KMLA_R16, 16, 17, 18, 19, 20, 21, \\\n"
     "               KMLA_D16(0)) \\\n"
     "    KMLA_WGMMA(name, types, 20, 40, KMLA_R20, 20, 21, 22, 23, 24, 25, \\\n"
     "               KMLA_D16(0), KMLA_D4(16)) \\\n"
     "    KMLA_WGMMA(name, types, 24, 48, KMLA_R24, 24, 25, 26, 27, 28, 29, \\\n"
     "               KMLA_D16(0), KMLA_D8(16)) \\\n"
     "    KMLA_WGMMA(name, types, 28, 56, KMLA_R28, 28, 29, 30, 31, 32, 33, \\\n"
     "               KMLA_D16(0), KMLA_D8(16), KMLA_D4(24)) \\\n"
     "    KMLA_WGMMA(name, types, 32, 64, KMLA_R32, 32, 33, 34, 35, 36, 37, \\\n"
     "               KMLA_D32(0)) \\\n"
     "    KMLA_WGMMA(name, types, 36, 72, KMLA_R36, 36, 37, 38, 39, 40, 41, \\\n"
     "               KMLA_D32(0), KMLA_D4(32)) \\\n"
     "    KMLA_WGMMA(name, types, 40, 80, KMLA_R40, 40, 41, 42, 43, 44, 45, \\\n"
     "               KMLA_D32(0), KMLA_D8(32))\n"
     "KMLA_WGMMAS(wgmma_f16, \"f16.f16\")\n"
     "KMLA_WGMMAS(wgmma_bf16, \"bf16.bf16\")\n"
     "\n"
     "// Two 8x8 matrices, transposed: lane l of 0..15 gives the address of row l%8 of matrix l/8.\n"
     "KMLA_DEVICE void store_matrix_x2_transposed(void* row, uint32_t low, uint32_t high) {\n"
     "    asm volatile(\"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};\" ::\"r\"(\n"
     "                     shared_address(row)),\n"
     "                 \"r\"(low), \"r\"(high)\n"
     "                 : \"memory\");\n"
     "}\n"
     "#endif\n"
     "\n"
     "// ---- dependent launch: a kernel may start before the one it follows has ended\n"
     "\n"
     "// What follows this kernel in its stream may be scheduled.\n"
     "KMLA_DEVICE void launch_dependents() {\n"
     "#if KMLA_ARCH >= 90\n"
    },
    {"instructions.cuh", 370,
     "    asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");\n"
     "#endif\n"
     "}\n"
     "// Until the kernel before has ended and its writes are visible.\n"
     "KMLA_DEVICE void wait_dependency() {\n"
     "#if KMLA_ARCH >= 90\n"
     "    asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
     "#endif\n"
     "}\n"
    },
    {"records.cuh", 1,
     "// Record formats: codes to numbers and back, which tokens a row sees, where a token's record is.\n"
     "\n"
     "// ---- E4M3 (\"fn\"): 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN\n"
     "\n"
     "// Four codes, exactly, as two pairs of f16: pair[0] has bytes 0 and 1, pair[1] bytes 2 and 3.\n"
     "KMLA_DEVICE void e4m3x4_to_f16(uint32_t codes, uint32_t (&pair)[2]) {\n"
     "#if KMLA_HAS_E4M3_CONVERT\n"
     "    e4m3x4_to_f16x2(codes, pair[0], pair[1]);\n"
     "#else\n"
     "    // Moved into f16's fields a code is its value times 2^-8, subnormals included.\n"
     "    const uint32_t two_to_8 = 0x5C005C00u;\n"
     "    for (int i = 0; i < 2; i++) {\n"
     "        uint32_t high_bytes = permute_bytes(codes, 0, i == 0 \? 0x1404 : 0x3424);\n"
     "        uint32_t magnitude = high_bytes & 0x7F007F00u;\n"
     "        uint32_t nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;\n"
     "        uint32_t small = (magnitude >> 1) | (high_bytes & 0x80008000u);\n"
     "        pair[i] = multiply_f16x2(small, two_to_8) | nan * 0x7FFFu;\n"
     "    }\n"
     "#endif\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float e4m3_to_float(uint32_t code) {\n"
     "    uint32_t magnitude = code & 0x7F;\n"
     "    float value = bits_float(magnitude << 20) * bits_float((127 + 120) << 23);\n"
     "    if (magnitude == 0x7F) {\n"
     "        value = bits_float(0x7FFFFFFF);\n"
     "    }\n"
     "    return code & 0x80 \? -value : value;\n"
     "}\n"
     "\n"
     "// Nearest-even, saturating at 448; NaN becomes 0x7F.\n"
     "KMLA_DEVICE uint32_t float_to_e4m3(float value) {\n"
     "    uint32_t bits = float_bits(value);\n"
     "    uint32_t magnitude = bits & 0x7FFFFFFFu;\n"
     "    uint32_t code;\n"
     "    if (magnitude > 0x7F800000u) {\n"
     "        return 0x7F;\n"
     "    }\n"
     "    if (magnitude > float_bits(448.0f)) {\n"
     "        magnitude = float_bits(448.0f);\n"
     "    }\n"
     "    if (magnitude < float_bits(0.015625f)) { // subnormal: a count of 2^-9, rounded by the adder\n"
     "        const float one_and_a_half_2_23 = 12582912.0f;\n"
     "        code = float_bits(bits_float(magnitude) * 512.0f + one_and_a_half_2_23) -\n"
     "               float_bits(one_and_a_half_2_23);\n"
     "    } else {\n"
     "        uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1);\n"
     "        code = (rounded >> 20) - ((127 - 7) << 3);\n"
     "    }\n"
     "    return code | ((bits >> 24) & 0x80);\n"
     "}\n"
     "\n"
     "// e4m3_to_float(float_to_e4m3(value)) for numbers, by one rounding addition.\n"
     "KMLA_DEVICE float round_to_e4m3(float value) {\n"
     "    uint32_t magnitude = float_bits(value) & 0x7FFFFFFFu;\n"
     "    if (magnitude > float_bits(448.0f) && magnitude <= 0x7F800000u) {\n"
     "        magnitude = float_bits(448.0f);\n"
     "    }\n"
     "    uint32_t exponent = magnitude & 0x7F800000u;\n"
     "    if (exponent < float_bits(0.015625f)) {\n"
     "        exponent = float_bits(0.015625f);\n"
     "    }\n"
     "    // Adding 1.5 * 2^20 times the leading bit leaves 3 bits below it.\n"
     "    float rounder = bits_float(exponent + (20u << 23)) * 1.5f;\n"
     "    float rounded = (bits_float(magnitude) + rounder) - rounder;\n"
     "    return float_bits(value) >> 31 \? -rounded : rounded;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float bf16_low(uint32_t pair) { return bits_float(pair << 16); }\n"
     "KMLA_DEVICE float bf16_high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }\n"
     "\n"
     "KMLA_DEVICE uint32_t float_to_bf16(float value) { return pack_bf16(value, 0.0f) & 0xFFFFu; }\n"
     "\n"
     "// Scale of a packed query's group: max(amax * (1/448), 1e-4), rounded up to a power of two.\n"
     "KMLA_DEVICE float round_up_to_power_of_two(float value) {\n"
     "    uint32_t bits = float_bits(value);\n"
     "    return bits_float((bits & 0x7F800000u) + ((bits & 0x007FFFFFu) \? 0x00800000u : 0));\n"
     "}\n"
     "KMLA_DEVICE float packed_query_scale(float amax) {\n"
     "    return round_up_to_power_of_two(maximum(multiply(amax, 1.0f / 448.0f), 1e-4f));\n"
     "}\n"
     "// 1 / scale of a power of two, from its exponent.\n"
     "KMLA_DEVICE float power_of_two_inverse(float scale) {\n"
     "    return bits_float((254u << 23) - float_bits(scale));\n"
     "}\n"
     "\n"
     "// ---- which tokens a row sees\n"
     "\n"
     "struct token_range {\n"
     "    int begin, end; // local tokens; empty if begin == end\n"
     "};\n"
     "\n"
     "// Tokens of a global length that this rank holds.\n"
     "KMLA_DEVICE int local_length(const kmla_i_reader_args& args, int global) {\n"
     "    if (args.dcp_ranks == 1) {\n"
     "        return global;\n"
     "    }\n"
     "    int64_t period = (int64_t)args.dcp_ranks * args.dcp_interleave;\n"
    },
    {"records.cuh", 99,
     "    int64_t rest = global % period - (int64_t)args.dcp_rank * args.dcp_interleave;\n"
     "    rest = rest < 0 \? 0 : rest > args.dcp_interleave \? args.dcp_interleave : rest;\n"
     "    return (int)(global / period * args.dcp_interleave + rest);\n"
     "}\n"
     "\n"
     "// What the caller says of a row's length. Apart from row_range so that other work can hide the load.\n"
     "KMLA_DEVICE int row_length(const kmla_i_reader_args& args, int group, int row) {\n"
     "    return ((const int32_t*)args.lengths)[args.per_request \? group : row];\n"
     "}\n"
     "\n"
     "// A row with that length is row `i` of its group's `rows`.\n"
     "KMLA_DEVICE token_range row_range(const kmla_i_reader_args& args, int length, int group, int i,\n"
     "                                  int rows) {\n"
     "    token_range range;\n"
     "    if (group == args.groups) { // rows after the last request are dead\n"
     "        return token_range{0, 0};\n"
     "    }\n"
     "    if (args.per_request) {\n"
     "        int64_t bound = length;\n"
     "        bound = args.draft \? bound : bound - rows + 1 + i;\n"
     "        bound = bound < 0 \? 0 : bound;\n"
     "        int64_t first = args.window && bound > args.window \? bound - args.window : 0;\n"
     "        range.begin = local_length(args, (int)first);\n"
     "        range.end = minimum(local_length(args, (int)bound), args.capacity);\n"
     "    } else {\n"
     "        range.end = minimum(maximum(length, 0), args.capacity);\n"
     "        range.begin = args.window \? maximum(range.end - args.window, 0) : 0;\n"
     "    }\n"
     "    range.begin = minimum(range.begin, range.end);\n"
     "    return range;\n"
     "}\n"
     "\n"
     "// The part of a row's range that split `split` reads.\n"
     "KMLA_DEVICE token_range split_range(const kmla_i_reader_args& args, token_range row, int split) {\n"
     "    if (row.begin >= row.end) {\n"
     "        return token_range{0, 0};\n"
     "    }\n"
     "    int first_chunk = row.begin / KMLA_CHUNK_TOKENS;\n"
     "    int live = (row.end + KMLA_CHUNK_TOKENS - 1) / KMLA_CHUNK_TOKENS - first_chunk;\n"
     "    int chunk = 0, chunks = 0;\n"
     "    if (args.splits == 1 || live <= args.single_split_chunks) {\n"
     "        if (split != 0) {\n"
     "            return token_range{0, 0};\n"
     "        }\n"
     "        return row;\n"
     "    }\n"
     "    if (args.balanced) {\n"
     "        int used = minimum(args.splits, live);\n"
     "        if (split < used) {\n"
     "            int share = live / used, longer = live % used;\n"
     "            chunk = first_chunk + split * share + minimum(split, longer);\n"
     "            chunks = share + (split < longer \? 1 : 0);\n"
     "        }\n"
     "    } else {\n"
     "        chunk = split * args.chunks_per_split;\n"
     "        chunks = args.chunks_per_split;\n"
     "    }\n"
     "    token_range part;\n"
     "    part.begin = maximum(row.begin, chunk * KMLA_CHUNK_TOKENS);\n"
     "    part.end = minimum(row.end, (chunk + chunks) * KMLA_CHUNK_TOKENS);\n"
     "    return part.begin < part.end \? part : token_range{0, 0};\n"
     "}\n"
     "\n"
     "// ---- where a token's record is\n"
     "\n"
     "// A token's page in its group's block table or its slot in the list; negative: there is none. Apart\n"
     "// from record_address so that the load can run a step ahead of its use.\n"
     "KMLA_DEVICE int table_entry(const kmla_i_reader_args& args, int group, int token) {\n"
     "    const int32_t* table = (const int32_t*)args.table + group * args.table_stride;\n"
     "    if (args.slot_list) {\n"
     "        return table[token];\n"
     "    }\n"
     "    return table[args.page_shift >= 0 \? token >> args.page_shift : token / args.page_tokens];\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint64_t record_address(const kmla_i_reader_args& args, int entry, int token,\n"
     "                                    int record_bytes) {\n"
     "    int slot = args.slot_list \? entry : token, page, offset;\n"
     "    if (args.page_shift >= 0) {\n"
     "        page = slot >> args.page_shift;\n"
     "        offset = slot & (args.page_tokens - 1);\n"
     "    } else {\n"
     "        page = slot / args.page_tokens;\n"
     "        offset = slot - page * args.page_tokens;\n"
     "    }\n"
     "    page = args.slot_list \? page : entry;\n"
     "    return args.kv + (uint64_t)page * args.page_pitch + (uint32_t)(offset * record_bytes);\n"
     "}\n"
    },
    {"tile.cuh", 1,
     "// What both readers share: which vectors and tokens a block reads, and where results go.\n"
     "//\n"
     "// A block reads one split of one group's tokens for KMLA_TILE query vectors (rows x heads of one\n"
     "// request, row-major). A group is a request, or with a slot list a row.\n"
     "\n"
     "#ifdef KMLA_TILE // an image holds one reader, or all of the support kernels\n"
     "\n"
     "#ifdef KMLA_HOPPER\n"
     "constexpr bool kHopper = true;\n"
     "#else\n"
     "constexpr bool kHopper = false;\n"
     "#endif\n"
     "constexpr int kTile = KMLA_TILE;\n"
     "constexpr int kColumns = kTile / 8; // N steps of a tile\n"
     "constexpr bool kPacked = KMLA_KV_FORMAT == KMLA_KV_PACKED;\n"
     "constexpr bool kE4m3 = KMLA_KV_FORMAT == KMLA_KV_E4M3;\n"
     "constexpr bool kBf16 = KMLA_KV_FORMAT == KMLA_KV_BF16;\n"
     "constexpr int kRecordBytes = kPacked \? KMLA_PACKED_BYTES : kE4m3 \? KMLA_E4M3_BYTES : KMLA_BF16_BYTES;\n"
     "constexpr int kPitch = kPacked \? KMLA_I_PITCH_PACKED\n"
     "                       : kE4m3 \? KMLA_I_PITCH_E4M3\n"
     "                               : KMLA_I_PITCH_BF16;\n"
     "constexpr int kStages = KMLA_STAGES;\n"
     "constexpr int kResident = KMLA_RESIDENT; // blocks that are to share an SM\n"
     "constexpr int kWarps = (kHopper \? KMLA_I_HOPPER_THREADS : KMLA_I_READER_THREADS) / 32;\n"
     "constexpr int kStep = kHopper \? KMLA_I_HOPPER_STEP_TOKENS\n"
     "                      : kBf16 \? KMLA_I_STEP_TOKENS\n"
     "                              : KMLA_I_FP8_STEP_TOKENS;\n"
     "constexpr int kWarpTokens = kStep / kWarps; // of the portable reader's step, for look-ups and copies\n"
     "constexpr int kGroups = KMLA_LATENT_DIMS / KMLA_GROUP_DIMS;\n"
     "constexpr int kLanesPerVector = kHopper \? 4 : 8; // that know a vector's range\n"
     "\n"
     "struct block_place {\n"
     "    // Where the thread is.\n"
     "    int lane, warp;\n"
     "    int row_in_quad, column; // of mma fragments: lane / 4, lane % 4\n"
     "    int vector, quad;        // the vector of the tile that kLanesPerVector lanes share, which lane\n"
     "    // What the block reads.\n"
     "    int group, first_row, rows, vectors; // vectors = rows * heads of the group\n"
     "    int first_vector;                    // of the tile\n"
     "    int split;\n"
     "    bool bulk; // a step's records lie in whole pages of packed records: bulk copies\n"
     "};\n"
     "\n"
     "KMLA_DEVICE void find_place(const kmla_i_reader_args& args, block_place& s) {\n"
     "    unsigned thread = (unsigned)thread_index(); // so that divisions are shifts\n"
     "    s.lane = (int)(thread % 32);\n"
     "    s.warp = (int)(thread / 32);\n"
     "    s.row_in_quad = (int)(thread % 32 / 4);\n"
     "    s.column = (int)(thread % 4);\n"
     "    s.vector = (int)(thread / kLanesPerVector);\n"
     "    s.quad = (int)(thread % kLanesPerVector);\n"
     "    s.group = block_z();\n"
     "    s.split = block_y();\n"
     "    s.first_vector = block_x() * kTile;\n"
     "    s.first_row = s.group * args.rows_per_group;\n"
     "    s.rows = args.rows_per_group;\n"
     "    if (args.ragged) {\n"
     "        const int32_t* offsets = (const int32_t*)args.row_offsets;\n"
     "        s.first_row = offsets[s.group];\n"
     "        s.rows = offsets[s.group + 1] - s.first_row;\n"
     "    }\n"
     "    s.vectors = s.rows * args.heads;\n"
     "    s.bulk = !args.slot_list && args.page_tokens % KMLA_I_STEP_TOKENS == 0;\n"
     "}\n"
     "\n"
     "// ---- the first bytes of shared memory: small things\n"
     "\n"
     "// The tile's tokens: the union of its vectors' ranges, and their intersection, where every vector\n"
     "// sees every token.\n"
     "struct tile_bounds {\n"
     "    int begin, end, full_begin, full_end;\n"
     "};\n"
     "// What is needed once a step or at the end, and so is not worth registers.\n"
     "struct tile_facts : tile_bounds {\n"
     "    int first_row, vectors, unused[2]; // as in block_place\n"
     "};\n"
     "// What this split reads of a vector's tokens. `whole`: all of them.\n"
     "struct vector_range {\n"
     "    int begin, end, whole, unused;\n"
     "};\n"
     "\n"
     "constexpr int kMaskBytes = kHopper \? 4 : 16; // of a stage: which of its tokens exist\n"
     "constexpr int kMasksAt = (8 * kStages + 15) / 16 * 16;\n"
     "constexpr int kFactsAt = (kMasksAt + kStages * kMaskBytes + 15) / 16 * 16;\n"
     "constexpr int kRangesAt = kHopper \? KMLA_I_HOPPER_MISC_BYTES : KMLA_I_MISC_BYTES;\n"
     "constexpr int kFactorsAt = kRangesAt + kTile * 16;\n"
     "constexpr int kTargetsAt = kFactorsAt + kTile * 4;\n"
     "constexpr int kSmallBytes = kTargetsAt + kTile * 8;\n"
    },
    {"tile.cuh", 89,
     "static_assert(kFactsAt + (int)sizeof(tile_facts) <= kRangesAt, \"barriers, masks and facts fit\");\n"
     "static_assert(sizeof(vector_range) == 16, \"one load\");\n"
     "\n"
     "KMLA_DEVICE uint64_t* arrival_of(int stage) { return (uint64_t*)shared_memory() + stage % kStages; }\n"
     "KMLA_DEVICE tile_facts& bounds() { return *(tile_facts*)(shared_memory() + kFactsAt); }\n"
     "KMLA_DEVICE vector_range& range_of(int n) {\n"
     "    return ((vector_range*)(shared_memory() + kRangesAt))[n];\n"
     "}\n"
     "// What a vector's accumulators times: to rescale them, in the end to make them results.\n"
     "KMLA_DEVICE float* factors() { return (float*)(shared_memory() + kFactorsAt); }\n"
     "// Where each vector's result goes: the address of its first element, + 1 if they are fp32 and not\n"
     "// BF16; 0: nowhere.\n"
     "KMLA_DEVICE uint64_t* targets() { return (uint64_t*)(shared_memory() + kTargetsAt); }\n"
     "KMLA_DEVICE uint64_t target_of(uint64_t base, int64_t element, int type) {\n"
     "    return base + (uint64_t)(element * (type == KMLA_FP32 \? 4 : 2)) + (type == KMLA_FP32);\n"
     "}\n"
     "\n"
     "#ifndef KMLA_HOPPER\n"
     "// A bit a token of a step: it exists. Word w is of warp w's tokens.\n"
     "typedef uint16_t warp_mask;\n"
     "KMLA_DEVICE warp_mask* token_masks_of(int step) {\n"
     "    return (warp_mask*)(shared_memory() + kMasksAt) + step % kStages * kWarps;\n"
     "}\n"
     "\n"
     "// Of the kWarpTokens tokens from `token` on, those in [first, last).\n"
     "KMLA_DEVICE warp_mask mask_of_tokens(int token, int first, int last) {\n"
     "    const uint32_t all = (1u << kWarpTokens) - 1;\n"
     "    if (last <= token || first >= token + kWarpTokens) {\n"
     "        return 0;\n"
     "    }\n"
     "    uint32_t from_first = all << maximum(first - token, 0);\n"
     "    uint32_t to_last = all >> maximum(token + kWarpTokens - last, 0);\n"
     "    return (warp_mask)(from_first & to_last & all);\n"
     "}\n"
     "\n"
     "// All tokens of the step exist.\n"
     "KMLA_DEVICE bool all_exist(const warp_mask* masks) {\n"
     "    const uint32_t all = ((1u << kWarpTokens) - 1) * 0x10001u;\n"
     "    word4 m = *(const word4*)masks;\n"
     "    return (m.x & m.y & m.z & m.w) == all;\n"
     "}\n"
     "#endif\n"
     "\n"
     "// ---- ranges\n"
     "\n"
     "KMLA_DEVICE tile_bounds join(tile_bounds a, tile_bounds b) {\n"
     "    return tile_bounds{minimum(a.begin, b.begin), maximum(a.end, b.end),\n"
     "                       maximum(a.full_begin, b.full_begin), minimum(a.full_end, b.full_end)};\n"
     "}\n"
     "\n"
     "// Of the lanes whose numbers differ in bits from `least` on.\n"
     "KMLA_DEVICE tile_bounds join_lanes(tile_bounds mine, int least) {\n"
     "    for (int mask = 16; mask >= least; mask /= 2) {\n"
     "        tile_bounds other = {(int)shuffle_xor((uint32_t)mine.begin, mask),\n"
     "                             (int)shuffle_xor((uint32_t)mine.end, mask),\n"
     "                             (int)shuffle_xor((uint32_t)mine.full_begin, mask),\n"
     "                             (int)shuffle_xor((uint32_t)mine.full_end, mask)};\n"
     "        mine = join(mine, other);\n"
     "    }\n"
     "    return mine;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE int vector_length(const kmla_i_reader_args& args, const block_place& s, int n) {\n"
     "    int vector = s.first_vector + n;\n"
     "    bool exists = n < kTile && vector < s.vectors;\n"
     "    return exists \? row_length(args, s.group, s.first_row + vector / args.heads) : 0;\n"
     "}\n"
     "\n"
     "// The range of the tile's vector n, of a row of that length; `bounds` are those of a tile of it alone,\n"
     "// or of nothing.\n"
     "KMLA_DEVICE vector_range find_range(const kmla_i_reader_args& args, const block_place& s, int n,\n"
     "                                    int length, tile_bounds& bounds) {\n"
     "    int vector = s.first_vector + n;\n"
     "    vector_range range = {0, 0, 0, 0};\n"
     "    bounds = tile_bounds{0x7FFFFFFF, 0, 0, 0x7FFFFFFF};\n"
     "    if (n < kTile && vector < s.vectors) {\n"
     "        int i = vector / args.heads;\n"
     "        token_range row = row_range(args, length, s.group, i, s.rows);\n"
     "        token_range part = split_range(args, row, s.split);\n"
     "        range.begin = part.begin;\n"
     "        range.end = part.end;\n"
     "        range.whole = part.begin == row.begin && part.end == row.end;\n"
     "        bounds.full_begin = range.begin;\n"
     "        bounds.full_end = range.end;\n"
     "        if (range.begin < range.end) {\n"
     "            bounds.begin = range.begin;\n"
     "            bounds.end = range.end;\n"
     "        }\n"
     "    }\n"
     "    return range;\n"
     "}\n"
     "\n"
    },
    {"tile.cuh", 181,
     "// Finds the range of each vector, and the tile's bounds. A block barrier must follow. `scratch`: shared\n"
     "// memory of 16 bytes a warp.\n"
     "KMLA_DEVICE void find_ranges(const kmla_i_reader_args& args, const block_place& s, void* scratch) {\n"
     "    tile_bounds mine;\n"
     "    vector_range range =\n"
     "        find_range(args, s, s.vector, vector_length(args, s, s.vector), mine);\n"
     "    if (s.vector < kTile && s.quad == 0) {\n"
     "        range_of(s.vector) = range;\n"
     "    }\n"
     "    mine = join_lanes(mine, kLanesPerVector);\n"
     "    tile_bounds* of_warp = (tile_bounds*)scratch;\n"
     "    if (s.lane == 0) {\n"
     "        of_warp[s.warp] = mine;\n"
     "    }\n"
     "    sync_block();\n"
     "    if (thread_index() == 0) {\n"
     "        for (int w = 1; w < kWarps; w++) {\n"
     "            mine = join(mine, of_warp[w]);\n"
     "        }\n"
     "        (tile_bounds&)bounds() = mine;\n"
     "        bounds().first_row = s.first_row;\n"
     "        bounds().vectors = s.vectors;\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- results\n"
     "\n"
     "// Index of a partial: [S][R][H].\n"
     "KMLA_DEVICE int64_t part_index(const kmla_i_reader_args& args, int split, int64_t row, int head) {\n"
     "    return (split * (int64_t)args.rows + row) * args.heads + head;\n"
     "}\n"
     "\n"
     "// `final`: this is the row's result, not a part of it. Its partial's lse is then +inf, which tells\n"
     "// the merge so.\n"
     "KMLA_DEVICE void store_lse(const kmla_i_reader_args& args, int split, int64_t row, int head,\n"
     "                           float lse, bool final) {\n"
     "    if (args.splits > 1) {\n"
     "        float part_lse = final \? infinity() : lse;\n"
     "        ((float*)args.part_lse)[part_index(args, split, row, head)] = part_lse;\n"
     "    }\n"
     "    if (final && args.lse) {\n"
     "        ((float*)args.lse)[row * args.lse_row_stride + head * args.lse_head_stride] = lse;\n"
     "    }\n"
     "}\n"
     "\n"
     "// For store_results: where vector n's result goes if its split finds tokens of it. `first_row` and\n"
     "// `vectors` as in block_place.\n"
     "KMLA_DEVICE void place_vector(const kmla_i_reader_args& args, int n, int first_row, int vectors) {\n"
     "    int vector = block_x() * kTile + n;\n"
     "    if (vector >= vectors) {\n"
     "        targets()[n] = 0;\n"
     "        return;\n"
     "    }\n"
     "    int64_t row = first_row + vector / args.heads;\n"
     "    int head = vector % args.heads;\n"
     "    bool final = args.splits == 1 || range_of(n).whole;\n"
     "    targets()[n] =\n"
     "        final \? target_of(args.out, row * args.out_row_stride + head * args.out_head_stride,\n"
     "                          args.out_type)\n"
     "              : target_of(args.part_out, part_index(args, block_y(), row, head) * KMLA_LATENT_DIMS,\n"
     "                          args.partial_type);\n"
     "}\n"
     "\n"
     "// For store_results: what vector n's accumulators times, `scale` of what they lack over `sum`. One\n"
     "// without tokens gets zeros as its output, but no partial: its weight is 0.\n"
     "KMLA_DEVICE void weigh_vector(const kmla_i_reader_args& args, int n, float sum, float scale) {\n"
     "    bool empty = sum == 0;\n"
     "    factors()[n] = empty \? 0 : divide(scale, sum);\n"
     "    if (empty && args.splits > 1) {\n"
     "        targets()[n] = 0;\n"
     "    }\n"
     "}\n"
     "\n"
     "// Stores the lse of vector n; `sum` is of exp2(score - reference).\n"
     "KMLA_DEVICE void store_vector_lse(const kmla_i_reader_args& args, int n, float sum,\n"
     "                                  float reference) {\n"
     "    const float ln_2 = 0.693147181f;\n"
     "    int vector = block_x() * kTile + n;\n"
     "    bool empty = sum == 0;\n"
     "    bool final = args.splits == 1 || (!empty && range_of(n).whole);\n"
     "    float lse = empty \? -infinity() : (reference + log2_fast(sum)) * ln_2;\n"
     "    if (vector < bounds().vectors) {\n"
     "        store_lse(args, block_y(), bounds().first_row + vector / args.heads, vector % args.heads,\n"
     "                  lse, final);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void finish_vector(const kmla_i_reader_args& args, int n, float sum, float reference,\n"
     "                               float scale) {\n"
     "    place_vector(args, n, bounds().first_row, bounds().vectors);\n"
     "    weigh_vector(args, n, sum, scale);\n"
     "    store_vector_lse(args, n, sum, reference);\n"
     "}\n"
     "\n"
     "// Eight neighbouring dims of one vector, from `dim` on.\n"
     "KMLA_DEVICE void store_out(uint64_t target, int dim, const float (&x)[8]) {\n"
     "    if (target & 1) {\n"
    },
    {"tile.cuh", 278,
     "        word4* to = (word4*)(target - 1 + 4 * (uint32_t)dim);\n"
     "        to[0] = word4{float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])};\n"
     "        to[1] = word4{float_bits(x[4]), float_bits(x[5]), float_bits(x[6]), float_bits(x[7])};\n"
     "    } else if (target) {\n"
     "        *(word4*)(target + 2 * (uint32_t)dim) = word4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),\n"
     "                                                      pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};\n"
     "    }\n"
     "}\n"
     "\n"
     "// `out`: O^T of the warp's 64 dims; tile m has dims 8 * row_in_quad + 2m and + 2m + 1.\n"
     "KMLA_DEVICE void store_results(const kmla_i_reader_args& args, const block_place& s,\n"
     "                               const float (&out)[4][kColumns * 4]) {\n"
     "    int dim = 64 * s.warp + 8 * s.row_in_quad;\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "#pragma unroll\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            float x[8], factor = factors()[8 * j + 2 * s.column + i];\n"
     "#pragma unroll\n"
     "            for (int m = 0; m < 4; m++) {\n"
     "                x[2 * m] = factor == 0 \? 0 : out[m][4 * j + i] * factor;\n"
     "                x[2 * m + 1] = factor == 0 \? 0 : out[m][4 * j + 2 + i] * factor;\n"
     "            }\n"
     "            store_out(targets()[8 * j + 2 * s.column + i], dim, x);\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Rows behind the last request of a ragged batch: no tokens.\n"
     "KMLA_DEVICE void clear_dead_rows(const kmla_i_reader_args& args) {\n"
     "    int first = ((const int32_t*)args.row_offsets)[args.groups];\n"
     "    for (int64_t row = first + block_x(); row < args.rows; row += grid_x()) {\n"
     "        for (int head = 0; head < args.heads; head++) {\n"
     "            const float zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};\n"
     "            int dim = 8 * thread_index();\n"
     "            if (args.splits == 1 && dim < KMLA_LATENT_DIMS) {\n"
     "                store_out(target_of(args.out, row * args.out_row_stride + head * args.out_head_stride,\n"
     "                                    args.out_type),\n"
     "                          dim, zeros);\n"
     "            }\n"
     "            if (dim == 0) {\n"
     "                store_lse(args, block_y(), row, head, -infinity(), args.splits == 1);\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "#endif\n"
    },
    {"reader.cuh", 1,
     "// The portable reader: sm_80 and up, mma.sync.\n"
     "//\n"
     "// Operands are swapped: tokens are the M side of S^T = K q^T, latent dims the M side of\n"
     "// O^T = V^T P^T, vectors the N side, whose step is 8. So each record is converted once a block, from\n"
     "// raw bytes straight into fragments, and 99 heads pad to 104, not to 128.\n"
     "//\n"
     "// A step is 64 tokens (BF16 KV: 32). In QK its warps are 2 halves of the tokens x 4 groups of 128\n"
     "// dims (and 16 rope lanes), whose query stays in registers. What they have is in units of 16 tokens\n"
     "// x 8 vectors. The four warps of a half exchange their sums so that each unit has one owner, which\n"
     "// sees it through softmax; each counts units from its own on, so that registers need no index. In PV\n"
     "// a warp has 64 dims. A vector's bits do not depend on how vectors are tiled: no sum's order does.\n"
     "//\n"
     "// Exactness: codes and a query normalised by a power of two are exact in f16; scales enter in fp32\n"
     "// after the sum over their group. P is f16, whose range is kept by a reference per vector: a\n"
     "// token's weight carries the exponent of its largest scale, V only the rest (in (0,1]). Weights are\n"
     "// computed by the references that are there; a vote says whether some vector has outgrown its own,\n"
     "// and only then maxima are taken and the step's weights computed again.\n"
     "//\n"
     "// At 2,048 tokens a block runs four steps, and what it runs once costs most for being fetched. So the\n"
     "// query is staged by rolled loops, and what a usual step does not need lies outside of its code.\n"
     "\n"
     "#if defined(KMLA_TILE) && !defined(KMLA_HOPPER)\n"
     "\n"
     "constexpr int kLatentSteps = KMLA_GROUP_DIMS / 16; // k16 steps of a warp's latent group\n"
     "constexpr int kQuerySteps = kLatentSteps + 1;      // and one of 16 rope lanes\n"
     "constexpr int kTokenTiles = kStep / 32;            // of 16 tokens: of a warp in QK\n"
     "constexpr int kStepTiles = kStep / 16;\n"
     "constexpr int kUnits = kColumns * kTokenTiles;     // of a half; unit u is of tile u % kTokenTiles\n"
     "constexpr int kOwners = kUnits < kGroups \? kUnits : kGroups; // warps of a half: u % kOwners is owner\n"
     "constexpr int kSlots = kUnits / kOwners;                     // units that an owner has\n"
     "constexpr int kSources = kSlots > 1 \? 1 : kGroups - 1; // groups exchanged at a time: as room allows\n"
     "constexpr int kWeightPitch = kStep + 8;            // so that rows fall into different banks\n"
     "constexpr float kNoReference = -3.40282347e38f;    // of a vector without a token: any outgrows it\n"
     "\n"
     "// ---- shared memory, in this order; the host computes the same sum\n"
     "\n"
     "constexpr int kStagesAt = kSmallBytes;\n"
     "// fp32 [2 halves][owners][slots][sources][32 lanes][4]\n"
     "constexpr int kExchangeAt = kStagesAt + kStages * kStep * kPitch;\n"
     "constexpr int kWeightsAt = kExchangeAt + 2 * kUnits * kSources * 512; // [1|2][tile][pitch]\n"
     "constexpr int kRatiosAt = kWeightsAt + kTile * kWeightPitch * 2 * (kBf16 \? 2 : 1);\n"
     "constexpr int kExponentsAt = kRatiosAt + (kPacked \? kStep * kGroups * 2 : 0); // f16 [4][step]\n"
     "constexpr int kRunsAt = kExponentsAt + (kPacked \? kStep * 4 : 0);             // fp32 [step]\n"
     "constexpr int kEnd = kRunsAt + (kPacked \? 32 * 32 : 0);                       // [32]\n"
     "constexpr int kFreeAt = kFactsAt + (int)sizeof(tile_facts);                   // barriers\n"
     "static_assert(kEnd == KMLA_SHARED_BYTES, \"host and device layouts differ\");\n"
     "static_assert(kFreeAt + 8 * kStages <= kRangesAt, \"more barriers fit\");\n"
     "static_assert((2 * kStepTiles) * kTile * 4 <= kWeightsAt - kExchangeAt, \"maxima fit\");\n"
     "// The query on its way to registers: where the second step will be.\n"
     "constexpr int kQueryAt = kStagesAt + kStep * kPitch;\n"
     "static_assert(kTile * KMLA_QUERY_DIMS * 2 <= kStep * kPitch, \"the query fits\");\n"
     "\n"
     "// Softmax of a unit: the lane's vectors are 2 * column and the next, its tokens row_in_quad and + 8.\n"
     "struct unit_state {\n"
     "    float sum_reference[2];    // log2; sum has exp2(score - sum_reference)\n"
     "    float weight_reference[2]; // above that: weights are exp2(score - sum_reference + exponent - it)\n"
     "    float sum[2];              // of the lane's own tokens\n"
    },
    {"reader.cuh", 58,
     "    float scale[2];            // what makes scores of sums, in log2 units\n"
     "};\n"
     "\n"
     "struct reader_state : block_place {\n"
     "    int dims, half;     // in QK: the warp's group of dims, its half of the step's tokens\n"
     "    int owner;          // whose units the warp counts from: dims, if that is an owner\n"
     "    word2 query[kQuerySteps][kColumns]; // B fragments, of columns as column_of counts them\n"
     "    unit_state unit[kSlots];\n"
     "    float out[4][kColumns][4]; // O^T, as in store_results\n"
     "};\n"
     "\n"
     "KMLA_DEVICE uint8_t* stage_of(int step) {\n"
     "    return shared_memory() + kStagesAt + step % kStages * kStep * kPitch;\n"
     "}\n"
     "KMLA_DEVICE uint16_t* weights() { return (uint16_t*)(shared_memory() + kWeightsAt); }\n"
     "KMLA_DEVICE uint16_t* ratios_of(int group) {\n"
     "    return (uint16_t*)(shared_memory() + kRatiosAt) + group * kStep;\n"
     "}\n"
     "KMLA_DEVICE float* exponents() { return (float*)(shared_memory() + kExponentsAt); }\n"
     "// A lane's sums of an owner's unit from another group, which is `other` = its number ^ the owner's.\n"
     "KMLA_DEVICE word4& exchanged(const reader_state& s, int owner, int slot, int other) {\n"
     "    int row = ((s.half * kOwners + owner) * kSlots + slot) * kSources + (other - 1) % kSources;\n"
     "    return ((word4*)(shared_memory() + kExchangeAt))[row * 32 + s.lane];\n"
     "}\n"
     "// By vector, of 16 tokens each: maxima, in the end sums. Where scores are exchanged, between times.\n"
     "KMLA_DEVICE float* of_tokens(int tile) {\n"
     "    return (float*)(shared_memory() + kExchangeAt) + tile * kTile;\n"
     "}\n"
     "\n"
     "// The warp's tile `i` of its half's tokens, its column `i` of vectors, as indices of the step's and of\n"
     "// the tile's. Its tile and columns i * kOwners / kTokenTiles, 0 in the first slot, are those it owns.\n"
     "KMLA_DEVICE int tile_of(const reader_state& s, int i) {\n"
     "    return s.half * kTokenTiles + (i ^ s.owner % kTokenTiles);\n"
     "}\n"
     "KMLA_DEVICE int column_of(const reader_state& s, int i) { return i ^ s.owner / kTokenTiles; }\n"
     "constexpr int kSlotColumns = kOwners / kTokenTiles; // from a slot's column to the next one's\n"
     "// The lane's first vector of a slot, and whether there is such a slot.\n"
     "KMLA_DEVICE int vector_of(const reader_state& s, int slot) {\n"
     "    return 8 * column_of(s, slot * kSlotColumns) + 2 * s.column;\n"
     "}\n"
     "KMLA_DEVICE bool owns(const reader_state& s) { return kOwners == kGroups || s.owner == s.dims; }\n"
     "\n"
     "// ---- the query: B fragments, f16 normalised by a power of two, or BF16 for BF16 KV\n"
     "//\n"
     "// A fragment is of 8 vectors and 16 dims. Lane l has vector l/4 and, of dims that meet codes, 4(l%4)..+3,\n"
     "// the k order of the records' 4-byte words, so that A fragments need no shuffling; else mma's own order.\n"
     "// Staging takes 16 lanes a vector and 8 dims a lane at a time: half of four lanes' fragments.\n"
     "\n"
     "constexpr int kQueryChunks = (KMLA_QUERY_DIMS + 127) / 128; // of 16 lanes x 8 dims: groups, rope\n"
     "KMLA_DEVICE constexpr bool meets_codes(bool rope) { return kE4m3 || (kPacked && !rope); }\n"
     "\n"
     "// The fragment of a group's k16 step k and the tile's column j.\n"
     "KMLA_DEVICE word2* staged_query(int group, int k, int j) {\n"
     "    return (word2*)(shared_memory() + kQueryAt) + ((group * kQuerySteps + k) * kColumns + j) * 32;\n"
     "}\n"
     "\n"
     "// What a lane stages of vector n's chunk i.\n"
     "struct query_piece {\n"
     "    int dim;      // its first\n"
     "    word4* at;    // as 8 BF16, in the end as fragments\n"
     "    bool exists;  // rope is half a chunk\n"
     "};\n"
     "KMLA_DEVICE query_piece piece_of(const reader_state& s, int n, int i) {\n"
     "    int part = s.lane % 16, group = i, step = part / 2; // of 16 dims\n"
     "    if (i == kGroups) {\n"
     "        group = step;\n"
     "        step = kLatentSteps;\n"
     "    }\n"
     "    int lane = n % 8 * 4 + part % 2 * 2; // which has the first four\n"
     "    return query_piece{128 * i + 8 * part,\n"
     "                       (word4*)(staged_query(group % kGroups, step, n / 8) + lane),\n"
     "                       i < kGroups || part < KMLA_ROPE_DIMS / 8};\n"
     "}\n"
     "\n"
     "KMLA_DEVICE int first_staged(const reader_state& s) { return thread_index() / 16; }\n"
     "constexpr int kStagedAtOnce = KMLA_I_READER_THREADS / 16; // vectors\n"
     "\n"
    },
    {"reader.cuh", 135,
     "KMLA_DEVICE uint64_t query_record(const kmla_i_reader_args& args, const reader_state& s, int n) {\n"
     "    int vector = s.first_vector + n;\n"
     "    return args.query + (s.first_row + vector / args.heads) * args.query_row_stride +\n"
     "           vector % args.heads * args.query_head_stride;\n"
     "}\n"
     "\n"
     "// Starts the copies of the query as it is: BF16, or in the upper half of a piece codes.\n"
     "KMLA_DEVICE void load_query(const kmla_i_reader_args& args, const reader_state& s) {\n"
     "#pragma unroll 1\n"
     "    for (int n = first_staged(s); n < kTile; n += kStagedAtOnce) {\n"
     "        bool exists = s.first_vector + n < s.vectors;\n"
     "        uint64_t record = exists \? query_record(args, s, n) : args.query;\n"
     "#pragma unroll 1\n"
     "        for (int i = 0; i < kQueryChunks; i++) {\n"
     "            query_piece piece = piece_of(s, n, i);\n"
     "            bool packed_rope = args.query_format == KMLA_QUERY_PACKED && i == kGroups;\n"
     "            if (!piece.exists) {\n"
     "                continue;\n"
     "            }\n"
     "            if (!exists || args.query_format == KMLA_QUERY_BF16 || packed_rope) {\n"
     "                uint64_t from = record + (packed_rope \? KMLA_PACKED_ROPE_OFFSET - 2 * KMLA_LATENT_DIMS\n"
     "                                                      : 0);\n"
     "                copy_async_16(piece.at, (const void*)(exists \? from + 2 * piece.dim : record), exists);\n"
     "            } else {\n"
     "                copy_async_8((word2*)piece.at + 1, (const void*)(record + piece.dim));\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "    copy_async_commit();\n"
     "}\n"
     "\n"
     "// Eight codes times a scale, exactly, as BF16. An E4M3 query's one scale is in score_scale.\n"
     "KMLA_DEVICE word4 codes_to_bf16(uint32_t low, uint32_t high, float scale) {\n"
     "    float x[8];\n"
     "    for (int i = 0; i < 4; i++) {\n"
     "        x[i] = e4m3_to_float(low >> (8 * i) & 0xFF) * scale;\n"
     "        x[4 + i] = e4m3_to_float(high >> (8 * i) & 0xFF) * scale;\n"
     "    }\n"
     "    return word4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),\n"
     "                 pack_bf16(x[6], x[7])};\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float amax_of_pair(float amax, uint32_t pair) {\n"
     "    pair &= 0x7FFF7FFFu;\n"
     "    return maximum(amax, maximum(bf16_low(pair), bf16_high(pair)));\n"
     "}\n"
     "KMLA_DEVICE float amax_of_piece(float amax, const word4& x) {\n"
     "    return amax_of_pair(amax_of_pair(amax_of_pair(amax_of_pair(amax, x.x), x.y), x.z), x.w);\n"
     "}\n"
     "// Over the 16 lanes of a vector.\n"
     "KMLA_DEVICE float vector_amax(float amax) {\n"
     "    for (int mask = 1; mask < 16; mask *= 2) {\n"
     "        amax = maximum(amax, shuffle_xor(amax, mask));\n"
     "    }\n"
     "    return amax;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint32_t round_pair_to_e4m3(uint32_t pair, float scale, float inverse) {\n"
     "    return pack_bf16(round_to_e4m3(bf16_low(pair) * inverse) * scale,\n"
     "                     round_to_e4m3(bf16_high(pair) * inverse) * scale);\n"
     "}\n"
     "\n"
     "// What the packed query writer would store of a group, read back: exact in BF16.\n"
     "KMLA_DEVICE word4 round_to_packed(const word4& x) {\n"
     "    const float largest = bits_float(0x7F7FFFFFu);\n"
     "    float amax = vector_amax(amax_of_piece(0, x));\n"
     "    float scale = packed_query_scale(amax > largest \? largest : amax);\n"
     "    float inverse = power_of_two_inverse(scale);\n"
     "    return word4{round_pair_to_e4m3(x.x, scale, inverse), round_pair_to_e4m3(x.y, scale, inverse),\n"
     "                 round_pair_to_e4m3(x.z, scale, inverse), round_pair_to_e4m3(x.w, scale, inverse)};\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint32_t normalise_pair(uint32_t pair, float factor, bool to_f16) {\n"
     "    float low = bf16_low(pair) * factor, high = bf16_high(pair) * factor;\n"
     "    return to_f16 \? pack_f16(low, high) : pack_bf16(low, high);\n"
     "}\n"
     "\n"
     "// A piece in mma's own order: its neighbour lane has the other 8 of 16 dims.\n"
     "KMLA_DEVICE word4 order_piece(const reader_state& s, const word4& x) {\n"
     "    bool upper = s.lane % 2;\n"
     "    uint32_t a = shuffle_xor(upper \? x.x : x.z, 1), b = shuffle_xor(upper \? x.y : x.w, 1);\n"
     "    return upper \? word4{a, x.z, b, x.w} : word4{x.x, a, x.y, b};\n"
     "}\n"
     "\n"
     "// Exactly, as BF16. Returns the lane's largest magnitude.\n"
     "KMLA_DEVICE float decode_query(const kmla_i_reader_args& args, const reader_state& s, int n) {\n"
    },
    {"reader.cuh", 221,
     "    bool codes = args.query_format != KMLA_QUERY_BF16 && s.first_vector + n < s.vectors;\n"
     "    bool packed = args.query_format == KMLA_QUERY_PACKED;\n"
     "    bool rounds = args.e4m3_query && args.query_format == KMLA_QUERY_BF16;\n"
     "    float amax = 0;\n"
     "#pragma unroll 1\n"
     "    for (int i = 0; i < kQueryChunks; i++) {\n"
     "        query_piece piece = piece_of(s, n, i);\n"
     "        word4 x = {0, 0, 0, 0};\n"
     "        if (piece.exists) {\n"
     "            x = *piece.at;\n"
     "        }\n"
     "        if (codes && !(packed && i == kGroups)) {\n"
     "            float scale = packed \? ((const float*)(query_record(args, s, n) +\n"
     "                                                   KMLA_PACKED_SCALE_OFFSET))[i]\n"
     "                                 : 1.0f;\n"
     "            x = codes_to_bf16(x.z, x.w, scale);\n"
     "        }\n"
     "        if (rounds && i < kGroups) {\n"
     "            x = round_to_packed(x);\n"
     "        }\n"
     "        amax = amax_of_piece(amax, x);\n"
     "        if (piece.exists) {\n"
     "            *piece.at = x;\n"
     "        }\n"
     "    }\n"
     "    return amax;\n"
     "}\n"
     "\n"
     "// From values to fragments. What f16 drops is below 2^-38 of the vector's largest element, which lies\n"
     "// in [2^14, 2^15).\n"
     "KMLA_DEVICE void normalise_query(const kmla_i_reader_args& args, const reader_state& s, int n,\n"
     "                                 float amax) {\n"
     "    int exponent = minimum(maximum((int)(float_bits(amax) >> 23), 64), 254);\n"
     "    float factor = kBf16 \? 1.0f : bits_float((uint32_t)(127 + 14 + 127 - exponent) << 23);\n"
     "    float norm = kBf16 \? 1.0f : bits_float((uint32_t)(exponent - 14) << 23);\n"
     "#pragma unroll 1\n"
     "    for (int i = 0; i < kQueryChunks; i++) {\n"
     "        query_piece piece = piece_of(s, n, i);\n"
     "        bool codes = meets_codes(i == kGroups), to_f16 = codes; // packed rope is BF16, like its KV\n"
     "        word4 x = {0, 0, 0, 0};\n"
     "        if (piece.exists) {\n"
     "            x = *piece.at;\n"
     "        }\n"
     "        if (!kBf16) {\n"
     "            x = word4{normalise_pair(x.x, factor, to_f16), normalise_pair(x.y, factor, to_f16),\n"
     "                      normalise_pair(x.z, factor, to_f16), normalise_pair(x.w, factor, to_f16)};\n"
     "        }\n"
     "        if (!codes) {\n"
     "            x = order_piece(s, x);\n"
     "        }\n"
     "        if (piece.exists) {\n"
     "            *piece.at = x;\n"
     "        }\n"
     "    }\n"
     "    if (s.lane % 16 == 0) {\n"
     "        of_tokens(0)[n] = args.score_scale * norm;\n"
     "    }\n"
     "}\n"
     "\n"
     "// Into registers. Its barriers also show ranges, places and the first step's masks to all.\n"
     "KMLA_DEVICE void finish_query(const kmla_i_reader_args& args, reader_state& s) {\n"
     "    copy_async_wait<1>(); // all but the first step's records\n"
     "#pragma unroll 1\n"
     "    for (int n = first_staged(s); n < (kTile + 1) / 2 * 2; n += kStagedAtOnce) {\n"
     "        normalise_query(args, s, n, vector_amax(decode_query(args, s, n)));\n"
     "    }\n"
     "    sync_block();\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kQuerySteps; k++) {\n"
     "        for (int j = 0; j < kColumns; j++) {\n"
     "            s.query[k][j] = staged_query(s.dims, k, column_of(s, j))[s.lane];\n"
     "        }\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            s.unit[slot].scale[i] = of_tokens(0)[vector_of(s, slot) + i];\n"
     "        }\n"
     "    }\n"
     "    fence_async_reads();\n"
     "    sync_block(); // before the second step's records come, and scores are exchanged\n"
     "}\n"
     "\n"
     "// ---- KV to shared memory\n"
     "\n"
     "constexpr int kRunTokens = KMLA_I_STEP_TOKENS; // of one bulk copy: they lie in one page\n"
     "constexpr int kRuns = kStep / kRunTokens;\n"
     "constexpr int kLookUpSteps = 32 / kRuns; // whose runs the lanes of a warp look up at once\n"
     "\n"
     "KMLA_DEVICE bool copies_in_bulk(const reader_state& s) {\n"
     "    return KMLA_HAS_BULK_COPY && kPitch == kRecordBytes && s.bulk;\n"
     "}\n"
     "\n"
     "// The warp that starts bulk copies: the last, which small tiles leave idle in softmax.\n"
     "KMLA_DEVICE bool is_copier(const reader_state& s) {\n"
     "    return s.warp == KMLA_I_READER_THREADS / 32 - 1;\n"
     "}\n"
     "\n"
     "// Table look-ups for copies that are to come, of the step that begins at `token` on. In bulk: the\n"
     "// entry of the lane's run, of 32. Else that of the token of this step that the lane answers for, -1\n"
     "// if it is not wanted.\n"
     "template <bool bulk>\n"
    },
    {"reader.cuh", 323,
     "KMLA_DEVICE int look_up(const kmla_i_reader_args& args, const reader_state& s,\n"
     "                        const tile_bounds& tokens, int token) {\n"
     "    if (bulk) {\n"
     "        token += s.lane * kRunTokens;\n"
     "        return is_copier(s) && token < args.capacity \? table_entry(args, s.group, token) : -1;\n"
     "    }\n"
     "    token += s.warp * kWarpTokens + s.lane % kWarpTokens;\n"
     "    bool wanted = token >= tokens.begin && token < tokens.end;\n"
     "    return wanted \? table_entry(args, s.group, token) : -1;\n"
     "}\n"
     "\n"
     "// Where the split's first step most likely begins: with neither a window nor balanced splits.\n"
     "KMLA_DEVICE int likely_first(const kmla_i_reader_args& args, const reader_state& s) {\n"
     "    return s.split * args.chunks_per_split * KMLA_CHUNK_TOKENS;\n"
     "}\n"
     "\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "// Bulk copies are made ready 32 runs at a time, a run a lane, so that starting one is quick.\n"
     "struct alignas(32) run_copy {\n"
     "    uint64_t from;         // its first record\n"
     "    uint32_t to, bytes;    // from the begin of the stage\n"
     "    warp_mask masks[4];    // of its tokens' warps: those that are wanted\n"
     "    uint32_t unused[2];\n"
     "};\n"
     "static_assert(sizeof(run_copy) == 32, \"as the host counts\");\n"
     "static_assert(!kPacked || kRunTokens == 4 * kWarpTokens, \"a run is four warps' tokens\");\n"
     "KMLA_DEVICE run_copy& run_of_lane(const reader_state& s) {\n"
     "    return ((run_copy*)(shared_memory() + kRunsAt))[s.lane];\n"
     "}\n"
     "// Tells that all warps are done with a stage's records.\n"
     "KMLA_DEVICE uint64_t* free_of(int step) {\n"
     "    return (uint64_t*)(shared_memory() + kFreeAt) + step % kStages;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void prepare_run(const kmla_i_reader_args& args, const reader_state& s,\n"
     "                             const tile_bounds& tokens, int token, int entry) {\n"
     "    token += s.lane * kRunTokens;\n"
     "    int first = minimum(maximum(tokens.begin - token, 0), kRunTokens);\n"
     "    int last = entry < 0 \? first : maximum(minimum(tokens.end - token, kRunTokens), first);\n"
     "    run_copy& run = run_of_lane(s);\n"
     "    run.from = record_address(args, entry, token + first, kRecordBytes);\n"
     "    run.to = (uint32_t)((s.lane % kRuns * kRunTokens + first) * kPitch);\n"
     "    run.bytes = (uint32_t)((last - first) * kRecordBytes);\n"
     "#pragma unroll 1\n"
     "    for (int w = 0; w < 4; w++) {\n"
     "        run.masks[w] = mask_of_tokens(w * kWarpTokens, first, last);\n"
     "    }\n"
     "}\n"
     "\n"
     "// By the lanes that have the step's runs.\n"
     "KMLA_DEVICE void start_bulk_copies(const reader_state& s, int step) {\n"
     "    int run = s.lane - step % kLookUpSteps * kRuns;\n"
     "    if (run < 0 || run >= kRuns) {\n"
     "        return;\n"
     "    }\n"
     "    const run_copy& copy = run_of_lane(s);\n"
     "    *(word2*)(token_masks_of(step) + 4 * run) = *(const word2*)copy.masks;\n"
     "    barrier_arrive_expect(arrival_of(step), copy.bytes);\n"
     "    if (copy.bytes) {\n"
     "        copy_bulk(stage_of(step) + copy.to, (const void*)copy.from, copy.bytes, arrival_of(step));\n"
     "    }\n"
     "}\n"
     "#endif\n"
     "\n"
     "// Every warp copies its records, 16 bytes a lane; one that does not exist becomes zeros.\n"
     "KMLA_DEVICE void start_record_copies(const kmla_i_reader_args& args, const reader_state& s,\n"
     "                                     int step, int token, int entry) {\n"
     "    uint32_t exists = ballot(entry >= 0) & ((1u << kWarpTokens) - 1);\n"
     "    uint64_t address = record_address(\n"
     "        args, entry, token + s.warp * kWarpTokens + s.lane % kWarpTokens, kRecordBytes);\n"
     "    address = entry >= 0 \? address : 0;\n"
     "    if (s.lane == 0) {\n"
     "        token_masks_of(step)[s.warp] = (warp_mask)exists;\n"
     "    }\n"
     "    uint8_t* stage = stage_of(step) + s.warp * kWarpTokens * kPitch;\n"
     "#pragma unroll 1\n"
     "    for (int i = 0; i < kWarpTokens; i++) {\n"
     "        uint64_t record = shuffle(address, i);\n"
     "        for (int at = 16 * s.lane; at < kRecordBytes; at += 16 * 32) {\n"
     "            copy_async_16(stage + i * kPitch + at, (const void*)((record \? record : args.kv) + at),\n"
     "                          record != 0);\n"
     "        }\n"
     "    }\n"
     "    copy_async_commit();\n"
     "}\n"
     "\n"
     "// Starts the copy of a step, which begins at `token`, when its stage is free. Tokens outside the\n"
     "// tile's bounds are not read. `entry`: the look-up, if not in bulk.\n"
     "template <bool bulk>\n"
    },
    {"reader.cuh", 412,
     "KMLA_DEVICE void start_copy(const kmla_i_reader_args& args, const reader_state& s, int step,\n"
     "                            int token, int entry) {\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "    if (bulk) {\n"
     "        if (is_copier(s)) {\n"
     "            if (step >= kStages) {\n"
     "                barrier_wait(free_of(step), (uint32_t)(step / kStages - 1) & 1);\n"
     "            }\n"
     "            start_bulk_copies(s, step);\n"
     "        }\n"
     "        return;\n"
     "    }\n"
     "#endif\n"
     "    start_record_copies(args, s, step, token, entry);\n"
     "}\n"
     "\n"
     "// What the copies of steps from `step` on need, made ready from a look-up.\n"
     "template <bool bulk>\n"
     "KMLA_DEVICE void prepare_copies(const kmla_i_reader_args& args, const reader_state& s,\n"
     "                                const tile_bounds& tokens, int token, int entry) {\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "    if (bulk && is_copier(s)) {\n"
     "        prepare_run(args, s, tokens, token, entry);\n"
     "    }\n"
     "#endif\n"
     "}\n"
     "\n"
     "// Until the step is here, for all threads; if each copied its part, nobody is in the step before.\n"
     "template <bool bulk> KMLA_DEVICE void wait_for_copy(int step) {\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "    if (bulk) {\n"
     "        barrier_wait(arrival_of(step), (uint32_t)(step / kStages) & 1);\n"
     "        return;\n"
     "    }\n"
     "#endif\n"
     "    copy_async_wait<0>();\n"
     "    sync_block();\n"
     "}\n"
     "\n"
     "// The warp is done with the step's records.\n"
     "template <bool bulk> KMLA_DEVICE void release_step(const reader_state& s, int step) {\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "    if (bulk && s.lane == 0) {\n"
     "        barrier_arrive(free_of(step));\n"
     "    }\n"
     "#endif\n"
     "}\n"
     "\n"
     "// ---- QK: S^T of the warp's tokens x the tile over one group of dims\n"
     "\n"
     "typedef float group_scores[kTokenTiles][kColumns][4];\n"
     "\n"
     "KMLA_DEVICE void codes_to_fragment(uint32_t low_rows, uint32_t high_rows, uint32_t (&a)[4]) {\n"
     "    uint32_t low[2], high[2];\n"
     "    e4m3x4_to_f16(low_rows, low);\n"
     "    e4m3x4_to_f16(high_rows, high);\n"
     "    a[0] = low[0], a[1] = high[0], a[2] = low[1], a[3] = high[1];\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void multiply_codes(const reader_state& s, int tile, int k, uint32_t low_rows,\n"
     "                                uint32_t high_rows, group_scores& score) {\n"
     "    uint32_t a[4];\n"
     "    codes_to_fragment(low_rows, high_rows, a);\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        mma_f16(score[tile][j], a, s.query[k][j].x, s.query[k][j].y);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void multiply_bf16(const reader_state& s, int tile, int k, const uint32_t (&a)[4],\n"
     "                               group_scores& score) {\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        mma_bf16(score[tile][j], a, s.query[k][j].x, s.query[k][j].y);\n"
     "    }\n"
     "}\n"
     "\n"
     "// Sums of codes times the tokens' scales of the group: sums of numbers.\n"
     "KMLA_DEVICE void scale_scores(const uint8_t* scales, float (&score)[kColumns][4]) {\n"
     "    float scale[2] = {*(const float*)scales, *(const float*)(scales + 8 * kPitch)};\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        for (int i = 0; i < 4; i++) {\n"
     "            score[j][i] *= scale[i / 2];\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Of the tokens of tile_of(s, tile).\n"
     "KMLA_DEVICE void multiply_rope(const reader_state& s, int tile, const uint8_t* rows,\n"
     "                               const uint8_t* record, group_scores& score) {\n"
     "    const int latent = KMLA_LATENT_DIMS + 16 * s.dims;\n"
     "    if (kE4m3) {\n"
     "        const uint8_t* at = record + latent + 4 * s.column;\n"
     "        multiply_codes(s, tile, kLatentSteps, *(const uint32_t*)at,\n"
     "                       *(const uint32_t*)(at + 8 * kPitch), score);\n"
     "        return;\n"
     "    }\n"
     "    uint32_t raw[4];\n"
     "    load_matrix_x4(raw, rows + (kPacked \? KMLA_PACKED_ROPE_OFFSET + 32 * s.dims : 2 * latent));\n"
     "    if (kPacked) { // the rope has no scale\n"
     "        scale_scores(record + KMLA_PACKED_SCALE_OFFSET + 4 * s.dims, score[tile]);\n"
     "    }\n"
     "    multiply_bf16(s, tile, kLatentSteps, raw, score);\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void multiply_keys(const reader_state& s, const uint8_t* stage, group_scores& score) {\n"
     "    // What the lane points matrix loads at, 16 tokens, two times 16 bytes; and its own first token.\n"
     "    const uint8_t *rows[kTokenTiles], *record[kTokenTiles];\n"
     "#pragma unroll\n"
    },
    {"reader.cuh", 522,
     "    for (int tile = 0; tile < kTokenTiles; tile++) {\n"
     "        const uint8_t* tokens = stage + 16 * tile_of(s, tile) * kPitch;\n"
     "        rows[tile] = tokens + s.lane % 16 * kPitch + s.lane / 16 * 16;\n"
     "        record[tile] = tokens + s.row_in_quad * kPitch;\n"
     "        for (int j = 0; j < kColumns; j++) {\n"
     "            for (int i = 0; i < 4; i++) {\n"
     "                score[tile][j][i] = 0;\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kLatentSteps; k += kBf16 \? 1 : 2) {\n"
     "        int dim = s.dims * KMLA_GROUP_DIMS + 16 * k;\n"
     "        uint32_t raw[kTokenTiles][4];\n"
     "#pragma unroll\n"
     "        for (int tile = 0; tile < kTokenTiles; tile++) {\n"
     "            load_matrix_x4(raw[tile], rows[tile] + dim * (kBf16 \? 2 : 1));\n"
     "        }\n"
     "#pragma unroll\n"
     "        for (int tile = 0; tile < kTokenTiles; tile++) {\n"
     "            if (kBf16) {\n"
     "                multiply_bf16(s, tile, k, raw[tile], score);\n"
     "            } else {\n"
     "                multiply_codes(s, tile, k, raw[tile][0], raw[tile][1], score);\n"
     "                multiply_codes(s, tile, k + 1, raw[tile][2], raw[tile][3], score);\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int tile = 0; tile < kTokenTiles; tile++) {\n"
     "        multiply_rope(s, tile, rows[tile], record[tile], score);\n"
     "    }\n"
     "}\n"
     "\n"
     "// Adds the groups up: each owner gets the scores of its units. (0 + 1) + (2 + 3), whoever it is.\n"
     "KMLA_DEVICE void exchange_scores(const reader_state& s, const group_scores& score,\n"
     "                                 float (&x)[kSlots][4]) {\n"
     "    float sum[kSlots][kGroups][4];\n"
     "#pragma unroll\n"
     "    for (int first = 1; first < kGroups; first += kSources) {\n"
     "        if (first > 1) {\n"
     "            sync_block();\n"
     "        }\n"
     "#pragma unroll\n"
     "        for (int unit = 0; unit < kUnits; unit++) { // as the warp counts\n"
     "            const float(&from)[4] = score[unit % kTokenTiles][unit / kTokenTiles];\n"
     "            int owner = s.owner ^ unit % kOwners, other = owner ^ s.dims;\n"
     "            if (kOwners == kGroups) {\n"
     "                other = unit % kOwners;\n"
     "            }\n"
     "            if (other >= first && other < first + kSources) {\n"
     "                exchanged(s, owner, unit / kOwners, other) = word4{\n"
     "                    float_bits(from[0]), float_bits(from[1]), float_bits(from[2]), float_bits(from[3])};\n"
     "            }\n"
     "        }\n"
     "        sync_block();\n"
     "#pragma unroll\n"
     "        for (int slot = 0; slot < kSlots; slot++) {\n"
     "            for (int other = first; other < first + kSources; other++) {\n"
     "                word4 from = exchanged(s, s.owner, slot, other);\n"
     "                sum[slot][other][0] = bits_float(from.x), sum[slot][other][1] = bits_float(from.y);\n"
     "                sum[slot][other][2] = bits_float(from.z), sum[slot][other][3] = bits_float(from.w);\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 4; i++) {\n"
     "            float all = (score[0][slot * kSlotColumns][i] + sum[slot][1][i]) +\n"
     "                        (sum[slot][2][i] + sum[slot][3][i]);\n"
     "            x[slot][i] = all * s.unit[slot].scale[i % 2];\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- scales of packed records: 2^exponent goes with the score, the rest with the f16 weight\n"
     "\n"
     "// Exponent e with the largest scale of the token in (2^(e-1), 2^e]. A lane has one scale, a warp the\n"
     "// tokens that it answers for. Returns the ratio scale / 2^e, for store_ratio. A scale that is no\n"
     "// number has ratio 0: such a token's score is no number either, which is what its readers get.\n"
     "KMLA_DEVICE float split_scales(const reader_state& s, const uint8_t* stage) {\n"
     "    if (!kPacked) {\n"
     "        return 0;\n"
     "    }\n"
     "    int group = s.column, token = 8 * s.warp + s.row_in_quad;\n"
     "    uint32_t bits = *(const uint32_t*)(stage + token * kPitch + KMLA_PACKED_SCALE_OFFSET + 4 * group);\n"
     "    uint32_t magnitude = bits & 0x7FFFFFFFu;\n"
     "    bits = magnitude < 0x7F800000u \? bits : 0;\n"
     "    uint32_t largest = magnitude < 0x7F800000u \? magnitude : 0;\n"
     "    largest = maximum(largest, shuffle_xor(largest, 1));\n"
     "    largest = maximum(largest, shuffle_xor(largest, 2));\n"
    },
    {"reader.cuh", 613,
     "    uint32_t power = (largest + 0x007FFFFFu) & 0x7F800000u; // 2^e\n"
     "    power = power < (253u << 23) \? power : 253u << 23;      // so that its inverse is normal\n"
     "    if (group == 0) {\n"
     "        exponents()[token] = (float)((int)(power >> 23) - 127);\n"
     "    }\n"
     "    return bits_float(bits) * bits_float((254u << 23) - power);\n"
     "}\n"
     "\n"
     "// When nobody is in the PV of the step before.\n"
     "KMLA_DEVICE void store_ratio(const reader_state& s, float ratio) {\n"
     "    if (kPacked) {\n"
     "        ratios_of(s.column)[8 * s.warp + s.row_in_quad] = (uint16_t)pack_f16(ratio, 0.0f);\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- softmax: the owner of a unit has all its scores in registers, as mma left them\n"
     "\n"
     "// What a vector does not see has the score -inf.\n"
     "KMLA_DEVICE void mask_scores(const reader_state& s, int first_token, const warp_mask* masks,\n"
     "                             float (&x)[kSlots][4]) {\n"
     "    int in_step = 16 * tile_of(s, 0) + s.row_in_quad;\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 4; i++) {\n"
     "            int at = in_step + i / 2 * 8, token = first_token + at;\n"
     "            vector_range range = range_of(vector_of(s, slot) + i % 2);\n"
     "            bool exists = masks[at / kWarpTokens] >> at % kWarpTokens & 1;\n"
     "            bool visible = token >= range.begin && token < range.end && exists;\n"
     "            x[slot][i] = visible \? x[slot][i] : -infinity();\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Weights by the references as they are, into shared memory, and their sums. Returns whether some\n"
     "// vector has outgrown its reference, which makes both worthless.\n"
     "KMLA_DEVICE bool store_weights(const reader_state& s, const float (&x)[kSlots][4],\n"
     "                               const float (&exponent)[2], float (&sum)[kSlots][2]) {\n"
     "    float top = -infinity(); // above the references, of all\n"
     "    if (!owns(s)) {\n"
     "        return false;\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        const unit_state& unit = s.unit[slot];\n"
     "        float p[4];\n"
     "        for (int i = 0; i < 4; i++) {\n"
     "            float d = x[slot][i] - unit.sum_reference[i % 2];\n"
     "            p[i] = exp2_fast(d);\n"
     "            top = maximum(top, d);\n"
     "        }\n"
     "        sum[slot][0] = p[0] + p[2];\n"
     "        sum[slot][1] = p[1] + p[3];\n"
     "        for (int i = 0; i < 4 && kPacked; i++) {\n"
     "            float d = x[slot][i] - unit.sum_reference[i % 2] + exponent[i / 2] -\n"
     "                      unit.weight_reference[i % 2];\n"
     "            p[i] = exp2_fast(d);\n"
     "            top = maximum(top, d);\n"
     "        }\n"
     "        uint16_t* to = weights() + vector_of(s, slot) * kWeightPitch + 16 * tile_of(s, 0) +\n"
     "                       s.row_in_quad;\n"
     "        for (int i = 0; i < 4; i++) {\n"
     "            uint16_t* at = to + i % 2 * kWeightPitch + i / 2 * 8;\n"
     "            if (kBf16) { // BF16 has fp32's range but 8 bits: two terms\n"
     "                uint32_t high = float_to_bf16(p[i]);\n"
     "                at[0] = (uint16_t)high;\n"
     "                at[kTile * kWeightPitch] = (uint16_t)float_to_bf16(p[i] - bf16_low(high));\n"
     "            } else {\n"
     "                at[0] = (uint16_t)pack_f16(p[i], 0.0f);\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "    return top > KMLA_I_REFERENCE_GROWTH;\n"
     "}\n"
     "\n"
     "// Of the unit's 16 tokens, two a lane; lanes of a column agree.\n"
     "KMLA_DEVICE float top_of_unit(float low, float high) {\n"
     "    float top = maximum(low, high);\n"
     "    top = maximum(top, shuffle_xor(top, 4));\n"
     "    top = maximum(top, shuffle_xor(top, 8));\n"
     "    return maximum(top, shuffle_xor(top, 16));\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float raised_reference(float top, float reference) {\n"
     "    return top - reference > KMLA_I_REFERENCE_GROWTH \? top - KMLA_I_REFERENCE_BELOW : reference;\n"
     "}\n"
     "\n"
     "// A step's maxima for all to see: of scores; and above these, tile by tile, of what weighs V.\n"
     "KMLA_DEVICE void store_tops(const reader_state& s, const float (&x)[kSlots][4],\n"
     "                            const float (&exponent)[2]) {\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 2 && owns(s); i++) {\n"
     "            int n = vector_of(s, slot) + i;\n"
    },
    {"reader.cuh", 706,
     "            float low = x[slot][i], high = x[slot][2 + i];\n"
     "            float top = top_of_unit(low, high), base = top == -infinity() \? 0 : top;\n"
     "            float above = kPacked \? top_of_unit(low - base + exponent[0], high - base + exponent[1])\n"
     "                                  : 0;\n"
     "            if (s.row_in_quad == 0) {\n"
     "                of_tokens(tile_of(s, 0))[n] = top;\n"
     "                of_tokens(kStepTiles + tile_of(s, 0))[n] = above;\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// New references where maxima have outgrown them, sums by the new ones, and factors for O.\n"
     "KMLA_DEVICE void raise_references(reader_state& s, const float (&x)[kSlots][4],\n"
     "                                  const float (&exponent)[2]) {\n"
     "    store_tops(s, x, exponent);\n"
     "    sync_block();\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 2 && owns(s); i++) {\n"
     "            unit_state& unit = s.unit[slot];\n"
     "            int n = vector_of(s, slot) + i;\n"
     "            float top = -infinity(), above = -infinity();\n"
     "            for (int tile = 0; tile < kStepTiles; tile++) {\n"
     "                top = maximum(top, of_tokens(tile)[n]);\n"
     "            }\n"
     "            float old = unit.sum_reference[i], raised = raised_reference(top, old);\n"
     "            bool same = raised == old;\n"
     "            float factor = same \? 1.0f : exp2_fast(old - raised);\n"
     "            unit.sum[i] *= factor;\n"
     "            unit.sum_reference[i] = raised;\n"
     "            if (kPacked) {\n"
     "                for (int tile = 0; tile < kStepTiles; tile++) {\n"
     "                    above = maximum(above, of_tokens(tile)[n] - raised +\n"
     "                                               of_tokens(kStepTiles + tile)[n]);\n"
     "                }\n"
     "                old = unit.weight_reference[i] - (same \? 0 : raised - old); // where it was\n"
     "                raised = raised_reference(above, old);\n"
     "                factor = raised == old \? 1.0f : exp2_fast(old - raised);\n"
     "                unit.weight_reference[i] = raised;\n"
     "            }\n"
     "            if (tile_of(s, 0) == 0 && s.row_in_quad == 0) {\n"
     "                factors()[n] = factor;\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void rescale_out(reader_state& s) {\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        float low = factors()[8 * j + 2 * s.column], high = factors()[8 * j + 2 * s.column + 1];\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "            s.out[m][j][0] *= low, s.out[m][j][1] *= high;\n"
     "            s.out[m][j][2] *= low, s.out[m][j][3] *= high;\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Turns scores into weights that all may read.\n"
     "KMLA_DEVICE void softmax_step(reader_state& s, const float (&x)[kSlots][4]) {\n"
     "    float exponent[2] = {0, 0}, sum[kSlots][2];\n"
     "    if (kPacked) {\n"
     "        const float* of_lane = exponents() + 16 * tile_of(s, 0) + s.row_in_quad;\n"
     "        exponent[0] = of_lane[0];\n"
     "        exponent[1] = of_lane[8];\n"
     "    }\n"
     "    if (sync_block_or(store_weights(s, x, exponent, sum))) {\n"
     "        raise_references(s, x, exponent);\n"
     "        store_weights(s, x, exponent, sum);\n"
     "        sync_block();\n"
     "        rescale_out(s);\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 2 && owns(s); i++) {\n"
     "            s.unit[slot].sum[i] += sum[slot][i];\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- PV: O^T of the warp's 64 dims\n"
     "\n"
     "// NaN and infinity to 0, lane by lane.\n"
     "KMLA_DEVICE uint32_t only_numbers_bf16(uint32_t pair) {\n"
     "    uint32_t bad = (((pair & 0x7F807F80u) + 0x00800080u) & 0x80008000u) >> 15;\n"
     "    return pair & ~(bad * 0xFFFFu);\n"
     "}\n"
     "\n"
     "// NaN codes, 0x7F and 0xFF, to the numbers before them, byte by byte.\n"
     "KMLA_DEVICE uint32_t only_numbers_e4m3(uint32_t codes) {\n"
     "    return codes - (((codes & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) >> 7);\n"
     "}\n"
     "\n"
     "// In a step in which some vector may not see some token, 0 * NaN must not reach it: no value that the\n"
     "// warp will multiply stays NaN. A vector that does see the token has its NaN from the score.\n"
     "KMLA_DEVICE void clean_values(const reader_state& s, uint8_t* stage) {\n"
    },
    {"reader.cuh", 803,
     "    const int words = 64 * (kBf16 \? 2 : 1) / 4; // of the warp's dims of a token\n"
     "#pragma unroll 1\n"
     "    for (int i = s.lane; i < kStep * words; i += 32) {\n"
     "        uint32_t* at = (uint32_t*)(stage + i / words * kPitch) + words * s.warp + i % words;\n"
     "        *at = kBf16 \? only_numbers_bf16(*at) : only_numbers_e4m3(*at);\n"
     "    }\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "    fence_async_reads(); // and copies into the stage come after that\n"
     "#endif\n"
     "}\n"
     "\n"
     "// Codes of 8 dims, which row_in_quad owns, of tokens 2 * column, + 1, + 8, + 9 of a k16 step.\n"
     "struct code_values {\n"
     "    word2 token[4];\n"
     "};\n"
     "KMLA_DEVICE code_values load_code_values(const reader_state& s, const uint8_t* stage, int k) {\n"
     "    const uint8_t* at =\n"
     "        stage + (16 * k + 2 * s.column) * kPitch + 64 * s.warp + 8 * s.row_in_quad;\n"
     "    return code_values{{*(const word2*)at, *(const word2*)(at + kPitch),\n"
     "                        *(const word2*)(at + 8 * kPitch), *(const word2*)(at + 9 * kPitch)}};\n"
     "}\n"
     "\n"
     "// V^T fragments: the tokens of a fragment column pair are neighbours, whose bytes are woven together.\n"
     "KMLA_DEVICE void weave_code_values(const code_values& codes, uint32_t (&a)[4][4]) {\n"
     "#pragma unroll\n"
     "    for (int half = 0; half < 2; half++) {\n"
     "        word2 even = codes.token[2 * half], odd = codes.token[2 * half + 1];\n"
     "        uint32_t woven[4] = {\n"
     "            permute_bytes(even.x, odd.x, 0x5140), permute_bytes(even.x, odd.x, 0x7362),\n"
     "            permute_bytes(even.y, odd.y, 0x5140), permute_bytes(even.y, odd.y, 0x7362)};\n"
     "#pragma unroll\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "            uint32_t pair[2];\n"
     "            e4m3x4_to_f16(woven[m], pair);\n"
     "            for (int i = 0; i < 2; i++) {\n"
     "                a[m][2 * half + i] = pair[i];\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void load_bf16_values(const uint8_t* at, uint32_t (&a)[4][4]) {\n"
     "#pragma unroll\n"
     "    for (int half = 0; half < 2; half++) {\n"
     "        word4 even = *(const word4*)(at + 8 * half * kPitch);\n"
     "        word4 odd = *(const word4*)(at + (8 * half + 1) * kPitch);\n"
     "        uint32_t e[4] = {even.x, even.y, even.z, even.w}, o[4] = {odd.x, odd.y, odd.z, odd.w};\n"
     "#pragma unroll\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "            a[m][2 * half] = permute_bytes(e[m], o[m], 0x5410);\n"
     "            a[m][2 * half + 1] = permute_bytes(e[m], o[m], 0x7632);\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Weights as B fragments of 32 tokens from `token` on. FP8 KV: registers 2k and 2k + 1 are k16 step\n"
     "// k's. BF16 KV, 16 tokens: the two of the high term, then the two of the low term.\n"
     "KMLA_DEVICE void load_weights(const reader_state& s, int token, uint32_t (&weight)[kColumns][4]) {\n"
     "    int matrix = s.lane / 8;\n"
     "    int term = kBf16 \? matrix / 2 : 0;\n"
     "    token += kBf16 \? matrix % 2 * 8 : matrix * 8;\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        int row = term * kTile + 8 * j + s.lane % 8;\n"
     "        load_matrix_x4(weight[j], weights() + row * kWeightPitch + token);\n"
     "    }\n"
     "}\n"
     "\n"
     "// Packed: the rest of the scales of the warp's group of dims.\n"
     "KMLA_DEVICE void scale_weights(const reader_state& s, int token, uint32_t (&weight)[kColumns][4]) {\n"
     "    const uint32_t* ratios = (const uint32_t*)(ratios_of(s.warp / 2) + token) + s.column;\n"
     "#pragma unroll\n"
     "    for (int i = 0; i < 4; i++) {\n"
     "        uint32_t ratio = ratios[4 * i]; // of tokens 8i + 2 * column and the next\n"
     "        for (int j = 0; j < kColumns; j++) {\n"
     "            weight[j][i] = multiply_f16x2(weight[j][i], ratio);\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// `codes`: those of the first k16 step.\n"
     "KMLA_DEVICE void multiply_values(reader_state& s, const uint8_t* stage, code_values codes) {\n"
     "    int dim = 64 * s.warp + 8 * s.row_in_quad;\n"
     "    uint32_t weight[kColumns][4];\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kStepTiles; k++) {\n"
     "        const uint8_t* records = stage + (16 * k + 2 * s.column) * kPitch;\n"
     "        uint32_t a[4][4];\n"
     "        if (kBf16) {\n"
     "            load_weights(s, 16 * k, weight);\n"
     "            load_bf16_values(records + 2 * dim, a);\n"
     "        } else {\n"
     "            weave_code_values(codes, a);\n"
    },
    {"reader.cuh", 896,
     "            codes = load_code_values(s, stage, k < kStepTiles - 1 \? k + 1 : k);\n"
     "            if (k % 2 == 0) {\n"
     "                load_weights(s, 16 * k, weight);\n"
     "            }\n"
     "            if (kPacked && k % 2 == 0) {\n"
     "                scale_weights(s, 16 * k, weight);\n"
     "            }\n"
     "        }\n"
     "#pragma unroll\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "#pragma unroll\n"
     "            for (int j = 0; j < kColumns; j++) {\n"
     "                if (kBf16) {\n"
     "                    mma_bf16(s.out[m][j], a[m], weight[j][0], weight[j][1]);\n"
     "                } else {\n"
     "                    mma_f16(s.out[m][j], a[m], weight[j][k % 2 * 2], weight[j][k % 2 * 2 + 1]);\n"
     "                }\n"
     "            }\n"
     "            for (int j = 0; j < kColumns && kBf16; j++) {\n"
     "                mma_bf16(s.out[m][j], a[m], weight[j][2], weight[j][3]);\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- results\n"
     "\n"
     "KMLA_DEVICE float* sum_references() { return of_tokens(kStepTiles); }\n"
     "KMLA_DEVICE float* weight_references() { return of_tokens(kStepTiles + 1); }\n"
     "\n"
     "// Of each vector: the sums of its units, and the references, for all to see. Nobody may be in softmax.\n"
     "KMLA_DEVICE void join_sums(reader_state& s) {\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 2 && owns(s); i++) {\n"
     "            const unit_state& unit = s.unit[slot];\n"
     "            int n = vector_of(s, slot) + i;\n"
     "            float sum = unit.sum[i];\n"
     "            sum += shuffle_xor(sum, 4);\n"
     "            sum += shuffle_xor(sum, 8);\n"
     "            sum += shuffle_xor(sum, 16);\n"
     "            if (s.row_in_quad == 0) {\n"
     "                of_tokens(tile_of(s, 0))[n] = sum;\n"
     "            }\n"
     "            if (s.row_in_quad == 0 && tile_of(s, 0) == 0) {\n"
     "                sum_references()[n] = unit.sum_reference[i];\n"
     "                weight_references()[n] = unit.weight_reference[i];\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "    sync_block();\n"
     "}\n"
     "\n"
     "// O and lse of the split.\n"
     "KMLA_DEVICE void store_split(const kmla_i_reader_args& args, reader_state& s) {\n"
     "    int n = thread_index();\n"
     "    float sum = 0, reference = 0;\n"
     "    join_sums(s);\n"
     "    if (n < kTile) {\n"
     "        for (int tile = 0; tile < kStepTiles; tile++) {\n"
     "            sum += of_tokens(tile)[n];\n"
     "        }\n"
     "        reference = sum_references()[n];\n"
     "        weigh_vector(args, n, sum, kPacked \? exp2_wide(weight_references()[n]) : args.kv_scale);\n"
     "    }\n"
     "    sync_block();\n"
     "    store_results(args, s, (const float(&)[4][kColumns * 4])s.out);\n"
     "    if (n < kTile) {\n"
     "        store_vector_lse(args, n, sum, reference);\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- the block\n"
     "\n"
     "// Every warp finds the range of every vector, one a lane, so that no barrier holds up the first copies;\n"
     "// the first warp stores what all may read behind a block barrier. `length`: of the lane's. Returns\n"
     "// the tile's bounds.\n"
     "KMLA_DEVICE tile_bounds find_ranges(const kmla_i_reader_args& args, const reader_state& s,\n"
     "                                    int length) {\n"
     "    static_assert(kTile <= 32, \"a vector a lane\");\n"
     "    tile_bounds mine;\n"
     "    vector_range range = find_range(args, s, s.lane, length, mine);\n"
     "    mine = join_lanes(mine, 1);\n"
     "    if (thread_index() == 0) {\n"
     "        (tile_bounds&)bounds() = mine;\n"
     "        bounds().first_row = s.first_row;\n"
     "        bounds().vectors = s.vectors;\n"
     "    }\n"
     "    if (thread_index() < kTile) {\n"
     "        range_of(s.lane) = range;\n"
     "        place_vector(args, s.lane, s.first_row, s.vectors);\n"
     "    }\n"
     "    return mine;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void clear_state(reader_state& s) {\n"
     "#pragma unroll\n"
     "    for (int slot = 0; slot < kSlots; slot++) {\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            s.unit[slot].sum_reference[i] = s.unit[slot].weight_reference[i] = kNoReference;\n"
     "            s.unit[slot].sum[i] = 0;\n"
     "        }\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int m = 0; m < 4; m++) {\n"
     "        for (int j = 0; j < kColumns; j++) {\n"
     "            for (int i = 0; i < 4; i++) {\n"
     "                s.out[m][j][i] = 0;\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// QK, softmax and PV of a step. `whole`: every vector of the tile sees every token of it.\n"
    },
    {"reader.cuh", 1010,
     "KMLA_DEVICE void take_step(reader_state& s, int token, int step, bool whole) {\n"
     "    uint8_t* stage = stage_of(step);\n"
     "    group_scores score;\n"
     "    float x[kSlots][4];\n"
     "    multiply_keys(s, stage, score);\n"
     "    float ratio = split_scales(s, stage);\n"
     "    exchange_scores(s, score, x); // behind its barrier all are done with the step before\n"
     "    store_ratio(s, ratio);\n"
     "    if (!whole) {\n"
     "        mask_scores(s, token, token_masks_of(step), x);\n"
     "        clean_values(s, stage);\n"
     "        sync_block(); // between a warp's lanes\n"
     "    }\n"
     "    code_values codes; // before the barrier, for its latency\n"
     "    if (!kBf16) {\n"
     "        codes = load_code_values(s, stage, 0);\n"
     "    }\n"
     "    softmax_step(s, x);\n"
     "    multiply_values(s, stage, codes);\n"
     "}\n"
     "\n"
     "// `likely`: bulk look-ups from likely_first on.\n"
     "template <bool bulk>\n"
     "KMLA_DEVICE void read_tokens(const kmla_i_reader_args& args, reader_state& s,\n"
     "                             const tile_bounds& tokens, int likely) {\n"
     "    int first = tokens.begin / kStep * kStep;\n"
     "    int steps = maximum(tokens.end - first + kStep - 1, 0) / kStep;\n"
     "    if (steps == 0) {\n"
     "        clear_state(s);\n"
     "        return;\n"
     "    }\n"
     "    // Steps of which every vector of the tile sees every token that exists.\n"
     "    int full_begin = (tokens.full_begin - first + kStep - 1) / kStep;\n"
     "    int full_end = (tokens.full_end - first) / kStep;\n"
     "    int entry =\n"
     "        bulk && first == likely_first(args, s) \? likely : look_up<bulk>(args, s, tokens, first);\n"
     "    prepare_copies<bulk>(args, s, tokens, first, entry);\n"
     "    start_copy<bulk>(args, s, 0, first, entry);\n"
     "    copy_async_commit();\n"
     "    entry = bulk \? -1 : look_up<false>(args, s, tokens, first + kStep);\n"
     "    finish_query(args, s);\n"
     "    clear_state(s);\n"
     "#pragma unroll 1\n"
     "    for (int step = 0; step < steps;) {\n"
     "        int ahead = step + 1, stop = steps; // until copies have to be made ready again\n"
     "        if (bulk) {\n"
     "            stop = minimum(steps, (ahead / kLookUpSteps + 1) * kLookUpSteps - 1);\n"
     "            if (ahead % kLookUpSteps == 0 && ahead < steps) {\n"
     "                int token = first + ahead * kStep;\n"
     "                prepare_copies<bulk>(args, s, bounds(), token,\n"
     "                                     look_up<bulk>(args, s, bounds(), token));\n"
     "            }\n"
     "        }\n"
     "#pragma unroll 1\n"
     "        for (; step < stop; step++) {\n"
     "            int token = first + step * kStep;\n"
     "            bool whole = step >= full_begin && step < full_end && all_exist(token_masks_of(step));\n"
     "            wait_for_copy<bulk>(step);\n"
     "            if (step + 1 < steps) {\n"
     "                start_copy<bulk>(args, s, step + 1, token + kStep, entry);\n"
     "                copy_async_commit();\n"
     "                entry = bulk \? -1 : look_up<false>(args, s, bounds(), token + 2 * kStep);\n"
     "            }\n"
     "            take_step(s, token, step, whole);\n"
     "            release_step<bulk>(s, step);\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_KERNEL(kmla_reader, kmla_i_reader_args, KMLA_I_READER_THREADS, kResident) {\n"
     "    wait_dependency();\n"
     "    if (block_z() == args.groups) {\n"
     "        clear_dead_rows(args);\n"
     "        return;\n"
     "    }\n"
     "    reader_state s;\n"
     "    find_place(args, s);\n"
     "    s.dims = s.warp % kGroups;\n"
     "    s.half = s.warp / kGroups;\n"
     "    s.owner = s.dims % kOwners;\n"
     "    if (s.first_vector >= s.vectors) {\n"
     "        return;\n"
     "    }\n"
     "#if KMLA_HAS_BULK_COPY\n"
     "    if (is_copier(s) && s.lane == 0) { // which needs them before the first block barrier\n"
     "        for (int stage = 0; stage < kStages; stage++) {\n"
     "            barrier_init(arrival_of(stage), kRuns);\n"
     "            barrier_init(free_of(stage), kWarps);\n"
     "        }\n"
     "        barrier_init_fence();\n"
     "    }\n"
     "#endif\n"
     "    // First, for their latency.\n"
     "    int likely =\n"
     "        copies_in_bulk(s) \? look_up<true>(args, s, tile_bounds{}, likely_first(args, s)) : -1;\n"
     "    int length = vector_length(args, s, s.lane);\n"
     "    load_query(args, s);\n"
     "    tile_bounds tokens = find_ranges(args, s, length);\n"
     "    if (copies_in_bulk(s)) {\n"
     "        read_tokens<true>(args, s, tokens, likely);\n"
     "    } else {\n"
     "        read_tokens<false>(args, s, tokens, likely);\n"
     "    }\n"
     "    launch_dependents();\n"
     "    store_split(args, s);\n"
    },
    {"reader.cuh", 1115,
     "}\n"
     "\n"
     "#endif\n"
    },
    {"hopper.cuh", 1,
     "// The Hopper reader: sm_90a, wgmma. FP8 KV; BF16 KV is the portable reader's.\n"
     "//\n"
     "// As in the portable reader tokens are the M side of S^T = K q^T, latent dims that of O^T = V^T\n"
     "// P^T, and A comes from registers, converted from raw bytes. B, the query and the weights, lies in\n"
     "// shared memory. A step is 64 tokens. Four warpgroups share the work: two score (QK and softmax, 16\n"
     "// tokens a warp), one the even steps and one the odd, each into a weight buffer of its own; two\n"
     "// weigh values with these (PV, 64 dims a warp) and copy records into a ring of runs of 32 tokens.\n"
     "// The score groups take turns at softmax, so that each step's references are the next's.\n"
     "//\n"
     "// Weights are computed with the references that are there; a vote says whether some vector has\n"
     "// outgrown its own, and only then maxima are taken and the step's weights computed again. A\n"
     "// vector's value depends on its own scores alone.\n"
     "\n"
     "#if defined(KMLA_TILE) && defined(KMLA_HOPPER)\n"
     "\n"
     "constexpr int kScoreWarps = 4; // of a group\n"
     "constexpr int kValueWarps = kWarps - 2 * kScoreWarps;\n"
     "constexpr int kScoreThreads = 32 * kScoreWarps, kValueThreads = 32 * kValueWarps;\n"
     "// Registers of a thread that scores and of one that weighs; all start with 128.\n"
     "constexpr int kScoreRegisters = kTile > 48 \? 96 : kTile > 40 \? 112 : 128;\n"
     "constexpr int kValueRegisters = 256 - kScoreRegisters;\n"
     "// Named barriers; 0 is the block's.\n"
     "constexpr uint32_t kEndBarrier = 1, kSumBarrier = 2;\n"
     "constexpr uint32_t kScoreBarrier = 3; // of the first score group, + 1 of the second\n"
     "constexpr uint32_t kTurnBarrier = 5;  // likewise: the group may begin its softmax\n"
     "\n"
     "constexpr int kBlocksOf64 = KMLA_QUERY_DIMS / 64; // of dims: 128 swizzled bytes a vector each\n"
     "constexpr int kGroupSteps = KMLA_GROUP_DIMS / 16; // k16 steps of a scale's dims\n"
     "constexpr int kBatchSteps = kTile <= 32 \? 4 : 2; // of QK: converted while others are multiplied\n"
     "constexpr int kBatches = KMLA_QUERY_DIMS / 16 / kBatchSteps;\n"
     "constexpr int kLatentBatches = KMLA_LATENT_DIMS / 16 / kBatchSteps;\n"
     "constexpr int kRunTokens = KMLA_I_STEP_TOKENS; // of one bulk copy: they lie in one page\n"
     "static_assert(kStep == 2 * kRunTokens, \"a step is two runs\");\n"
     "\n"
     "// ---- shared memory\n"
     "\n"
     "constexpr int kQueryAt = (kSmallBytes + 1023) / 1024 * 1024;     // f16 [9][tile][64], swizzled\n"
     "constexpr int kWeightsAt = kQueryAt + kBlocksOf64 * kTile * 128; // f16 [2][tile][64 tokens], swizzled\n"
     "constexpr int kRunsAt = kWeightsAt + 2 * kTile * 128;\n"
     "constexpr int kRatiosAt = kRunsAt + kStages * kRunTokens * kPitch; // f16 [2][4][64 tokens]\n"
     "constexpr int kStateAt = kRatiosAt + (kPacked \? 2 * kGroups * kStep * 2 : 0); // fp32 [7][tile]\n"
     "constexpr int kSumsAt = kStateAt + 7 * kTile * 4; // fp32 pairs [tile / 8][threads that score]\n"
     "static_assert(kSumsAt + kColumns * 2 * kScoreThreads * 8 == KMLA_SHARED_BYTES,\n"
     "              \"host and device layouts differ\");\n"
     "\n"
     "// Behind what both readers have there: barriers of the weight buffers, votes, what a step says.\n"
     "constexpr int kReadyAt = kFactsAt + (int)sizeof(tile_facts);\n"
     "constexpr int kVotesAt = kReadyAt + 4 * 8;\n"
     "constexpr int kSaidAt = kVotesAt + 2 * 16;\n"
     "static_assert(kSaidAt + 8 <= kRangesAt, \"small things fit\");\n"
     "\n"
     "KMLA_DEVICE uint64_t* weights_ready(int buffer) { // by the score warps\n"
     "    return (uint64_t*)(shared_memory() + kReadyAt) + buffer;\n"
     "}\n"
     "KMLA_DEVICE uint64_t* weights_free(int buffer) { // by each of the value warps, done with a step\n"
     "    return (uint64_t*)(shared_memory() + kReadyAt) + 2 + buffer;\n"
     "}\n"
     "KMLA_DEVICE uint32_t* votes_of(int buffer) {\n"
     "    return (uint32_t*)(shared_memory() + kVotesAt) + 4 * buffer;\n"
     "}\n"
     "// Whether V products and sums before this step are to be multiplied by its factors.\n"
     "KMLA_DEVICE int& rescaled(int buffer) { return ((int*)(shared_memory() + kSaidAt))[buffer]; }\n"
     "// Of a run: a bit a token, it exists.\n"
     "KMLA_DEVICE uint32_t& run_tokens(int slot) {\n"
     "    return ((uint32_t*)(shared_memory() + opaque(kMasksAt)))[slot]; // no register for its base\n"
     "}\n"
     "\n"
     "KMLA_DEVICE uint8_t* query_block(int block) {\n"
    },
    {"hopper.cuh", 69,
     "    return shared_memory() + kQueryAt + block * kTile * 128;\n"
     "}\n"
     "KMLA_DEVICE uint8_t* weight_block(int buffer) {\n"
     "    return shared_memory() + kWeightsAt + buffer * kTile * 128;\n"
     "}\n"
     "KMLA_DEVICE uint8_t* records_of(int slot) {\n"
     "    return shared_memory() + kRunsAt + slot * kRunTokens * kPitch;\n"
     "}\n"
     "// 16 bytes of row n of a swizzled block.\n"
     "KMLA_DEVICE uint8_t* swizzled(uint8_t* block, int n, int chunk) {\n"
     "    return block + n * 128 + ((chunk ^ (n & 7)) * 16);\n"
     "}\n"
     "KMLA_DEVICE uint16_t* ratios_of(int buffer, int group) {\n"
     "    return (uint16_t*)(shared_memory() + kRatiosAt) + (buffer * kGroups + group) * kStep;\n"
     "}\n"
     "// Of each pair of vectors: the scales of their scores, to log2, and the references that their\n"
     "// weights of the sum, 2^(score - reference), are relative to: kNoReference, which every score\n"
     "// outgrows, until a vector sees a token.\n"
     "struct alignas(16) pair_terms {\n"
     "    float scale[2], reference[2];\n"
     "};\n"
     "KMLA_DEVICE pair_terms* terms() { return (pair_terms*)(shared_memory() + kStateAt); }\n"
     "KMLA_DEVICE float& reference_of(int n) { return terms()[n / 2].reference[n % 2]; }\n"
     "// Of each vector: 2^(kMidExponent - a), where 2^-a is what V's weights times besides.\n"
     "KMLA_DEVICE float* weight_scales() { return (float*)(shared_memory() + kStateAt) + 2 * kTile; }\n"
     "// What V products and sums before a step are to be multiplied by, if the step says so.\n"
     "KMLA_DEVICE float* rescales_of(int buffer) { return weight_scales() + (1 + buffer) * kTile; }\n"
     "KMLA_DEVICE float* sum_factors_of(int buffer) { return weight_scales() + (3 + buffer) * kTile; }\n"
     "\n"
     "constexpr float kNoReference = -3.40282347e38f;\n"
     "\n"
     "typedef float accumulators[kColumns * 4]; // of 16 rows a warp x the tile\n"
     "\n"
     "// What a block walks over.\n"
     "struct token_walk {\n"
     "    int first, steps; // a step's multiple; how many\n"
     "    int odd;          // 1 if the first step is odd, of all steps since token 0\n"
     "};\n"
     "\n"
     "KMLA_DEVICE token_walk find_walk() {\n"
     "    token_walk walk;\n"
     "    walk.first = bounds().begin / kStep * kStep;\n"
     "    walk.steps = maximum(bounds().end - walk.first + kStep - 1, 0) / kStep;\n"
     "    walk.odd = walk.first / kStep % 2;\n"
     "    return walk;\n"
     "}\n"
     "\n"
     "// A slot of the ring of runs, and the parity of its barrier's phase.\n"
     "struct ring_place {\n"
     "    int slot;\n"
     "    uint32_t parity;\n"
     "};\n"
     "KMLA_DEVICE ring_place place_after(ring_place at, int runs) { // at most kStages of them\n"
     "    int slot = at.slot + runs;\n"
     "    bool wraps = slot >= kStages;\n"
     "    return ring_place{wraps \? slot - kStages : slot, at.parity ^ (uint32_t)wraps};\n"
     "}\n"
     "\n"
     "// Waits for both runs of the step from `token` on. Whether every vector of the tile sees all 64.\n"
     "KMLA_DEVICE bool wait_for_runs(int token, ring_place low, ring_place high) {\n"
     "    barrier_wait(arrival_of(low.slot), low.parity);\n"
     "    barrier_wait(arrival_of(high.slot), high.parity);\n"
     "    return token >= bounds().full_begin && token <= bounds().full_end - kStep &&\n"
     "           (run_tokens(low.slot) & run_tokens(high.slot)) == 0xFFFFFFFFu;\n"
     "}\n"
     "\n"
     "// ---- the query: 8 or 16 lanes a vector, so that few threads idle; 16 dims a lane and part\n"
     "\n"
     "constexpr int kQueryLanes = KMLA_I_HOPPER_THREADS >= 16 * kTile \? 16 : 8;\n"
     "constexpr int kQueryParts = (KMLA_QUERY_DIMS / 16 + kQueryLanes - 1) / kQueryLanes;\n"
     "\n"
     "KMLA_DEVICE void codes_to_bf16(const word4& codes, float scale, uint32_t (&pair)[8]) {\n"
     "    uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};\n"
     "    for (int i = 0; i < 8; i++) {\n"
     "        uint32_t two = word[i / 2] >> (16 * (i % 2));\n"
     "        pair[i] = pack_bf16(e4m3_to_float(two & 0xFF) * scale, e4m3_to_float(two >> 8 & 0xFF) * scale);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void load_bf16(uint64_t at, uint32_t (&pair)[8]) {\n"
     "    word4 low = ((const word4*)at)[0], high = ((const word4*)at)[1];\n"
     "    pair[0] = low.x, pair[1] = low.y, pair[2] = low.z, pair[3] = low.w;\n"
     "    pair[4] = high.x, pair[5] = high.y, pair[6] = high.z, pair[7] = high.w;\n"
     "}\n"
     "\n"
     "// Dims 16 * block .. + 15 of a query record, exactly, as BF16. An E4M3 query's one scale is in\n"
     "// score_scale.\n"
     "KMLA_DEVICE void load_query_block(const kmla_i_reader_args& args, uint64_t record, int block,\n"
    },
    {"hopper.cuh", 157,
     "                                  uint32_t (&pair)[8]) {\n"
     "    const int rope = KMLA_LATENT_DIMS / 16;\n"
     "    if (args.query_format == KMLA_QUERY_BF16) {\n"
     "        load_bf16(record + 32 * block, pair);\n"
     "    } else if (args.query_format == KMLA_QUERY_PACKED && block >= rope) {\n"
     "        load_bf16(record + KMLA_PACKED_ROPE_OFFSET + 32 * (block - rope), pair);\n"
     "    } else {\n"
     "        float scale = args.query_format == KMLA_QUERY_PACKED\n"
     "                          \? ((const float*)(record + KMLA_PACKED_SCALE_OFFSET))[block / kGroupSteps]\n"
     "                          : 1.0f;\n"
     "        codes_to_bf16(*(const word4*)(record + 16 * block), scale, pair);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float lane_amax(const uint32_t (&pair)[8], float amax) {\n"
     "    for (int i = 0; i < 8; i++) {\n"
     "        uint32_t magnitude = pair[i] & 0x7FFF7FFFu;\n"
     "        amax = maximum(amax, maximum(bf16_low(magnitude), bf16_high(magnitude)));\n"
     "    }\n"
     "    return amax;\n"
     "}\n"
     "\n"
     "// Over the 8 lanes of 128 dims; over those of a vector.\n"
     "KMLA_DEVICE float group_amax(float amax) {\n"
     "    amax = maximum(amax, shuffle_xor(amax, 1));\n"
     "    amax = maximum(amax, shuffle_xor(amax, 2));\n"
     "    return maximum(amax, shuffle_xor(amax, 4));\n"
     "}\n"
     "KMLA_DEVICE float vector_amax(float amax) {\n"
     "    amax = group_amax(amax);\n"
     "    return kQueryLanes > 8 \? maximum(amax, shuffle_xor(amax, 8)) : amax;\n"
     "}\n"
     "\n"
     "// What the packed query writer would store of the lane's dims of a group, read back.\n"
     "KMLA_DEVICE void round_to_packed(uint32_t (&pair)[8]) {\n"
     "    float amax = group_amax(lane_amax(pair, 0));\n"
     "    const float largest = bits_float(0x7F7FFFFFu);\n"
     "    float scale = packed_query_scale(amax > largest \? largest : amax);\n"
     "    float inverse = power_of_two_inverse(scale);\n"
     "    for (int i = 0; i < 8; i++) {\n"
     "        pair[i] = pack_bf16(round_to_e4m3(bf16_low(pair[i]) * inverse) * scale,\n"
     "                            round_to_e4m3(bf16_high(pair[i]) * inverse) * scale);\n"
     "    }\n"
     "}\n"
     "\n"
     "// One lane's 16 dims into the swizzled block, normalised as in the portable reader. k order is 0 1\n"
     "// 4 5 8 9 12 13, 2 3 6 7 ..: that of A fragments read as 4-byte words.\n"
     "KMLA_DEVICE void store_query_block(int n, int block, const uint32_t (&pair)[8], float factor) {\n"
     "    bool to_f16 = kE4m3 || block < KMLA_LATENT_DIMS / 16; // packed rope is BF16, like its KV\n"
     "    uint32_t out[8];\n"
     "    for (int w = 0; w < 8; w++) {\n"
     "        float low = bf16_low(pair[w]) * factor, high = bf16_high(pair[w]) * factor;\n"
     "        out[w] = to_f16 \? pack_f16(low, high) : pack_bf16(low, high);\n"
     "    }\n"
     "    uint8_t* rows = query_block(block / 4);\n"
     "    *(word4*)swizzled(rows, n, block % 4 * 2) = word4{out[0], out[2], out[4], out[6]};\n"
     "    *(word4*)swizzled(rows, n, block % 4 * 2 + 1) = word4{out[1], out[3], out[5], out[7]};\n"
     "}\n"
     "\n"
     "// A lane's part i of a vector: loaded, and in e4m3 mode rounded.\n"
     "KMLA_DEVICE void load_query_part(const kmla_i_reader_args& args, uint64_t record, bool exists, int i,\n"
     "                                 int part, uint32_t (&pair)[8]) {\n"
     "    int block = kQueryLanes * i + part;\n"
     "    for (int w = 0; w < 8; w++) {\n"
     "        pair[w] = 0;\n"
     "    }\n"
     "    if (exists && block < KMLA_QUERY_DIMS / 16) {\n"
     "        load_query_block(args, record, block, pair);\n"
     "    }\n"
     "    if (args.e4m3_query && args.query_format == KMLA_QUERY_BF16 &&\n"
     "        block < KMLA_LATENT_DIMS / 16) {\n"
     "        round_to_packed(pair);\n"
     "    }\n"
     "}\n"
     "\n"
     "// A thread's part of the query: one vector of the tile, if that has so many.\n"
     "struct query_share {\n"
     "    int n, part;     // which vector; which lane of it\n"
     "    uint64_t record; // its address\n"
     "    bool exists, plain;\n"
     "    uint32_t pair[kQueryParts][8]; // plain BF16, the usual case: all loads at once, and early\n"
     "};\n"
     "static_assert(kTile * kQueryLanes <= KMLA_I_HOPPER_THREADS, \"a vector each\");\n"
     "\n"
     "KMLA_DEVICE void load_query(const kmla_i_reader_args& args, const block_place& s, query_share& q) {\n"
     "    int vector;\n"
     "    q.n = thread_index() / kQueryLanes;\n"
     "    q.part = s.lane % kQueryLanes;\n"
     "    vector = s.first_vector + q.n;\n"
     "    q.exists = q.n < kTile && vector < s.vectors;\n"
    },
    {"hopper.cuh", 247,
     "    q.plain = args.query_format == KMLA_QUERY_BF16 && !args.e4m3_query;\n"
     "    q.record = args.query + (s.first_row + vector / args.heads) * args.query_row_stride +\n"
     "               vector % args.heads * args.query_head_stride;\n"
     "    if (!q.plain) {\n"
     "        return;\n"
     "    }\n"
     "#pragma unroll\n"
     "    for (int i = 0; i < kQueryParts; i++) {\n"
     "        int block = kQueryLanes * i + q.part;\n"
     "        for (int w = 0; w < 8; w++) {\n"
     "            q.pair[i][w] = 0;\n"
     "        }\n"
     "        if (q.exists && block < KMLA_QUERY_DIMS / 16) {\n"
     "            load_bf16(q.record + 32 * block, q.pair[i]);\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void stage_vector(const kmla_i_reader_args& args, const query_share& q) {\n"
     "    int n = q.n, part = q.part;\n"
     "    float amax = 0, factor;\n"
     "    if (q.plain) {\n"
     "#pragma unroll\n"
     "        for (int i = 0; i < kQueryParts; i++) {\n"
     "            amax = lane_amax(q.pair[i], amax);\n"
     "        }\n"
     "    } else {\n"
     "#pragma unroll 1\n"
     "        for (int i = 0; i < kQueryParts; i++) {\n"
     "            uint32_t pair[8];\n"
     "            load_query_part(args, q.record, q.exists, i, part, pair);\n"
     "            amax = lane_amax(pair, amax);\n"
     "        }\n"
     "    }\n"
     "    amax = vector_amax(amax);\n"
     "    int exponent = minimum(maximum((int)(float_bits(amax) >> 23), 64), 254);\n"
     "    factor = bits_float((uint32_t)(127 + 14 + 127 - exponent) << 23);\n"
     "    if (q.plain) {\n"
     "#pragma unroll\n"
     "        for (int i = 0; i < kQueryParts; i++) {\n"
     "            if (kQueryLanes * i + part < KMLA_QUERY_DIMS / 16) {\n"
     "                store_query_block(n, kQueryLanes * i + part, q.pair[i], factor);\n"
     "            }\n"
     "        }\n"
     "    } else {\n"
     "#pragma unroll 1\n"
     "        for (int i = 0; i < kQueryParts; i++) {\n"
     "            uint32_t pair[8];\n"
     "            load_query_part(args, q.record, q.exists, i, part, pair);\n"
     "            if (kQueryLanes * i + part < KMLA_QUERY_DIMS / 16) {\n"
     "                store_query_block(n, kQueryLanes * i + part, pair, factor);\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "    if (part == 0) {\n"
     "        terms()[n / 2].scale[n % 2] =\n"
     "            args.score_scale * bits_float((uint32_t)(exponent - 14) << 23);\n"
     "        reference_of(n) = kNoReference;\n"
     "        weight_scales()[n] = 1;\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void stage_query(const kmla_i_reader_args& args, const query_share& q) {\n"
     "    if (q.n < kTile) { // whole warps\n"
     "        stage_vector(args, q);\n"
     "    }\n"
     "    fence_async_reads();\n"
     "}\n"
     "\n"
     "// ---- KV to shared memory, by the value warps: runs of 32 tokens\n"
     "\n"
     "KMLA_DEVICE bool copies_in_bulk(const block_place& s) { return kPitch == kRecordBytes && s.bulk; }\n"
     "\n"
     "// In bulk: lanes 0, 1 .. of the first value warp take a run each.\n"
     "\n"
     "// The table's entry for the page of a run, -1 if none of its tokens is wanted.\n"
     "KMLA_DEVICE int look_up_run(const kmla_i_reader_args& args, const block_place& s, int token) {\n"
     "    bool wanted = token < bounds().end && token > bounds().begin - kRunTokens;\n"
     "    return wanted \? table_entry(args, s.group, token) : -1;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void copy_run_in_bulk(const kmla_i_reader_args& args, int slot, int token, int entry) {\n"
     "    int first = minimum(maximum(bounds().begin - token, 0), kRunTokens);\n"
     "    int last = entry < 0 \? first : maximum(minimum(bounds().end - token, kRunTokens), first);\n"
     "    uint32_t bytes = (uint32_t)((last - first) * kRecordBytes);\n"
     "    run_tokens(slot) = bytes \? 0xFFFFFFFFu << first & 0xFFFFFFFFu >> (kRunTokens - last) : 0;\n"
     "    barrier_arrive_expect(arrival_of(slot), bytes);\n"
     "    if (bytes) {\n"
     "        uint64_t from = record_address(args, entry, token + first, kRecordBytes);\n"
     "        copy_bulk(records_of(slot) + first * kPitch, (const void*)from, bytes, arrival_of(slot));\n"
     "    }\n"
     "}\n"
     "\n"
     "// Record by record: all value warps take a share of each run.\n"
     "\n"
     "// The table's entry for this lane's token of a run, -1 if it is not wanted.\n"
     "KMLA_DEVICE int look_up_record(const kmla_i_reader_args& args, const block_place& s, int token) {\n"
     "    token += s.lane;\n"
     "    bool wanted = token >= bounds().begin && token < bounds().end;\n"
     "    return wanted \? table_entry(args, s.group, token) : -1;\n"
     "}\n"
     "\n"
     "// Zeros where there is no record.\n"
    },
    {"hopper.cuh", 350,
     "KMLA_DEVICE void copy_run_of_records(const kmla_i_reader_args& args, const block_place& s, int slot,\n"
     "                                     int token, int entry) {\n"
     "    const int share = kRunTokens / kValueWarps;\n"
     "    uint64_t address = record_address(args, entry, token + s.lane, kRecordBytes);\n"
     "    address = entry >= 0 \? address : 0;\n"
     "    uint32_t exists = ballot(entry >= 0);\n"
     "#pragma unroll 1\n"
     "    for (int i = s.warp * share; i < (s.warp + 1) * share; i++) {\n"
     "        uint64_t record = shuffle(address, i);\n"
     "        for (int at = 16 * s.lane; at < kRecordBytes; at += 16 * 32) {\n"
     "            copy_async_16(records_of(slot) + i * kPitch + at,\n"
     "                          (const void*)((record \? record : args.kv) + at), record != 0);\n"
     "        }\n"
     "    }\n"
     "    copy_arrive(arrival_of(slot));\n"
     "    if (s.warp == 0 && s.lane == 0) {\n"
     "        run_tokens(slot) = exists;\n"
     "        barrier_arrive(arrival_of(slot));\n"
     "    }\n"
     "}\n"
     "\n"
     "// Arrivals that complete a run: of the lane that copies in bulk, or of all that copy records and of\n"
     "// the one that says which there are.\n"
     "KMLA_DEVICE uint32_t run_arrivals(const block_place& s) {\n"
     "    return copies_in_bulk(s) \? 1 : kValueThreads + 1;\n"
     "}\n"
     "\n"
     "// Fills the ring.\n"
     "KMLA_DEVICE void copy_first_runs(const kmla_i_reader_args& args, const block_place& s,\n"
     "                                 const token_walk& walk) {\n"
     "    int runs = minimum(kStages, 2 * walk.steps);\n"
     "    if (copies_in_bulk(s)) {\n"
     "        if (s.warp == 0 && s.lane < runs) {\n"
     "            int token = walk.first + s.lane * kRunTokens;\n"
     "            copy_run_in_bulk(args, s.lane, token, look_up_run(args, s, token));\n"
     "        }\n"
     "        return;\n"
     "    }\n"
     "    int entry = look_up_record(args, s, walk.first);\n"
     "#pragma unroll 1\n"
     "    for (int run = 0; run < runs; run++) {\n"
     "        int token = walk.first + run * kRunTokens;\n"
     "        int next = run + 1 < runs \? look_up_record(args, s, token + kRunTokens) : -1;\n"
     "        copy_run_of_records(args, s, run, token, entry);\n"
     "        entry = next;\n"
     "    }\n"
     "}\n"
     "\n"
     "// What a value thread needs to start the copies of the two runs that take the place of a step's.\n"
     "struct next_copies {\n"
     "    int run;      // the first of the two\n"
     "    int entry[2]; // in bulk only the lane's own\n"
     "};\n"
     "\n"
     "KMLA_DEVICE void look_ahead(const kmla_i_reader_args& args, const block_place& s,\n"
     "                            const token_walk& walk, next_copies& next) {\n"
     "    if (next.run >= 2 * walk.steps) {\n"
     "        return; // and nowhere near the largest token\n"
     "    }\n"
     "    int token = walk.first + next.run * kRunTokens;\n"
     "    if (!copies_in_bulk(s)) {\n"
     "        next.entry[0] = look_up_record(args, s, token);\n"
     "        if (next.run + 1 < 2 * walk.steps) {\n"
     "            next.entry[1] = look_up_record(args, s, token + kRunTokens);\n"
     "        }\n"
     "    } else if (s.warp == 0 && s.lane < 2 && next.run + s.lane < 2 * walk.steps) {\n"
     "        next.entry[0] = look_up_run(args, s, token + s.lane * kRunTokens);\n"
     "    }\n"
     "}\n"
     "\n"
     "// `place`: of the first of the two runs whose place is free now.\n"
     "KMLA_DEVICE void copy_next_runs(const kmla_i_reader_args& args, const block_place& s,\n"
     "                                const token_walk& walk, ring_place place, next_copies& next) {\n"
     "    int left = 2 * walk.steps - next.run;\n"
     "    int token = left > 0 \? walk.first + next.run * kRunTokens : 0;\n"
     "    if (!copies_in_bulk(s)) {\n"
     "        for (int i = 0; i < 2 && i < left; i++) {\n"
     "            copy_run_of_records(args, s, place_after(place, i).slot, token + i * kRunTokens,\n"
     "                                next.entry[i]);\n"
     "        }\n"
     "    } else if (s.warp == 0 && s.lane < 2 && s.lane < left) {\n"
     "        copy_run_in_bulk(args, place_after(place, s.lane).slot, token + s.lane * kRunTokens,\n"
     "                         next.entry[0]);\n"
     "    }\n"
     "    next.run += 2;\n"
     "    look_ahead(args, s, walk, next);\n"
     "}\n"
     "\n"
     "// ---- QK: scores of a score warp's 16 tokens of a step\n"
     "\n"
     "// Where a score thread is.\n"
     "struct score_place {\n"
     "    int group; // which of the two; its weight buffer\n"
     "    int thread, warp, lane, row_in_quad, column;\n"
     "    int token; // of its two, the first within the step; the other is 8 on\n"
     "};\n"
     "\n"
    },
    {"hopper.cuh", 447,
     "// Descriptor of a k16 step of the query, from that of the first.\n"
     "KMLA_DEVICE uint64_t query_descriptor(uint64_t first, int step_of_16) {\n"
     "    return first + (uint64_t)(step_of_16 / 4 * kTile * 128 / 16 + step_of_16 % 4 * 2);\n"
     "}\n"
     "\n"
     "// Raw words of a batch of k16 steps: of the thread's two tokens, one of codes or two of BF16.\n"
     "typedef uint32_t raw_batch[kBatchSteps][4];\n"
     "typedef uint32_t fragment_batch[kBatchSteps][4];\n"
     "\n"
     "KMLA_DEVICE void load_batch(const uint8_t* codes, raw_batch& raw) {\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kBatchSteps; k++) {\n"
     "        raw[k][0] = *(const uint32_t*)(codes + 16 * k);\n"
     "        raw[k][1] = *(const uint32_t*)(codes + 16 * k + 8 * kPitch);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void load_rope(const uint8_t* record, int column, int batch, raw_batch& raw) {\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kBatchSteps; k++) {\n"
     "        const uint8_t* at = record + KMLA_PACKED_ROPE_OFFSET + 32 * (batch * kBatchSteps + k) +\n"
     "                            8 * column;\n"
     "        word2 low = *(const word2*)at, high = *(const word2*)(at + 8 * kPitch);\n"
     "        raw[k][0] = low.x, raw[k][1] = high.x, raw[k][2] = low.y, raw[k][3] = high.y;\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void batch_to_fragments(const raw_batch& raw, bool rope_of_bf16, fragment_batch& a) {\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kBatchSteps; k++) {\n"
     "        if (rope_of_bf16) {\n"
     "            for (int i = 0; i < 4; i++) {\n"
     "                a[k][i] = raw[k][i];\n"
     "            }\n"
     "            continue;\n"
     "        }\n"
     "        uint32_t low[2], high[2];\n"
     "        e4m3x4_to_f16(raw[k][0], low);\n"
     "        e4m3x4_to_f16(raw[k][1], high);\n"
     "        a[k][0] = low[0], a[k][1] = high[0], a[k][2] = low[1], a[k][3] = high[1];\n"
     "    }\n"
     "}\n"
     "\n"
     "// Codes are multiplied as they are, group by group into the same sums. Between groups these are\n"
     "// multiplied by the token's scale of the group before over that of the next, in the end by the\n"
     "// last.\n"
     "struct key_scales {\n"
     "    float factor[2][kGroups]; // of the thread's two tokens: behind each group\n"
     "};\n"
     "\n"
     "// A scale below 2^-kFaintGroup of the token's largest, as that of zeros, would overflow such a\n"
     "// quotient. It is taken for that much: less than rounding of any sum that the group is part of.\n"
     "constexpr int kFaintGroup = 80;\n"
     "\n"
     "KMLA_DEVICE key_scales load_key_scales(const uint8_t* record) {\n"
     "    key_scales scales;\n"
     "#pragma unroll\n"
     "    for (int i = 0; i < 2; i++) {\n"
     "        word4 bits = *(const word4*)(record + i * 8 * kPitch + KMLA_PACKED_SCALE_OFFSET);\n"
     "        uint32_t of_group[kGroups] = {bits.x, bits.y, bits.z, bits.w}, largest = 0;\n"
     "#pragma unroll\n"
     "        for (int g = 0; g < kGroups; g++) {\n"
     "            largest = maximum(largest, of_group[g] & 0x7FFFFFFFu);\n"
     "        }\n"
     "        // Scales are brought near 1, so that the least is a normal number: times 2^-e of the\n"
     "        // largest.\n"
     "        uint32_t power = largest & 0x7F800000u;\n"
     "        float to_one = bits_float((254u << 23) - (power < 253u << 23 \? power : 253u << 23));\n"
     "        float before = 1;\n"
     "#pragma unroll\n"
     "        for (int g = 0; g < kGroups; g++) {\n"
     "            float scale = bits_float(of_group[g]) * to_one;\n"
     "            const float least = bits_float((uint32_t)(127 - kFaintGroup) << 23);\n"
     "            scale = maximum(scale, -scale) < least \? least : scale;\n"
     "            if (g > 0) {\n"
     "                scales.factor[i][g - 1] = before * reciprocal(scale);\n"
     "            }\n"
     "            before = scale;\n"
     "        }\n"
     "        // A scale that is no number makes the score none; scales that are all 0 make it 0.\n"
     "        float last = before * bits_float(power > 0 \? power : 1u << 23);\n"
     "        last = largest == 0 \? 0 : last;\n"
     "        scales.factor[i][kGroups - 1] = largest < 0x7F800000u \? last : bits_float(0x7FC00000u);\n"
     "    }\n"
     "    return scales;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void scale_scores(accumulators& score, const key_scales& scales, int group) {\n"
     "#pragma unroll\n"
     "    for (int i = 0; i < kColumns * 4; i++) {\n"
     "        score[i] *= scales.factor[i / 2 % 2][group];\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE bool is_rope_of_bf16(int batch) { return kPacked && batch >= kLatentBatches; }\n"
     "\n"
    },
    {"hopper.cuh", 543,
     "KMLA_DEVICE void load_any_batch(const uint8_t* record, int column, int batch, raw_batch& raw) {\n"
     "    if (is_rope_of_bf16(batch)) {\n"
     "        load_rope(record, column, batch - kLatentBatches, raw);\n"
     "    } else {\n"
     "        load_batch(record + 16 * kBatchSteps * batch + 4 * column, raw);\n"
     "    }\n"
     "}\n"
     "\n"
     "// A batch is multiplied while the next is converted and the raw words of the one after it come.\n"
     "KMLA_DEVICE void multiply_keys(const score_place& s, const uint8_t* record, accumulators& score) {\n"
     "    const int per_group = kGroupSteps / kBatchSteps;\n"
     "    key_scales scales;\n"
     "    raw_batch raw;\n"
     "    fragment_batch a[2];\n"
     "    uint64_t query = matrix_descriptor(query_block(opaque(0))); // takes no register elsewhere\n"
     "    load_any_batch(record, s.column, 0, raw);\n"
     "    if (kPacked) {\n"
     "        scales = load_key_scales(record);\n"
     "    }\n"
     "    batch_to_fragments(raw, false, a[0]);\n"
     "    load_any_batch(record, s.column, 1, raw);\n"
     "#pragma unroll\n"
     "    for (int batch = 0; batch < kBatches; batch++) {\n"
     "        if (kPacked && batch > 0 && batch <= kLatentBatches && batch % per_group == 0) {\n"
     "            wgmma_wait<0>();\n"
     "            scale_scores(score, scales, batch / per_group - 1);\n"
     "        }\n"
     "        wgmma_fence();\n"
     "#pragma unroll\n"
     "        for (int k = 0; k < kBatchSteps; k++) {\n"
     "            uint64_t b = query_descriptor(query, batch * kBatchSteps + k);\n"
     "            if (is_rope_of_bf16(batch)) {\n"
     "                wgmma_bf16(score, a[batch % 2][k], b, true);\n"
     "            } else {\n"
     "                wgmma_f16(score, a[batch % 2][k], b, batch + k > 0);\n"
     "            }\n"
     "        }\n"
     "        wgmma_commit();\n"
     "        if (batch + 1 < kBatches) {\n"
     "            wgmma_wait<1>(); // the batch before is done with its registers\n"
     "            batch_to_fragments(raw, is_rope_of_bf16(batch + 1), a[(batch + 1) % 2]);\n"
     "        }\n"
     "        if (batch + 2 < kBatches) {\n"
     "            load_any_batch(record, s.column, batch + 2, raw);\n"
     "        }\n"
     "    }\n"
     "    wgmma_wait<0>();\n"
     "}\n"
     "\n"
     "// ---- scales of values in packed records: as in the portable reader, 2^exponent goes with the\n"
     "// weight, the rest with V\n"
     "\n"
     "// From kLeastExponent to 126. 2^(exponent - kMidExponent), its inverse and products of it with\n"
     "// weights are normal floats.\n"
     "constexpr int kLeastExponent = -118, kMidExponent = 8;\n"
     "\n"
     "KMLA_DEVICE float power_of(int exponent) { return bits_float((uint32_t)(127 + exponent) << 23); }\n"
     "// Of 2^(exponent - kMidExponent).\n"
     "KMLA_DEVICE int exponent_of(float power) {\n"
     "    return kMidExponent + (int)(float_bits(power) >> 23) - 127;\n"
     "}\n"
     "\n"
     "// 2^(exponent - kMidExponent) of the thread's two tokens; the ratios of all four groups to the\n"
     "// buffer.\n"
     "KMLA_DEVICE void store_ratios(const score_place& s, const uint8_t* record, int buffer,\n"
     "                              float (&of_token)[2]) {\n"
     "#pragma unroll\n"
     "    for (int i = 0; i < 2; i++) {\n"
     "        word4 bits = *(const word4*)(record + i * 8 * kPitch + KMLA_PACKED_SCALE_OFFSET);\n"
     "        uint32_t of_group[kGroups] = {bits.x, bits.y, bits.z, bits.w}, largest = 0;\n"
     "        for (int g = 0; g < kGroups; g++) {\n"
     "            uint32_t magnitude = of_group[g] & 0x7FFFFFFFu;\n"
     "            of_group[g] = magnitude < 0x7F800000u \? of_group[g] : 0;\n"
     "            largest = maximum(largest, magnitude < 0x7F800000u \? magnitude : 0);\n"
     "        }\n"
     "        uint32_t power = (largest + 0x007FFFFFu) & 0x7F800000u; // 2^exponent\n"
     "        power = power < (253u << 23) \? power : 253u << 23;\n"
     "        power = maximum(power, (uint32_t)(127 + kLeastExponent) << 23);\n"
     "        of_token[i] = bits_float(power - ((uint32_t)kMidExponent << 23));\n"
     "        // The four lanes of a token store a group each.\n"
     "        uint32_t mine = s.column == 0   \? of_group[0]\n"
     "                        : s.column == 1 \? of_group[1]\n"
     "                        : s.column == 2 \? of_group[2]\n"
     "                                        : of_group[3];\n"
     "        float ratio = bits_float(mine) * bits_float((254u << 23) - power);\n"
     "        ratios_of(buffer, s.column)[s.token + 8 * i] = (uint16_t)pack_f16(ratio, 0.0f);\n"
     "    }\n"
     "}\n"
     "\n"
    },
    {"hopper.cuh", 632,
     "// ---- softmax, in registers: the thread has two tokens and every fourth pair of vectors\n"
     "\n"
     "// What a vector does not see has the score -inf. `tokens`: those of the warp that exist.\n"
     "KMLA_DEVICE void mask_scores(const score_place& s, int first_token, uint32_t tokens,\n"
     "                             accumulators& score) {\n"
     "    int token = first_token + s.token;\n"
     "    tokens >>= s.row_in_quad;\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            vector_range range = range_of(8 * j + 2 * s.column + i);\n"
     "            bool low = token >= range.begin && token < range.end && (tokens & 1);\n"
     "            bool high = token + 8 >= range.begin && token + 8 < range.end && (tokens >> 8 & 1);\n"
     "            score[4 * j + i] = low \? score[4 * j + i] : -infinity();\n"
     "            score[4 * j + 2 + i] = high \? score[4 * j + 2 + i] : -infinity();\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// The two entries of the thread's vectors of column j.\n"
     "struct of_two {\n"
     "    float value[2];\n"
     "};\n"
     "KMLA_DEVICE of_two load_two(const score_place& s, const float* of_vectors, int j) {\n"
     "    word2 bits = *(const word2*)(of_vectors + 8 * j + 2 * s.column);\n"
     "    return of_two{{bits_float(bits.x), bits_float(bits.y)}};\n"
     "}\n"
     "KMLA_DEVICE pair_terms load_terms(const score_place& s, int j) {\n"
     "    word4 bits = *(const word4*)(terms() + 4 * j + s.column);\n"
     "    return pair_terms{{bits_float(bits.x), bits_float(bits.y)},\n"
     "                      {bits_float(bits.z), bits_float(bits.w)}};\n"
     "}\n"
     "\n"
     "// A step's weights of a column by the references as they are. `power`: of the thread's two tokens.\n"
     "struct column_weights {\n"
     "    float sum[2];     // of the two tokens', as the sum takes them, by vector\n"
     "    uint32_t of_v[2]; // f16 pairs of vectors: the first token's, the second's\n"
     "};\n"
     "KMLA_DEVICE column_weights weigh_column(const score_place& s, const accumulators& score, int j,\n"
     "                                        const float (&power)[2]) {\n"
     "    pair_terms of = load_terms(s, j);\n"
     "    column_weights weights;\n"
     "    float low[2], high[2];\n"
     "    for (int i = 0; i < 2; i++) {\n"
     "        // Rounded before the difference, as the reference was: huge scores cancel exactly.\n"
     "        low[i] = exp2_fast(score[4 * j + i] * of.scale[i] - of.reference[i]);\n"
     "        high[i] = exp2_fast(score[4 * j + 2 + i] * of.scale[i] - of.reference[i]);\n"
     "        weights.sum[i] = low[i] + high[i];\n"
     "    }\n"
     "    if (kPacked) {\n"
     "        of_two of_v = load_two(s, weight_scales(), j);\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            low[i] = low[i] * power[0] * of_v.value[i];\n"
     "            high[i] = high[i] * power[1] * of_v.value[i];\n"
     "        }\n"
     "    }\n"
     "    weights.of_v[0] = pack_f16(low[0], low[1]);\n"
     "    weights.of_v[1] = pack_f16(high[0], high[1]);\n"
     "    return weights;\n"
     "}\n"
     "\n"
     "constexpr float kLargestSum = 1.15292150e18f; // 2^60; far more and sums might overflow\n"
     "\n"
     "// An f16 weight above 2^growth, or infinite.\n"
     "KMLA_DEVICE bool is_large(uint32_t weight) {\n"
     "    return weight > (15u + KMLA_I_REFERENCE_GROWTH) << 10;\n"
     "}\n"
     "\n"
     "// Weights into the buffer, and their sums. Whether some vector has outgrown its reference, which\n"
     "// makes both worthless.\n"
     "KMLA_DEVICE bool store_weights(const score_place& s, const accumulators& score,\n"
     "                               const float (&power)[2], float (&sum)[kColumns][2]) {\n"
     "    uint8_t* block = weight_block(s.group);\n"
     "    int chunk = s.warp * 2 + s.lane / 8 % 2;\n"
     "    uint32_t top = 0;\n"
     "    float top_sum = 0;\n"
     "    // Some columns are computed, then stored: stores are in order, what is between them need not\n"
     "    // be.\n"
     "    constexpr int some = kColumns > 5 \? 3 : 5;\n"
     "#pragma unroll\n"
     "    for (int first = 0; first < kColumns; first += some) {\n"
     "        uint32_t of_v[some][2];\n"
     "#pragma unroll\n"
     "        for (int j = first; j < first + some && j < kColumns; j++) {\n"
     "            column_weights weights = weigh_column(s, score, j, power);\n"
     "            for (int i = 0; i < 2; i++) {\n"
     "                sum[j][i] = weights.sum[i];\n"
     "                of_v[j - first][i] = weights.of_v[i];\n"
     "                top_sum = maximum(top_sum, weights.sum[i]);\n"
    },
    {"hopper.cuh", 721,
     "                top = maximum_f16x2(top, weights.of_v[i]);\n"
     "            }\n"
     "        }\n"
     "#pragma unroll\n"
     "        for (int j = first; j < first + some && j < kColumns; j++) {\n"
     "            store_matrix_x2_transposed(swizzled(block, 8 * j + s.lane % 8, chunk),\n"
     "                                       of_v[j - first][0], of_v[j - first][1]);\n"
     "        }\n"
     "    }\n"
     "    return top_sum > kLargestSum || is_large(top & 0xFFFFu) || is_large(top >> 16);\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void meet_group(const score_place& s) {\n"
     "    named_barrier_sync(kScoreBarrier + (uint32_t)s.group, kScoreThreads);\n"
     "}\n"
     "\n"
     "// Whether any thread of the group says so. They meet here.\n"
     "KMLA_DEVICE bool any_of_group(const score_place& s, bool mine) {\n"
     "    uint32_t lanes = ballot(mine);\n"
     "    if (s.lane == 0) {\n"
     "        votes_of(s.group)[s.warp] = lanes;\n"
     "    }\n"
     "    meet_group(s);\n"
     "    word4 votes = *(const word4*)votes_of(s.group);\n"
     "    return (votes.x | votes.y | votes.z | votes.w) != 0;\n"
     "}\n"
     "\n"
     "// ---- references, the rare case: maxima of each vector over the step\n"
     "\n"
     "// What is looked for: the largest score; the largest log2 of what weighs V above the reference of\n"
     "// the sum; 1 if it has outgrown its reference.\n"
     "enum top_kind { kTopScore, kTopWeight, kOutgrown };\n"
     "\n"
     "// Scratch: a weight buffer that is the group's, fp32 [tile][32], one of each warp's eight rows. A\n"
     "// vector's are rotated, so that neither stores nor loads of a warp fall into the same banks.\n"
     "KMLA_DEVICE float* scratch_of(const score_place& s, int n) {\n"
     "    return (float*)weight_block(s.group) + 32 * n;\n"
     "}\n"
     "\n"
     "template <top_kind kind>\n"
     "KMLA_DEVICE void store_tops(const score_place& s, const accumulators& score,\n"
     "                            const float (&power)[2]) {\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        pair_terms of = load_terms(s, j);\n"
     "        column_weights weights = weigh_column(s, score, j, power);\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            float low = score[4 * j + i] * of.scale[i], high = score[4 * j + 2 + i] * of.scale[i];\n"
     "            float of_low = (float)exponent_of(power[0]), of_high = (float)exponent_of(power[1]);\n"
     "            float top = maximum(low, high);\n"
     "            if (kind == kTopWeight) {\n"
     "                top = maximum(low - of.reference[i] + of_low, high - of.reference[i] + of_high);\n"
     "            } else if (kind == kOutgrown) {\n"
     "                top = weights.sum[i] > kLargestSum || is_large(weights.of_v[0] >> 16 * i & 0xFFFFu) ||\n"
     "                      is_large(weights.of_v[1] >> 16 * i & 0xFFFFu);\n"
     "            }\n"
     "            int row = s.warp * 8 + s.row_in_quad;\n"
     "            scratch_of(s, 8 * j + 2 * s.column + i)[(row + 8 * s.column) % 32] = top;\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// The largest over the step's tokens, of the thread's vector n < kTile.\n"
     "template <top_kind kind>\n"
     "KMLA_DEVICE float find_top(const score_place& s, const accumulators& score,\n"
     "                           const float (&power)[2]) {\n"
     "    float top = -infinity();\n"
     "    meet_group(s); // the scratch is free, and what it is computed from up to date\n"
     "    store_tops<kind>(s, score, power);\n"
     "    meet_group(s);\n"
     "    if (s.thread < kTile) {\n"
     "        for (int i = 0; i < 8; i++) {\n"
     "            word4 four = *(const word4*)(scratch_of(s, s.thread) + 4 * ((i + s.thread) % 8));\n"
     "            top = maximum(top, maximum(maximum(bits_float(four.x), bits_float(four.y)),\n"
     "                                       maximum(bits_float(four.z), bits_float(four.w))));\n"
     "        }\n"
     "    }\n"
     "    return top;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float round_up(float x) { // |x| < 2^22\n"
     "    float rounded = (x + 12582912.0f) - 12582912.0f;\n"
     "    return rounded < x \? rounded + 1 : rounded;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE float weight_scale(int a) { return power_of(kMidExponent - a); }\n"
     "KMLA_DEVICE int exponent_of_scale(float scale) {\n"
     "    return kMidExponent + 127 - (int)(float_bits(scale) >> 23);\n"
     "}\n"
     "\n"
     "// New references where there are none yet or weights have outgrown them, and factors for what was\n"
     "// summed under the old ones. `first`: no vector has one yet. All threads of the group come here,\n"
     "// and have met again when it ends.\n"
    },
    {"hopper.cuh", 814,
     "KMLA_DEVICE void raise_references(const score_place& s, bool first, const accumulators& score,\n"
     "                                  const float (&power)[2]) {\n"
     "    int n = s.thread;\n"
     "    bool mine = n < kTile;\n"
     "    float old = mine \? reference_of(n) : 0, before = mine \? weight_scales()[n] : 1;\n"
     "    bool grown = first || find_top<kOutgrown>(s, score, power) > 0;\n"
     "    float top = find_top<kTopScore>(s, score, power);\n"
     "    float factor = 1, now = before;\n"
     "    grown = mine && grown && top > -infinity();\n"
     "    if (grown) {\n"
     "        float raised = maximum(old, top - KMLA_I_REFERENCE_BELOW);\n"
     "        factor = old == kNoReference \? 0 : exp2_fast(old - raised);\n"
     "        reference_of(n) = raised;\n"
     "    }\n"
     "    if (kPacked) {\n"
     "        float top_weight = find_top<kTopWeight>(s, score, power);\n"
     "        bool outgrown = top_weight - (float)exponent_of_scale(before) >\n"
     "                        KMLA_I_REFERENCE_GROWTH - KMLA_I_REFERENCE_BELOW;\n"
     "        if (grown && (old == kNoReference || outgrown)) {\n"
     "            int a = (int)round_up(maximum(top_weight, -200.0f)) - KMLA_I_REFERENCE_BELOW;\n"
     "            now = weight_scale(maximum(minimum(a, 126), kLeastExponent));\n"
     "            weight_scales()[n] = now;\n"
     "        }\n"
     "    }\n"
     "    if (mine) {\n"
     "        sum_factors_of(s.group)[n] = factor;\n"
     "        rescales_of(s.group)[n] = factor * now * bits_float((254u << 23) - float_bits(before));\n"
     "    }\n"
     "    meet_group(s);\n"
     "}\n"
     "\n"
     "// The thread's sums of weights, of its two vectors of column j: used once a step, not worth\n"
     "// registers.\n"
     "KMLA_DEVICE word2& sums_of(const score_place& s, int j) {\n"
     "    return ((word2*)(shared_memory() + kSumsAt))[(2 * j + s.group) * kScoreThreads + s.thread];\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void scale_sums(const score_place& s, int buffer) {\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        of_two factor = load_two(s, sum_factors_of(buffer), j);\n"
     "        word2 sum = sums_of(s, j);\n"
     "        sums_of(s, j) = word2{float_bits(bits_float(sum.x) * factor.value[0]),\n"
     "                              float_bits(bits_float(sum.y) * factor.value[1])};\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void add_to_sums(const score_place& s, const float (&of_step)[kColumns][2]) {\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        word2 sum = sums_of(s, j);\n"
     "        sums_of(s, j) = word2{float_bits(bits_float(sum.x) + of_step[j][0]),\n"
     "                              float_bits(bits_float(sum.y) + of_step[j][1])};\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- the walk of a score group over its steps\n"
     "\n"
     "// Before a group's softmax the other's of the step before is done: what that left counts.\n"
     "KMLA_DEVICE void take_turn(const score_place& s) {\n"
     "    named_barrier_sync(kTurnBarrier + (uint32_t)s.group, 2 * kScoreThreads);\n"
     "    if (rescaled(1 - s.group)) {\n"
     "        scale_sums(s, 1 - s.group);\n"
     "    }\n"
     "}\n"
     "KMLA_DEVICE void pass_turn(const score_place& s) {\n"
     "    named_barrier_arrive(kTurnBarrier + (uint32_t)(1 - s.group), 2 * kScoreThreads);\n"
     "}\n"
     "\n"
     "// Weights of the step, in the group's buffer when its threads have met at the end. `first`: no\n"
     "// vector has a reference yet.\n"
     "KMLA_DEVICE void softmax_step(const score_place& s, bool first, const accumulators& score,\n"
     "                              const float (&power)[2]) {\n"
     "    float of_step[kColumns][2];\n"
     "    bool grown = first;\n"
     "    if (!first) {\n"
     "        grown = store_weights(s, score, power, of_step);\n"
     "        fence_async_reads();\n"
     "        grown = any_of_group(s, grown);\n"
     "    }\n"
     "    if (s.thread == 0) {\n"
     "        rescaled(s.group) = grown;\n"
     "    }\n"
     "    if (grown) {\n"
     "        raise_references(s, first, score, power);\n"
     "        scale_sums(s, s.group);\n"
     "        store_weights(s, score, power, of_step);\n"
     "        fence_async_reads();\n"
     "        meet_group(s);\n"
     "    }\n"
     "    pass_turn(s); // of the references nothing is read any more\n"
     "    add_to_sums(s, of_step);\n"
     "}\n"
     "\n"
     "// Sums over lanes, then warps and groups ascending; factors and targets of the results. The scratch\n"
     "// is the buffer of the step behind the last.\n"
     "KMLA_DEVICE void finish_softmax(const kmla_i_reader_args& args, const score_place& s, int buffer) {\n"
    },
    {"hopper.cuh", 911,
     "    float* rows = (float*)weight_block(buffer);\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        word2 sum = sums_of(s, j);\n"
     "        for (int i = 0; i < 2; i++) {\n"
     "            float of_warp = bits_float(i \? sum.y : sum.x);\n"
     "            of_warp += shuffle_xor(of_warp, 4);\n"
     "            of_warp += shuffle_xor(of_warp, 8);\n"
     "            of_warp += shuffle_xor(of_warp, 16);\n"
     "            if (s.row_in_quad == 0) {\n"
     "                rows[(s.group * kScoreWarps + s.warp) * kTile + 8 * j + 2 * s.column + i] = of_warp;\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "    named_barrier_sync(kSumBarrier, 2 * kScoreThreads);\n"
     "    int n = s.thread;\n"
     "    if (s.group == 0 && n < kTile) {\n"
     "        float total = 0;\n"
     "        for (int row = 0; row < 2 * kScoreWarps; row++) {\n"
     "            total += rows[row * kTile + n];\n"
     "        }\n"
     "        float scale = kPacked \? exp2_wide((float)exponent_of_scale(weight_scales()[n]))\n"
     "                              : args.kv_scale;\n"
     "        finish_vector(args, n, total, reference_of(n), scale);\n"
     "    }\n"
     "}\n"
     "\n"
     "// A buffer is free for step i when the values of step i - 2 are weighed.\n"
     "KMLA_DEVICE void take_buffer(int buffer, int step) {\n"
     "    if (step >= 2) {\n"
     "        barrier_wait(weights_free(buffer), (uint32_t)(step / 2 - 1) & 1);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE score_place find_score_place(int of_block) {\n"
     "    score_place s;\n"
     "    unsigned thread = (unsigned)of_block; // so that divisions are shifts\n"
     "    s.group = (int)(thread / kScoreThreads);\n"
     "    s.thread = (int)(thread % kScoreThreads);\n"
     "    s.warp = (int)(thread % kScoreThreads / 32);\n"
     "    s.lane = (int)(thread % 32);\n"
     "    s.row_in_quad = (int)(thread % 32 / 4);\n"
     "    s.column = (int)(thread % 4);\n"
     "    s.token = 16 * s.warp + s.row_in_quad;\n"
     "    return s;\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void score_tokens(const kmla_i_reader_args& args) {\n"
     "    score_place s = find_score_place(opaque(thread_index()));\n"
     "    token_walk walk = find_walk();\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        sums_of(s, j) = word2{0, 0};\n"
     "    }\n"
     "    int step = s.group ^ walk.odd; // the group's first\n"
     "    ring_place low = place_after(ring_place{0, 0}, 2 * step);\n"
     "#pragma unroll 1\n"
     "    for (; step < walk.steps; step += 2) {\n"
     "        s = find_score_place(opaque(thread_index())); // places take no registers from step to step\n"
     "        ring_place high = place_after(low, 1);\n"
     "        int token = bounds().begin / kStep * kStep + step * kStep;\n"
     "        bool full = wait_for_runs(token, low, high);\n"
     "        int slot = s.warp < 2 \? low.slot : high.slot;\n"
     "        uint32_t tokens = run_tokens(slot) >> (s.warp % 2 * 16);\n"
     "        const uint8_t* record =\n"
     "            records_of(slot) + (s.warp % 2 * 16 + s.row_in_quad) * kPitch;\n"
     "        accumulators score;\n"
     "        float power[2] = {1, 1};\n"
     "        multiply_keys(s, record, score);\n"
     "        s = find_score_place(opaque(thread_index()));\n"
     "        take_buffer(s.group, step);\n"
     "        if (kPacked) {\n"
     "            store_ratios(s, record, s.group, power);\n"
     "        }\n"
     "        if (!full) {\n"
     "            mask_scores(s, token, tokens, score);\n"
     "        }\n"
     "        if (step > 0) {\n"
     "            take_turn(s);\n"
     "            s = find_score_place(opaque(thread_index()));\n"
     "        }\n"
     "        softmax_step(s, step == 0, score, power);\n"
     "        if (s.thread == 0) {\n"
     "            barrier_arrive(weights_ready(s.group));\n"
     "        }\n"
     "        low = place_after(low, 4);\n"
     "    }\n"
     "    launch_dependents();\n"
     "    if (step == walk.steps && step > 0) { // the last step was the other group's\n"
     "        take_turn(s);\n"
     "    }\n"
     "    int next = (walk.steps + walk.odd) % 2;\n"
     "    take_buffer(next, walk.steps);\n"
     "    finish_softmax(args, s, next);\n"
     "    if (s.group == 0) {\n"
     "        named_barrier_arrive(kEndBarrier, kScoreThreads + kValueThreads);\n"
     "    }\n"
     "}\n"
     "\n"
     "// ---- PV: 64 dims a value warp\n"
     "\n"
     "// Raw bytes of a k16 step: 8 dims of tokens 2c, 2c + 1, 2c + 8, 2c + 9.\n"
     "KMLA_DEVICE void load_values(const uint8_t* at, word2 (&token)[4]) {\n"
     "    token[0] = *(const word2*)at;\n"
     "    token[1] = *(const word2*)(at + kPitch);\n"
     "    token[2] = *(const word2*)(at + 8 * kPitch);\n"
     "    token[3] = *(const word2*)(at + 9 * kPitch);\n"
     "}\n"
     "\n"
    },
    {"hopper.cuh", 1019,
     "// To V^T fragments, as in the portable reader, times the tokens' ratios.\n"
     "template <bool masked>\n"
     "KMLA_DEVICE void values_to_fragments(const word2 (&token)[4], const uint32_t* ratios,\n"
     "                                     uint32_t (&a)[4][4]) {\n"
     "    const uint32_t largest = 0x7BFF7BFFu; // 65504\n"
     "#pragma unroll\n"
     "    for (int half = 0; half < 2; half++) {\n"
     "        word2 even = token[2 * half], odd = token[2 * half + 1];\n"
     "        uint32_t ratio = kPacked \? ratios[4 * half] : 0;\n"
     "        uint32_t woven[4] = {\n"
     "            permute_bytes(even.x, odd.x, 0x5140), permute_bytes(even.x, odd.x, 0x7362),\n"
     "            permute_bytes(even.y, odd.y, 0x5140), permute_bytes(even.y, odd.y, 0x7362)};\n"
     "#pragma unroll\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "            uint32_t pair[2];\n"
     "            e4m3x4_to_f16(woven[m], pair);\n"
     "            for (int i = 0; i < 2; i++) {\n"
     "                uint32_t value = kPacked \? multiply_f16x2(pair[i], ratio) : pair[i];\n"
     "                a[m][2 * half + i] = masked \? minimum_f16x2(value, largest) : value;\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Converted values of a k16 step; with registers to spare those of two.\n"
     "constexpr int kValueBuffers = kTile <= 32 \? 2 : 1;\n"
     "\n"
     "// V^T P^T of a step's first `steps` k16 steps. `token`: raw bytes of the first.\n"
     "template <bool masked>\n"
     "KMLA_DEVICE void multiply_values(const block_place& s, const uint8_t* low, const uint8_t* high,\n"
     "                                 int steps, int buffer, word2 (&token)[4],\n"
     "                                 accumulators (&out)[4]) {\n"
     "    const uint32_t* ratios = (const uint32_t*)ratios_of(buffer, s.warp / 2) + s.column;\n"
     "    uint64_t b = matrix_descriptor(weight_block(buffer));\n"
     "    constexpr int buffers = masked \? 1 : kValueBuffers;\n"
     "    uint32_t a[buffers][4][4];\n"
     "#pragma unroll\n"
     "    for (int k = 0; k < kStep / 16; k++) {\n"
     "        if (masked && k >= steps) {\n"
     "            break;\n"
     "        }\n"
     "        values_to_fragments<masked>(token, ratios + 8 * k, a[k % buffers]);\n"
     "        if (k + 1 < kStep / 16) {\n"
     "            load_values((k + 1 < 2 \? low : high) + (k + 1) % 2 * 16 * kPitch, token);\n"
     "        }\n"
     "        wgmma_fence();\n"
     "#pragma unroll\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "            wgmma_f16(out[m], a[k % buffers][m], b + (uint64_t)(2 * k), true);\n"
     "        }\n"
     "        wgmma_commit();\n"
     "        wgmma_wait<buffers - 1>();\n"
     "    }\n"
     "    wgmma_wait<0>();\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void rescale(const block_place& s, int buffer, accumulators (&out)[4]) {\n"
     "#pragma unroll\n"
     "    for (int j = 0; j < kColumns; j++) {\n"
     "        word2 bits = *(const word2*)(rescales_of(buffer) + 8 * j + 2 * s.column);\n"
     "        float factor[2] = {bits_float(bits.x), bits_float(bits.y)};\n"
     "        for (int m = 0; m < 4; m++) {\n"
     "            for (int i = 0; i < 4; i++) {\n"
     "                out[m][4 * j + i] *= factor[i % 2];\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// s.warp counts from the first value warp.\n"
     "KMLA_DEVICE void weigh_values(const kmla_i_reader_args& args, const block_place& s,\n"
     "                              const token_walk& walk) {\n"
     "    accumulators out[4];\n"
     "#pragma unroll\n"
     "    for (int m = 0; m < 4; m++) {\n"
     "        for (int i = 0; i < kColumns * 4; i++) {\n"
     "            out[m][i] = 0;\n"
     "        }\n"
     "    }\n"
     "    int offset = 2 * s.column * kPitch + 64 * s.warp + 8 * s.row_in_quad; // of the thread's bytes\n"
     "    next_copies next = {kStages, {-1, -1}};\n"
     "    look_ahead(args, s, walk, next);\n"
     "    ring_place place = {0, 0}, before = {0, 0};\n"
     "#pragma unroll 1\n"
     "    for (int step = 0; step < walk.steps; step++) {\n"
     "        int buffer = (step + walk.odd) % 2, token = walk.first + step * kStep;\n"
     "        word2 raw[4];\n"
     "        if (step > 0) { // a step late, so that nobody waits for the slowest warp\n"
     "            barrier_wait(weights_free(1 - buffer), (uint32_t)((step - 1) / 2) & 1);\n"
     "            copy_next_runs(args, s, walk, before, next);\n"
     "        }\n"
     "        ring_place after = place_after(place, 1);\n"
     "        bool full = wait_for_runs(token, place, after);\n"
     "        const uint8_t* low = records_of(place.slot) + offset;\n"
     "        const uint8_t* high = records_of(after.slot) + offset;\n"
    },
    {"hopper.cuh", 1114,
     "        load_values(low, raw);\n"
     "        barrier_wait(weights_ready(buffer), (uint32_t)(step / 2) & 1);\n"
     "        if (rescaled(buffer)) {\n"
     "            rescale(s, buffer, out);\n"
     "        }\n"
     "        if (full) {\n"
     "            multiply_values<false>(s, low, high, kStep / 16, buffer, raw, out);\n"
     "        } else {\n"
     "            int steps = (minimum(bounds().end - token, kStep) + 15) / 16;\n"
     "            multiply_values<true>(s, low, high, steps, buffer, raw, out);\n"
     "        }\n"
     "        if (s.lane == 0) {\n"
     "            barrier_arrive(weights_free(buffer));\n"
     "        }\n"
     "        before = place;\n"
     "        place = place_after(after, 1);\n"
     "    }\n"
     "    named_barrier_sync(kEndBarrier, kScoreThreads + kValueThreads);\n"
     "    store_results(args, s, out);\n"
     "}\n"
     "\n"
     "// ---- the block\n"
     "\n"
     "KMLA_DEVICE void init_barriers(const block_place& s) {\n"
     "    for (int slot = 0; slot < kStages; slot++) {\n"
     "        barrier_init(arrival_of(slot), run_arrivals(s));\n"
     "    }\n"
     "    for (int buffer = 0; buffer < 2; buffer++) {\n"
     "        barrier_init(weights_ready(buffer), 1);\n"
     "        barrier_init(weights_free(buffer), kValueWarps);\n"
     "    }\n"
     "    barrier_init_fence();\n"
     "}\n"
     "\n"
     "KMLA_KERNEL(kmla_reader, kmla_i_reader_args, KMLA_I_HOPPER_THREADS, 1) {\n"
     "    wait_dependency();\n"
     "    if (block_z() == args.groups) {\n"
     "        clear_dead_rows(args);\n"
     "        return;\n"
     "    }\n"
     "    block_place s;\n"
     "    find_place(args, s);\n"
     "    if (s.first_vector >= s.vectors) {\n"
     "        return;\n"
     "    }\n"
     "    if (thread_index() == 0) {\n"
     "        init_barriers(s);\n"
     "    }\n"
     "    query_share q;\n"
     "    load_query(args, s, q); // under way while the ranges are found\n"
     "    find_ranges(args, s, weight_block(0));\n"
     "    sync_block();\n"
     "    token_walk walk = find_walk();\n"
     "    bool scores = s.warp < 2 * kScoreWarps;\n"
     "    s.warp -= 2 * kScoreWarps;\n"
     "    if (!scores) {\n"
     "        copy_first_runs(args, s, walk);\n"
     "    }\n"
     "    stage_query(args, q);\n"
     "    sync_block();\n"
     "    if (scores) {\n"
     "        registers_release<kScoreRegisters>();\n"
     "        score_tokens(args);\n"
     "    } else {\n"
     "        registers_take<kValueRegisters>();\n"
     "        weigh_values(args, s, walk);\n"
     "    }\n"
     "}\n"
     "\n"
     "#endif\n"
    },
    {"merge.cuh", 1,
     "// Weighted sums by log-sum-exp: the merge of a plan's splits.\n"
     "\n"
     "#ifndef KMLA_TILE // support kernels\n"
     "\n"
     "KMLA_DEVICE float load_number(uint64_t base, int64_t index, int type) {\n"
     "    if (type == KMLA_FP32) {\n"
     "        return ((const float*)base)[index];\n"
     "    }\n"
     "    return bits_float((uint32_t)((const uint16_t*)base)[index] << 16);\n"
     "}\n"
     "\n"
     "// Four neighbouring elements as they lie in memory.\n"
     "KMLA_DEVICE void numbers_of(const word4& fp32, float (&x)[4]) {\n"
     "    x[0] = bits_float(fp32.x), x[1] = bits_float(fp32.y);\n"
     "    x[2] = bits_float(fp32.z), x[3] = bits_float(fp32.w);\n"
     "}\n"
     "KMLA_DEVICE void numbers_of(const word2& bf16, float (&x)[4]) {\n"
     "    x[0] = bf16_low(bf16.x), x[1] = bf16_high(bf16.x);\n"
     "    x[2] = bf16_low(bf16.y), x[3] = bf16_high(bf16.y);\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void store_numbers(uint64_t base, int64_t index, int type, const float (&x)[4]) {\n"
     "    if (type == KMLA_FP32) {\n"
     "        word4 bits = {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])};\n"
     "        *(word4*)((float*)base + index) = bits;\n"
     "    } else {\n"
     "        word2 bits = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};\n"
     "        *(word2*)((uint16_t*)base + index) = bits;\n"
     "    }\n"
     "}\n"
     "\n"
     "// The lse of the part that this lane answers for, of those from `first` on.\n"
     "KMLA_DEVICE float load_lse(const kmla_i_combine_args& args, int row, int head, int first) {\n"
     "    int part = first + thread_index() % 32;\n"
     "    int64_t index = part * args.part_lse_stride + row * args.part_lse_row_stride +\n"
     "                    head * args.part_lse_head_stride;\n"
     "    return part < args.parts \? ((const float*)args.part_lse)[index] : -infinity();\n"
     "}\n"
     "\n"
     "struct weighted {\n"
     "    float sum, out[4]; // of weights; of weights times elements\n"
     "};\n"
     "\n"
     "// Adds the parts from `first` on, `count` <= 32 of them; lane i has the weight of part first + i.\n"
     "// `at` is in elements, of which `four` is four. Eight loads at once: what weighs nothing is\n"
     "// not read, but replaced by the top, so that there is no branch between them.\n"
     "template <typename four>\n"
     "KMLA_DEVICE void add_parts(const kmla_i_combine_args& args, int64_t at, int first, int count,\n"
     "                           float lane_weight, int top_part, weighted& all) {\n"
     "    const int at_once = 8;\n"
     "    const four* from = (const four*)args.part_out + (uint64_t)at / 4;\n"
     "    const uint64_t stride = (uint64_t)args.part_out_stride / 4;\n"
     "#pragma unroll 1\n"
     "    for (int i = 0; i < count; i += at_once) {\n"
     "        four bits[at_once];\n"
     "        float weight[at_once], x[4];\n"
     "#pragma unroll\n"
     "        for (int k = 0; k < at_once; k++) {\n"
     "            weight[k] = shuffle(lane_weight, i + k);\n"
     "            int part = weight[k] > 0 \? first + i + k : top_part;\n"
     "            bits[k] = from[(uint32_t)part * stride];\n"
     "        }\n"
     "#pragma unroll\n"
     "        for (int k = 0; k < at_once; k++) {\n"
     "            numbers_of(bits[k], x);\n"
     "            all.sum += weight[k];\n"
     "            for (int d = 0; d < 4; d++) {\n"
     "                all.out[d] += weight[k] * x[d];\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// Adds the weights of those parts, but elements of one part only: the share's, which part_out is\n"
     "// of. Where that weighs nothing they are not read, whatever they hold.\n"
     "KMLA_DEVICE void add_share(const kmla_i_combine_args& args, int64_t at, int first, int count,\n"
     "                           float lane_weight, weighted& all) {\n"
     "    for (int i = 0; i < count; i++) {\n"
     "        float weight = shuffle(lane_weight, i), x[4];\n"
     "        all.sum += weight;\n"
     "        if (weight > 0 && first + i == args.share - 1) {\n"
     "            if (args.part_type == KMLA_FP32) {\n"
     "                numbers_of(((const word4*)args.part_out)[at / 4], x);\n"
     "            } else {\n"
     "                numbers_of(((const word2*)args.part_out)[at / 4], x);\n"
     "            }\n"
     "            for (int d = 0; d < 4; d++) {\n"
     "                all.out[d] = weight * x[d];\n"
     "            }\n"
     "        }\n"
     "    }\n"
     "}\n"
     "\n"
     "// out = sum(w o) / sum(w), lse = m + ln(sum w), w = exp(lse - m), m = max lse; parts ascending.\n"
     "// A part of weight 0 is not read. In the merge a NaN lse makes the vector NaN, and +inf says that\n"
    },
    {"merge.cuh", 96,
     "// its split has written the result itself; in the combine both are empty parts, like -inf. One\n"
     "// block a vector, four dims a thread; each warp finds the weights, a part a lane.\n"
     "template <bool is_merge, bool is_share>\n"
     "KMLA_DEVICE void weighted_sum(const kmla_i_combine_args& args) {\n"
     "    const float log2_e = 1.44269504f, ln_2 = 0.693147181f;\n"
     "    int head = block_x(), row = block_y(), dim = thread_index() * 4;\n"
     "    float top = -infinity();\n"
     "    int top_part = 0;\n"
     "    bool nan = false, done = false;\n"
     "#pragma unroll 1\n"
     "    for (int first = 0; first < args.parts; first += 32) {\n"
     "        float lse = load_lse(args, row, head, first);\n"
     "        nan = nan || !(lse == lse);\n"
     "        done = done || lse == infinity();\n"
     "        if (lse > top && lse < infinity()) {\n"
     "            top = lse;\n"
     "            top_part = first + thread_index() % 32;\n"
     "        }\n"
     "    }\n"
     "    for (int mask = 16; mask > 0; mask /= 2) {\n"
     "        float other = shuffle_xor(top, mask);\n"
     "        int other_part = (int)shuffle_xor((uint32_t)top_part, mask);\n"
     "        if (other > top) {\n"
     "            top = other;\n"
     "            top_part = other_part;\n"
     "        }\n"
     "    }\n"
     "    if (is_merge && ballot(done)) {\n"
     "        return;\n"
     "    }\n"
     "    weighted all = {0, {0, 0, 0, 0}};\n"
     "    int64_t at = row * args.part_row_stride + head * args.part_head_stride + dim;\n"
     "#pragma unroll 1\n"
     "    for (int first = 0; first < args.parts && top > -infinity(); first += 32) {\n"
     "        float lse = load_lse(args, row, head, first);\n"
     "        bool counts = lse > -infinity() && lse < infinity();\n"
     "        float weight = counts \? exp2_fast((lse - top) * log2_e) : 0;\n"
     "        int count = minimum(args.parts - first, 32);\n"
     "        if (is_share) {\n"
     "            add_share(args, at, first, count, weight, all);\n"
     "        } else if (args.part_type == KMLA_FP32) {\n"
     "            add_parts<word4>(args, at, first, count, weight, top_part, all);\n"
     "        } else {\n"
     "            add_parts<word2>(args, at, first, count, weight, top_part, all);\n"
     "        }\n"
     "    }\n"
     "    bool empty = all.sum == 0;\n"
     "    float lse = empty \? -infinity() : top + log2_fast(all.sum) * ln_2, out[4];\n"
     "    for (int d = 0; d < 4; d++) {\n"
     "        out[d] = empty \? 0 : divide(all.out[d], all.sum);\n"
     "    }\n"
     "    if (is_merge && ballot(nan)) {\n"
     "        lse = out[0] = out[1] = out[2] = out[3] = bits_float(0x7FFFFFFF);\n"
     "    }\n"
     "    store_numbers(args.out, row * args.out_row_stride + head * args.out_head_stride + dim,\n"
     "                  args.out_type, out);\n"
     "    if (args.lse && dim == 0) {\n"
     "        ((float*)args.lse)[row * args.lse_row_stride + head * args.lse_head_stride] = lse;\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_KERNEL(kmla_merge, kmla_i_combine_args, KMLA_I_SUPPORT_THREADS, 6) {\n"
     "    wait_dependency();\n"
     "    weighted_sum<true, false>(args);\n"
     "}\n"
     "\n"
     "#endif\n"
    },
    {"combine.cuh", 1,
     "// Combine over the ranks of decode context parallelism: each part is a rank's shard.\n"
     "\n"
     "#ifndef KMLA_TILE // support kernels\n"
     "\n"
     "KMLA_KERNEL(kmla_combine, kmla_i_combine_args, KMLA_I_SUPPORT_THREADS, 6) {\n"
     "    if (args.share > 0) {\n"
     "        weighted_sum<false, true>(args);\n"
     "    } else {\n"
     "        weighted_sum<false, false>(args);\n"
     "    }\n"
     "}\n"
     "\n"
     "#endif\n"
    },
    {"writers.cuh", 1,
     "// Writers of KV and query records, byte for byte those of the host. One warp a record, 16 latent\n"
     "// dims a lane, so that 8 lanes share a scale; 2 rope lanes a lane.\n"
     "\n"
     "#ifndef KMLA_TILE // support kernels\n"
     "\n"
     "KMLA_DEVICE int warp_index() { return thread_index() / 32; }\n"
     "KMLA_DEVICE int lane_index() { return thread_index() % 32; }\n"
     "\n"
     "// The largest magnitude among the numbers of a lane's 16 dims and its 7 group mates'.\n"
     "KMLA_DEVICE float group_amax(const float (&x)[16]) {\n"
     "    float amax = 0;\n"
     "    for (int i = 0; i < 16; i++) {\n"
     "        amax = maximum(amax, x[i] < 0 \? -x[i] : x[i]);\n"
     "    }\n"
     "    amax = maximum(amax, shuffle_xor(amax, 1));\n"
     "    amax = maximum(amax, shuffle_xor(amax, 2));\n"
     "    amax = maximum(amax, shuffle_xor(amax, 4));\n"
     "    const float largest = bits_float(0x7F7FFFFFu);\n"
     "    return amax > largest \? largest : amax; // an infinity saturates, it does not blind its group\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void load_numbers_16(uint64_t base, int64_t index, int type, float (&x)[16]) {\n"
     "    for (int i = 0; i < 16; i++) {\n"
     "        x[i] = load_number(base, index + i, type);\n"
     "    }\n"
     "}\n"
     "\n"
     "// Sixteen codes in one store.\n"
     "KMLA_DEVICE void store_codes(uint8_t* to, const uint32_t (&code)[16]) {\n"
     "    uint32_t word[4];\n"
     "    for (int i = 0; i < 4; i++) {\n"
     "        word[i] = code[4 * i] | code[4 * i + 1] << 8 | code[4 * i + 2] << 16 | code[4 * i + 3] << 24;\n"
     "    }\n"
     "    *(word4*)to = word4{word[0], word[1], word[2], word[3]};\n"
     "}\n"
     "\n"
     "// BF16 bits are copied as they are, NaN payloads too.\n"
     "KMLA_DEVICE uint32_t load_bf16_bits(uint64_t base, int64_t index, int type) {\n"
     "    if (type == KMLA_BF16) {\n"
     "        return ((const uint16_t*)base)[index];\n"
     "    }\n"
     "    return float_to_bf16(((const float*)base)[index]);\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void store_bf16(uint8_t* to, uint64_t base, int64_t index, int type, int count) {\n"
     "    for (int i = 0; i < count; i++) {\n"
     "        ((uint16_t*)to)[i] = (uint16_t)load_bf16_bits(base, index + i, type);\n"
     "    }\n"
     "}\n"
     "\n"
     "// A whole record in the E4M3 format, for KV and queries alike: code = E4M3(x / scale).\n"
     "KMLA_DEVICE void write_e4m3(uint8_t* record, uint64_t latent, int64_t latent_index, uint64_t rope,\n"
     "                            int64_t rope_index, int type, float scale) {\n"
     "    int lane = lane_index();\n"
     "    float x[16];\n"
     "    uint32_t code[16];\n"
     "    load_numbers_16(latent, latent_index + 16 * lane, type, x);\n"
     "    for (int i = 0; i < 16; i++) {\n"
     "        code[i] = float_to_e4m3(divide(x[i], scale));\n"
     "    }\n"
     "    store_codes(record + 16 * lane, code);\n"
     "    for (int i = 0; i < 2; i++) {\n"
     "        float r = load_number(rope, rope_index + 2 * lane + i, type);\n"
     "        record[KMLA_LATENT_DIMS + 2 * lane + i] = (uint8_t)float_to_e4m3(divide(r, scale));\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_DEVICE void write_bf16(uint8_t* record, uint64_t latent, int64_t latent_index, uint64_t rope,\n"
     "                            int64_t rope_index, int type) {\n"
     "    int lane = lane_index();\n"
     "    store_bf16(record + 32 * lane, latent, latent_index + 16 * lane, type, 16);\n"
     "    store_bf16(record + 2 * KMLA_LATENT_DIMS + 4 * lane, rope, rope_index + 2 * lane, type, 2);\n"
     "}\n"
     "\n"
     "// The packed framing: codes, the group's scale from its first lane, rope.\n"
     "KMLA_DEVICE void write_packed(uint8_t* record, const uint32_t (&code)[16], float scale,\n"
     "                              uint64_t rope, int64_t rope_index, int type) {\n"
     "    int lane = lane_index();\n"
     "    store_codes(record + 16 * lane, code);\n"
     "    if (lane % 8 == 0) {\n"
     "        ((float*)(record + KMLA_PACKED_SCALE_OFFSET))[lane / 8] = scale;\n"
     "    }\n"
     "    store_bf16(record + KMLA_PACKED_ROPE_OFFSET + 4 * lane, rope, rope_index + 2 * lane, type, 2);\n"
     "}\n"
     "\n"
     "KMLA_KERNEL(kmla_write_kv, kmla_i_kv_write_args, KMLA_I_SUPPORT_THREADS, 4) {\n"
     "    int token = block_x() * (KMLA_I_SUPPORT_THREADS / 32) + warp_index();\n"
     "    if (token >= args.tokens) {\n"
     "        return;\n"
     "    }\n"
     "    int64_t slot = ((const int64_t*)args.slots)[token];\n"
     "    if (slot < 0 || (uint64_t)slot >= args.kv_slots) {\n"
     "        return;\n"
     "    }\n"
     "    int record_bytes = args.kv_format == KMLA_KV_PACKED \? KMLA_PACKED_BYTES\n"
     "                       : args.kv_format == KMLA_KV_E4M3 \? KMLA_E4M3_BYTES\n"
    },
    {"writers.cuh", 97,
     "                                                        : KMLA_BF16_BYTES;\n"
     "    uint8_t* record = (uint8_t*)args.kv + slot / args.page_tokens * args.page_pitch +\n"
     "                      slot % args.page_tokens * record_bytes;\n"
     "    int64_t latent = token * args.latent_stride, rope = token * args.rope_stride;\n"
     "    if (args.kv_format == KMLA_KV_E4M3) {\n"
     "        write_e4m3(record, args.latent, latent, args.rope, rope, args.source_type, args.kv_scale);\n"
     "    } else if (args.kv_format == KMLA_KV_BF16) {\n"
     "        write_bf16(record, args.latent, latent, args.rope, rope, args.source_type);\n"
     "    } else {\n"
     "        float x[16];\n"
     "        uint32_t code[16];\n"
     "        load_numbers_16(args.latent, latent + 16 * lane_index(), args.source_type, x);\n"
     "        const float smallest_normal = bits_float(0x00800000u);\n"
     "        float scale = maximum(divide(group_amax(x), 448.0f), smallest_normal);\n"
     "        if (args.power_of_two) {\n"
     "            scale = round_up_to_power_of_two(scale);\n"
     "        }\n"
     "        for (int i = 0; i < 16; i++) {\n"
     "            code[i] = float_to_e4m3(divide(x[i], scale));\n"
     "        }\n"
     "        write_packed(record, code, scale, args.rope, rope, args.source_type);\n"
     "    }\n"
     "}\n"
     "\n"
     "KMLA_KERNEL(kmla_write_query, kmla_i_query_write_args, KMLA_I_SUPPORT_THREADS, 4) {\n"
     "    int vector = block_x() * (KMLA_I_SUPPORT_THREADS / 32) + warp_index();\n"
     "    if (vector >= args.rows * args.heads) {\n"
     "        return;\n"
     "    }\n"
     "    int row = vector / args.heads, head = vector % args.heads;\n"
     "    uint8_t* record =\n"
     "        (uint8_t*)args.query + row * args.query_row_stride + head * args.query_head_stride;\n"
     "    int64_t latent = row * args.source_row_stride + head * args.source_head_stride;\n"
     "    int64_t rope = latent + KMLA_LATENT_DIMS;\n"
     "    if (args.query_format == KMLA_QUERY_E4M3) {\n"
     "        write_e4m3(record, args.source, latent, args.source, rope, args.source_type,\n"
     "                   args.query_scale);\n"
     "    } else if (args.query_format == KMLA_QUERY_BF16) {\n"
     "        write_bf16(record, args.source, latent, args.source, rope, args.source_type);\n"
     "    } else {\n"
     "        float x[16];\n"
     "        uint32_t code[16];\n"
     "        load_numbers_16(args.source, latent + 16 * lane_index(), args.source_type, x);\n"
     "        float scale = packed_query_scale(group_amax(x));\n"
     "        float inverse = power_of_two_inverse(scale);\n"
     "        for (int i = 0; i < 16; i++) {\n"
     "            code[i] = float_to_e4m3(multiply(x[i], inverse));\n"
     "        }\n"
     "        write_packed(record, code, scale, args.source, rope, args.source_type);\n"
     "    }\n"
     "}\n"
     "\n"
     "#endif\n"
    },
};
#endif
#define KMLA_I_DEVICE_PARTS_HASH 0xC7730A0C68E6E3BBull
// clang-format on
// >>device source end

#ifndef KIMI_MLA_NO_NVRTC
static size_t kmla_i_device_part_list(const kmla_i_device_part** parts) {
    *parts = kmla_i_device_parts;
    return sizeof kmla_i_device_parts / sizeof kmla_i_device_parts[0];
}
#endif

static uint64_t kmla_i_device_parts_hash(void) { return KMLA_I_DEVICE_PARTS_HASH; }

#endif // KIMI_MLA_NO_GPU

#endif // KIMI_MLA_IMPLEMENTATION

// =============================================================================
// Revisions
// =============================================================================
//
//     0.1.0  2026-12  portable reader (sm_80 to sm_121), Hopper reader (sm_90a), merge, combine,
//                     writers, host reader, images that load without NVRTC, cache of images
//
// =============================================================================
// Licence
// =============================================================================
//
// MIT License
//
// Copyright (c) 2026 the kimi_mla.h authors
//
// Permission is hereby granted, free of charge, to any person obtaining a copy of this software
// and associated documentation files (the "Software"), to deal in the Software without
// restriction, including without limitation the rights to use, copy, modify, merge, publish,
// distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
// Software is furnished to do so, subject to the following conditions:
//
// The above copyright notice and this permission notice shall be included in all copies or
// substantial portions of the Software.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING
// BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
// NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
// DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
// OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
