//! kimi_mla.h from Rust: structs, constants and functions under the header's names, declared by
//! hand. The header's comments say what they are; tests/abi.rs holds all of it against the header.

#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_void};

/// Declares constants and a list of them.
macro_rules! constants {
    ($($name:ident = $value:expr;)*) => {
        $(pub const $name: i64 = $value;)*
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $value)),*];
    };
}

/// Declares structs as C lays them out, each with the lines by which a test compares it.
macro_rules! structs {
    ($(struct $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type,)* }

            impl Default for $name {
                /// All zero, which the header takes as "default".
                fn default() -> Self {
                    // Integers, floats, arrays, raw pointers and Option of functions: 0 is of all.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*

        /// "struct NAME size alignment" and "field NAME.FIELD offset size".
        pub fn layout_lines() -> Vec<String> {
            let mut lines = Vec::new();
            $(
                lines.push(format!("struct {} {} {}", stringify!($name),
                    std::mem::size_of::<$name>(), std::mem::align_of::<$name>()));
                let it = $name::default();
                let start = std::ptr::addr_of!(it) as usize;
                $(
                    lines.push(format!("field {}.{} {} {}", stringify!($name), stringify!($field),
                        std::ptr::addr_of!(it.$field) as usize - start,
                        std::mem::size_of::<$type>()));
                )*
            )*
            lines
        }

        pub fn field_type_lines() -> Vec<String> {
            vec![$($(format!("field {}.{} {}", stringify!($name), stringify!($field),
                stringify!($type)),)*)*]
        }
    };
}

/// Declares functions and the lines by which a test compares their types.
macro_rules! functions {
    ($(fn $name:ident($($parameter:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        extern "C" { $(pub fn $name($($parameter: $type),*) $(-> $result)?;)* }

        pub fn function_type_lines() -> Vec<String> {
            vec![$(format!("function {}({}){}", stringify!($name),
                [$(stringify!($type)),*].join(", "),
                concat!("", $(" -> ", stringify!($result))?))),*]
        }
    };
}

pub type kmla_task = Option<unsafe extern "C" fn(task_data: *mut c_void, index: u32)>;
pub type kmla_run = Option<
    unsafe extern "C" fn(user: *mut c_void, count: u32, task: kmla_task, task_data: *mut c_void),
>;
pub type kmla_log_write = Option<unsafe extern "C" fn(user: *mut c_void, text: *const c_char)>;

/// Opaque.
#[repr(C)]
pub struct kmla_gpu {
    nothing: [u8; 0],
}

constants! {
    KMLA_VERSION_MAJOR = 0;
    KMLA_VERSION_MINOR = 1;
    KMLA_VERSION_PATCH = 0;
    KMLA_VERSION = 100;
    KMLA_LATENT_DIMS = 512;
    KMLA_ROPE_DIMS = 64;
    KMLA_QUERY_DIMS = 576;
    KMLA_GROUP_DIMS = 128;
    KMLA_CHUNK_TOKENS = 64;
    KMLA_PACKED_BYTES = 656;
    KMLA_PACKED_SCALE_OFFSET = 512;
    KMLA_PACKED_ROPE_OFFSET = 528;
    KMLA_E4M3_BYTES = 576;
    KMLA_BF16_BYTES = 1152;
    KMLA_KV_PACKED = 0;
    KMLA_KV_E4M3 = 1;
    KMLA_KV_BF16 = 2;
    KMLA_QUERY_BF16 = 0;
    KMLA_QUERY_PACKED = 1;
    KMLA_QUERY_E4M3 = 2;
    KMLA_BF16 = 0;
    KMLA_FP32 = 1;
    KMLA_MAX_HEADS = 4096;
    KMLA_MAX_ROWS = 65535;
    KMLA_MAX_SPLITS = 1024;
    KMLA_MAX_CAPACITY_TOKENS = 67108864;
    KMLA_MODE_EXACT = 0;
    KMLA_MODE_E4M3_QUERY = 1;
    KMLA_PAD_TILE = 0;
    KMLA_PAD_EIGHT = 1;
    KMLA_LENGTHS_PER_ROW = 0;
    KMLA_LENGTHS_PER_REQUEST = 1;
    KMLA_ROWS_CAUSAL = 0;
    KMLA_ROWS_DRAFT = 1;
    KMLA_SPLIT_STATIC = 0;
    KMLA_SPLIT_BALANCED = 1;
    KMLA_READER_HOST = 0;
    KMLA_READER_PORTABLE = 1;
    KMLA_READER_HOPPER = 2;
    KMLA_CHOSEN_BY_CALLER = 0;
    KMLA_CHOSEN_BY_PLANNER = 1;
    KMLA_SCALE_EXACT = 0;
    KMLA_SCALE_POWER_OF_TWO = 1;
    KMLA_OK = 0;
    KMLA_ERROR_ARGUMENT = 1;
    KMLA_ERROR_OVERFLOW = 2;
    KMLA_ERROR_WORKSPACE = 3;
    KMLA_ERROR_PAGE = 4;
    KMLA_ERROR_UNSUPPORTED = 5;
    KMLA_ERROR_LIBRARY = 6;
    KMLA_ERROR_SYMBOL = 7;
    KMLA_ERROR_ARCHITECTURE = 8;
    KMLA_ERROR_COMPILE = 9;
    KMLA_ERROR_CUDA = 10;
    KMLA_ERROR_CONTEXT = 11;
    KMLA_ERROR_NOT_PREPARED = 12;
    KMLA_ERROR_CAPTURE = 13;
    KMLA_ERROR_MEMORY = 14;
}

structs! {
    struct kmla_error {
        status: i32, cuda_result: i32, nvrtc_result: i32, driver_version: i32, nvrtc_version: i32,
        library: [c_char; 256], message: [c_char; 768],
    }
    struct kmla_heads_desc {
        local_heads: i32, dcp_ranks: i32, kv_format: i32, padding: i32,
    }
    struct kmla_heads {
        effective: i32, tile: i32, padded: i32, tiles: i32, launches: i32,
    }
    struct kmla_dcp {
        ranks: i32, rank: i32, interleave: i32,
    }
    struct kmla_length_rule {
        lengths_kind: i32, rows_kind: i32, window_tokens: i32, dcp: kmla_dcp,
    }
    struct kmla_device {
        compute_major: i32, compute_minor: i32, multiprocessors: i32, shared_bytes: i32,
        shared_bytes_sm: i32,
    }
    struct kmla_shape {
        requests: i32, rows: i32, rows_per_request: i32, heads: i32, kv_format: i32,
        query_format: i32, mode: i32, page_tokens: i32, capacity_tokens: i64, split_mode: i32,
        splits: i32, single_split_chunks: i32, partial_type: i32, tile: i32, ragged: i32,
        slot_list: i32, lengths: kmla_length_rule, reader: i32,
    }
    struct kmla_plan {
        version: i32, reader: i32, shape: kmla_shape, device: kmla_device, tile: i32,
        tiles_per_request: i32, groups: i32, splits: i32, splits_chosen_by: i32, chunks: i32,
        chunks_per_split: i32, threads: i32, resident: i32, stages: i32, shared_bytes: i32,
        launches: i32, workspace_bytes: u64, reason: [c_char; 192],
    }
    struct kmla_decode {
        query: u64, query_row_stride_bytes: i64, query_head_stride_bytes: i64, query_scale: f32,
        scale: f32, kv_scale: f32, check_pages: i32, kv: u64, kv_pages: u64, page_pitch_bytes: u64,
        block_table: u64, block_table_width: i64, block_table_stride: i64, slot_list: u64,
        slot_list_width: i64, slot_list_stride: i64, row_offsets: u64, lengths: u64, out: u64,
        out_row_stride: i64, out_head_stride: i64, out_type: i32, lse_unused_: i32, lse: u64,
        lse_row_stride: i64, lse_head_stride: i64, workspace: u64, workspace_bytes: u64,
    }
    struct kmla_combine {
        parts: i32, rows: i32, heads: i32, part_type: i32, part_out: u64, part_out_stride: i64,
        part_row_stride: i64, part_head_stride: i64, part_lse: u64, part_lse_stride: i64,
        part_lse_row_stride: i64, part_lse_head_stride: i64, out: u64, out_row_stride: i64,
        out_head_stride: i64, out_type: i32, unused_: i32, lse: u64, lse_row_stride: i64,
        lse_head_stride: i64,
    }
    struct kmla_kv_write {
        tokens: i32, kv_format: i32, source_type: i32, scale_rule: i32, kv_scale: f32,
        page_tokens: i32, latent: u64, latent_stride: i64, rope: u64, rope_stride: i64, slots: u64,
        kv: u64, kv_pages: u64, page_pitch_bytes: u64,
    }
    struct kmla_query_write {
        rows: i32, heads: i32, query_format: i32, source_type: i32, query_scale: f32, unused_: i32,
        source: u64, source_row_stride: i64, source_head_stride: i64, query: u64,
        query_row_stride_bytes: i64, query_head_stride_bytes: i64,
    }
    struct kmla_parallel {
        run: kmla_run, user: *mut c_void,
    }
    struct kmla_gpu_desc {
        cuda_handle: *mut c_void, cuda_path: *const c_char, nvrtc_handle: *mut c_void,
        nvrtc_path: *const c_char, without_nvrtc: i32, without_cuda: i32,
    }
    struct kmla_image {
        data: *mut c_void, bytes: usize, variant: i32, compute_major: i32, compute_minor: i32,
        borrowed: i32,
    }
    struct kmla_log {
        write: kmla_log_write, user: *mut c_void,
    }
}

functions! {
    fn kmla_status_name(status: i32) -> *const c_char;
    fn kmla_status_text(status: i32) -> *const c_char;
    fn kmla_kv_record_bytes(kv_format: i32) -> usize;
    fn kmla_query_record_bytes(query_format: i32) -> usize;
    fn kmla_e4m3_to_float(code: u8) -> f32;
    fn kmla_float_to_e4m3(value: f32) -> u8;
    fn kmla_bf16_to_float(bits: u16) -> f32;
    fn kmla_float_to_bf16(value: f32) -> u16;
    fn kmla_plan_heads(desc: *const kmla_heads_desc, out: *mut kmla_heads,
        error: *mut kmla_error) -> i32;
    fn kmla_local_length(dcp: *const kmla_dcp, global_tokens: i64, local_tokens: *mut i64,
        error: *mut kmla_error) -> i32;
    fn kmla_token_owner(dcp: *const kmla_dcp, global_token: i64, rank: *mut i32,
        local_token: *mut i64, error: *mut kmla_error) -> i32;
    fn kmla_shard_capacity(dcp: *const kmla_dcp, context_tokens: i64, shard_tokens: *mut i64,
        error: *mut kmla_error) -> i32;
    fn kmla_row_ranges(rule: *const kmla_length_rule, length: i64, rows: i32, begins: *mut i64,
        ends: *mut i64, error: *mut kmla_error) -> i32;
    fn kmla_split_range(split_mode: i32, splits: i32, split: i32, capacity_tokens: i64,
        single_split_chunks: i32, begin: i64, end: i64, part_begin: *mut i64, part_end: *mut i64,
        error: *mut kmla_error) -> i32;
    fn kmla_workspace_bytes(rows: i32, heads: i32, splits: i32, partial_type: i32, bytes: *mut u64,
        error: *mut kmla_error) -> i32;
    fn kmla_plan_decode(shape: *const kmla_shape, device: *const kmla_device, plan: *mut kmla_plan,
        error: *mut kmla_error) -> i32;
    fn kmla_check_decode(plan: *const kmla_plan, args: *const kmla_decode,
        error: *mut kmla_error) -> i32;
    fn kmla_check_combine(args: *const kmla_combine, error: *mut kmla_error) -> i32;
    fn kmla_check_kv_write(args: *const kmla_kv_write, error: *mut kmla_error) -> i32;
    fn kmla_check_query_write(args: *const kmla_query_write, error: *mut kmla_error) -> i32;
    fn kmla_check_pages(plan: *const kmla_plan, args: *const kmla_decode, table: *const i32,
        lengths: *const i32, row_offsets: *const i32, error: *mut kmla_error) -> i32;
    fn kmla_host_decode(plan: *const kmla_plan, args: *const kmla_decode,
        parallel: *const kmla_parallel, error: *mut kmla_error) -> i32;
    fn kmla_host_combine(args: *const kmla_combine, error: *mut kmla_error) -> i32;
    fn kmla_host_write_kv(args: *const kmla_kv_write, error: *mut kmla_error) -> i32;
    fn kmla_host_write_query(args: *const kmla_query_write, error: *mut kmla_error) -> i32;
    fn kmla_gpu_open(desc: *const kmla_gpu_desc, gpu: *mut *mut kmla_gpu,
        error: *mut kmla_error) -> i32;
    fn kmla_gpu_device(gpu: *mut kmla_gpu, device: *mut kmla_device,
        error: *mut kmla_error) -> i32;
    fn kmla_gpu_compile(gpu: *mut kmla_gpu, plan: *const kmla_plan, device: *const kmla_device,
        log: *const kmla_log, image: *mut kmla_image, error: *mut kmla_error) -> i32;
    fn kmla_image_open(data: *const c_void, bytes: usize, image: *mut kmla_image,
        error: *mut kmla_error) -> i32;
    fn kmla_image_free(image: *mut kmla_image);
    fn kmla_gpu_prepare(gpu: *mut kmla_gpu, plan: *const kmla_plan, image: *const kmla_image,
        error: *mut kmla_error) -> i32;
    fn kmla_gpu_decode(gpu: *mut kmla_gpu, plan: *const kmla_plan, args: *const kmla_decode,
        stream: *mut c_void, error: *mut kmla_error) -> i32;
    fn kmla_gpu_combine(gpu: *mut kmla_gpu, args: *const kmla_combine, stream: *mut c_void,
        error: *mut kmla_error) -> i32;
    fn kmla_gpu_write_kv(gpu: *mut kmla_gpu, args: *const kmla_kv_write, stream: *mut c_void,
        error: *mut kmla_error) -> i32;
    fn kmla_gpu_write_query(gpu: *mut kmla_gpu, args: *const kmla_query_write, stream: *mut c_void,
        error: *mut kmla_error) -> i32;
    fn kmla_gpu_close(gpu: *mut kmla_gpu);
    fn kmla_plan_variant(plan: *const kmla_plan) -> i32;
    fn kmla_device_source(text: *mut c_char, bytes: *mut usize, error: *mut kmla_error) -> i32;
}
