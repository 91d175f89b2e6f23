"""kimi_mla.h from Python, by ctypes: build a shared library of the header and load it.

    gcc -shared -fPIC -O2 -DKIMI_MLA_IMPLEMENTATION -x c kimi_mla.h -o libkimi_mla.so -lm -ldl

    library = kimi_mla.load("./libkimi_mla.so")
    plan, error = kimi_mla.kmla_plan(), kimi_mla.kmla_error()
    shape = kimi_mla.kmla_shape(requests=1, heads=99, capacity_tokens=16384)
    status = library.kmla_plan_decode(shape, None, plan, error)

Structs, constants and functions have the header's names; its comments say what they are.
test_kimi_mla.py holds every size, offset, type and value against the header.
"""

from ctypes import (CDLL, CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_float, c_int32,
                    c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p)

i32, i64, u8, u16, u32, u64, f32, size = (c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64,
                                          c_float, c_size_t)

# ---- constants

KMLA_VERSION_MAJOR = 0
KMLA_VERSION_MINOR = 1
KMLA_VERSION_PATCH = 0
KMLA_VERSION = 100
KMLA_LATENT_DIMS = 512
KMLA_ROPE_DIMS = 64
KMLA_QUERY_DIMS = 576
KMLA_GROUP_DIMS = 128
KMLA_CHUNK_TOKENS = 64
KMLA_PACKED_BYTES = 656
KMLA_PACKED_SCALE_OFFSET = 512
KMLA_PACKED_ROPE_OFFSET = 528
KMLA_E4M3_BYTES = 576
KMLA_BF16_BYTES = 1152
KMLA_KV_PACKED = 0
KMLA_KV_E4M3 = 1
KMLA_KV_BF16 = 2
KMLA_QUERY_BF16 = 0
KMLA_QUERY_PACKED = 1
KMLA_QUERY_E4M3 = 2
KMLA_BF16 = 0
KMLA_FP32 = 1
KMLA_MAX_HEADS = 4096
KMLA_MAX_ROWS = 65535
KMLA_MAX_SPLITS = 1024
KMLA_MAX_CAPACITY_TOKENS = 67108864
KMLA_MODE_EXACT = 0
KMLA_MODE_E4M3_QUERY = 1
KMLA_PAD_TILE = 0
KMLA_PAD_EIGHT = 1
KMLA_LENGTHS_PER_ROW = 0
KMLA_LENGTHS_PER_REQUEST = 1
KMLA_ROWS_CAUSAL = 0
KMLA_ROWS_DRAFT = 1
KMLA_SPLIT_STATIC = 0
KMLA_SPLIT_BALANCED = 1
KMLA_READER_HOST = 0
KMLA_READER_PORTABLE = 1
KMLA_READER_HOPPER = 2
KMLA_CHOSEN_BY_CALLER = 0
KMLA_CHOSEN_BY_PLANNER = 1
KMLA_SCALE_EXACT = 0
KMLA_SCALE_POWER_OF_TWO = 1
KMLA_OK = 0
KMLA_ERROR_ARGUMENT = 1
KMLA_ERROR_OVERFLOW = 2
KMLA_ERROR_WORKSPACE = 3
KMLA_ERROR_PAGE = 4
KMLA_ERROR_UNSUPPORTED = 5
KMLA_ERROR_LIBRARY = 6
KMLA_ERROR_SYMBOL = 7
KMLA_ERROR_ARCHITECTURE = 8
KMLA_ERROR_COMPILE = 9
KMLA_ERROR_CUDA = 10
KMLA_ERROR_CONTEXT = 11
KMLA_ERROR_NOT_PREPARED = 12
KMLA_ERROR_CAPTURE = 13
KMLA_ERROR_MEMORY = 14

# ---- callbacks

kmla_task = CFUNCTYPE(None, c_void_p, u32)
kmla_run = CFUNCTYPE(None, c_void_p, u32, kmla_task, c_void_p)
kmla_log_write = CFUNCTYPE(None, c_void_p, c_char_p)

# ---- structs


class kmla_gpu(Structure):
    """Opaque."""


class kmla_error(Structure):
    _fields_ = [
        ("status", i32), ("cuda_result", i32), ("nvrtc_result", i32), ("driver_version", i32),
        ("nvrtc_version", i32), ("library", c_char * 256), ("message", c_char * 768),
    ]


class kmla_heads_desc(Structure):
    _fields_ = [
        ("local_heads", i32), ("dcp_ranks", i32), ("kv_format", i32), ("padding", i32),
    ]


class kmla_heads(Structure):
    _fields_ = [
        ("effective", i32), ("tile", i32), ("padded", i32), ("tiles", i32), ("launches", i32),
    ]


class kmla_dcp(Structure):
    _fields_ = [
        ("ranks", i32), ("rank", i32), ("interleave", i32),
    ]


class kmla_length_rule(Structure):
    _fields_ = [
        ("lengths_kind", i32), ("rows_kind", i32), ("window_tokens", i32), ("dcp", kmla_dcp),
    ]


class kmla_device(Structure):
    _fields_ = [
        ("compute_major", i32), ("compute_minor", i32), ("multiprocessors", i32),
        ("shared_bytes", i32), ("shared_bytes_sm", i32),
    ]


class kmla_shape(Structure):
    _fields_ = [
        ("requests", i32), ("rows", i32), ("rows_per_request", i32), ("heads", i32),
        ("kv_format", i32), ("query_format", i32), ("mode", i32), ("page_tokens", i32),
        ("capacity_tokens", i64), ("split_mode", i32), ("splits", i32),
        ("single_split_chunks", i32), ("partial_type", i32), ("tile", i32), ("ragged", i32),
        ("slot_list", i32), ("lengths", kmla_length_rule), ("reader", i32),
    ]


class kmla_plan(Structure):
    _fields_ = [
        ("version", i32), ("reader", i32), ("shape", kmla_shape), ("device", kmla_device),
        ("tile", i32), ("tiles_per_request", i32), ("groups", i32), ("splits", i32),
        ("splits_chosen_by", i32), ("chunks", i32), ("chunks_per_split", i32), ("threads", i32),
        ("resident", i32), ("stages", i32), ("shared_bytes", i32), ("launches", i32),
        ("workspace_bytes", u64), ("reason", c_char * 192),
    ]


class kmla_decode(Structure):
    _fields_ = [
        ("query", u64), ("query_row_stride_bytes", i64), ("query_head_stride_bytes", i64),
        ("query_scale", f32), ("scale", f32), ("kv_scale", f32), ("check_pages", i32), ("kv", u64),
        ("kv_pages", u64), ("page_pitch_bytes", u64), ("block_table", u64),
        ("block_table_width", i64), ("block_table_stride", i64), ("slot_list", u64),
        ("slot_list_width", i64), ("slot_list_stride", i64), ("row_offsets", u64),
        ("lengths", u64), ("out", u64), ("out_row_stride", i64), ("out_head_stride", i64),
        ("out_type", i32), ("lse_unused_", i32), ("lse", u64), ("lse_row_stride", i64),
        ("lse_head_stride", i64), ("workspace", u64), ("workspace_bytes", u64),
    ]


class kmla_combine(Structure):
    _fields_ = [
        ("parts", i32), ("rows", i32), ("heads", i32), ("part_type", i32), ("part_out", u64),
        ("part_out_stride", i64), ("part_row_stride", i64), ("part_head_stride", i64),
        ("part_lse", u64), ("part_lse_stride", i64), ("part_lse_row_stride", i64),
        ("part_lse_head_stride", i64), ("out", u64), ("out_row_stride", i64),
        ("out_head_stride", i64), ("out_type", i32), ("unused_", i32), ("lse", u64),
        ("lse_row_stride", i64), ("lse_head_stride", i64),
    ]


class kmla_kv_write(Structure):
    _fields_ = [
        ("tokens", i32), ("kv_format", i32), ("source_type", i32), ("scale_rule", i32),
        ("kv_scale", f32), ("page_tokens", i32), ("latent", u64), ("latent_stride", i64),
        ("rope", u64), ("rope_stride", i64), ("slots", u64), ("kv", u64), ("kv_pages", u64),
        ("page_pitch_bytes", u64),
    ]


class kmla_query_write(Structure):
    _fields_ = [
        ("rows", i32), ("heads", i32), ("query_format", i32), ("source_type", i32),
        ("query_scale", f32), ("unused_", i32), ("source", u64), ("source_row_stride", i64),
        ("source_head_stride", i64), ("query", u64), ("query_row_stride_bytes", i64),
        ("query_head_stride_bytes", i64),
    ]


class kmla_parallel(Structure):
    _fields_ = [
        ("run", kmla_run), ("user", c_void_p),
    ]


class kmla_gpu_desc(Structure):
    _fields_ = [
        ("cuda_handle", c_void_p), ("cuda_path", c_char_p), ("nvrtc_handle", c_void_p),
        ("nvrtc_path", c_char_p), ("without_nvrtc", i32), ("without_cuda", i32),
    ]


class kmla_image(Structure):
    _fields_ = [
        ("data", c_void_p), ("bytes", size), ("variant", i32), ("compute_major", i32),
        ("compute_minor", i32), ("borrowed", i32),
    ]


class kmla_log(Structure):
    _fields_ = [
        ("write", kmla_log_write), ("user", c_void_p),
    ]


# ---- functions: result, parameters

FUNCTIONS = {
    "kmla_status_name": (c_char_p, [i32]),
    "kmla_status_text": (c_char_p, [i32]),
    "kmla_kv_record_bytes": (size, [i32]),
    "kmla_query_record_bytes": (size, [i32]),
    "kmla_e4m3_to_float": (f32, [u8]),
    "kmla_float_to_e4m3": (u8, [f32]),
    "kmla_bf16_to_float": (f32, [u16]),
    "kmla_float_to_bf16": (u16, [f32]),
    "kmla_plan_heads": (i32, [POINTER(kmla_heads_desc), POINTER(kmla_heads), POINTER(kmla_error)]),
    "kmla_local_length": (i32, [POINTER(kmla_dcp), i64, POINTER(i64), POINTER(kmla_error)]),
    "kmla_token_owner": (i32, [POINTER(kmla_dcp), i64, POINTER(i32), POINTER(i64),
                               POINTER(kmla_error)]),
    "kmla_shard_capacity": (i32, [POINTER(kmla_dcp), i64, POINTER(i64), POINTER(kmla_error)]),
    "kmla_row_ranges": (i32, [POINTER(kmla_length_rule), i64, i32, POINTER(i64), POINTER(i64),
                              POINTER(kmla_error)]),
    "kmla_split_range": (i32, [i32, i32, i32, i64, i32, i64, i64, POINTER(i64), POINTER(i64),
                               POINTER(kmla_error)]),
    "kmla_workspace_bytes": (i32, [i32, i32, i32, i32, POINTER(u64), POINTER(kmla_error)]),
    "kmla_plan_decode": (i32, [POINTER(kmla_shape), POINTER(kmla_device), POINTER(kmla_plan),
                               POINTER(kmla_error)]),
    "kmla_check_decode": (i32, [POINTER(kmla_plan), POINTER(kmla_decode), POINTER(kmla_error)]),
    "kmla_check_combine": (i32, [POINTER(kmla_combine), POINTER(kmla_error)]),
    "kmla_check_kv_write": (i32, [POINTER(kmla_kv_write), POINTER(kmla_error)]),
    "kmla_check_query_write": (i32, [POINTER(kmla_query_write), POINTER(kmla_error)]),
    "kmla_check_pages": (i32, [POINTER(kmla_plan), POINTER(kmla_decode), POINTER(i32),
                               POINTER(i32), POINTER(i32), POINTER(kmla_error)]),
    "kmla_host_decode": (i32, [POINTER(kmla_plan), POINTER(kmla_decode), POINTER(kmla_parallel),
                               POINTER(kmla_error)]),
    "kmla_host_combine": (i32, [POINTER(kmla_combine), POINTER(kmla_error)]),
    "kmla_host_write_kv": (i32, [POINTER(kmla_kv_write), POINTER(kmla_error)]),
    "kmla_host_write_query": (i32, [POINTER(kmla_query_write), POINTER(kmla_error)]),
    "kmla_gpu_open": (i32, [POINTER(kmla_gpu_desc), POINTER(POINTER(kmla_gpu)),
                            POINTER(kmla_error)]),
    "kmla_gpu_device": (i32, [POINTER(kmla_gpu), POINTER(kmla_device), POINTER(kmla_error)]),
    "kmla_gpu_compile": (i32, [POINTER(kmla_gpu), POINTER(kmla_plan), POINTER(kmla_device),
                               POINTER(kmla_log), POINTER(kmla_image), POINTER(kmla_error)]),
    "kmla_image_open": (i32, [c_void_p, size, POINTER(kmla_image), POINTER(kmla_error)]),
    "kmla_image_free": (None, [POINTER(kmla_image)]),
    "kmla_gpu_prepare": (i32, [POINTER(kmla_gpu), POINTER(kmla_plan), POINTER(kmla_image),
                               POINTER(kmla_error)]),
    "kmla_gpu_decode": (i32, [POINTER(kmla_gpu), POINTER(kmla_plan), POINTER(kmla_decode),
                              c_void_p, POINTER(kmla_error)]),
    "kmla_gpu_combine": (i32, [POINTER(kmla_gpu), POINTER(kmla_combine), c_void_p,
                               POINTER(kmla_error)]),
    "kmla_gpu_write_kv": (i32, [POINTER(kmla_gpu), POINTER(kmla_kv_write), c_void_p,
                                POINTER(kmla_error)]),
    "kmla_gpu_write_query": (i32, [POINTER(kmla_gpu), POINTER(kmla_query_write), c_void_p,
                                   POINTER(kmla_error)]),
    "kmla_gpu_close": (None, [POINTER(kmla_gpu)]),
    "kmla_plan_variant": (i32, [POINTER(kmla_plan)]),
    "kmla_device_source": (i32, [c_char_p, POINTER(size), POINTER(kmla_error)]),
}


def load(path):
    """The library with every function's types set."""
    library = CDLL(path)
    for name, (result, parameters) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library
