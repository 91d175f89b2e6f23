//! The declarations against the header, and the functions that plan and decode on the host, called.
//!
//! KMLA_LAYOUT and KMLA_TYPES name files that declarations.py made of the header.

use kimi_mla::*;
use std::{collections::BTreeSet, env, ffi::CStr, fs, os::raw::c_void, ptr};

/// Names of callbacks' types, which the header has none for.
const CALLBACKS: &[&str] = &["kmla_run", "kmla_log_write", "kmla_cache_load", "kmla_cache_store"];

/// A line without blanks, and with callbacks as the header's list has them.
fn normal(line: &str) -> String {
    let line = CALLBACKS.iter().fold(line.to_string(), |line, name| {
        line.replace(&format!(" {name}"), " function pointer")
    });
    line.replace(char::is_whitespace, "")
}

fn of_header(variable: &str) -> BTreeSet<String> {
    let file = env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set"));
    fs::read_to_string(file).unwrap().lines().map(normal).collect()
}

fn assert_same(of_header: BTreeSet<String>, of_rust: Vec<String>) {
    let of_rust: BTreeSet<String> = of_rust.iter().map(|line| normal(line)).collect();
    let missing: Vec<_> = of_header.difference(&of_rust).collect();
    let wrong: Vec<_> = of_rust.difference(&of_header).collect();
    assert!(missing.is_empty() && wrong.is_empty(),
        "only in the header: {missing:#?}\nonly in Rust: {wrong:#?}");
    assert!(of_rust.len() > 50);
}

#[test]
fn layout_and_constants_are_the_headers() {
    let mut lines = layout_lines();
    lines.extend(CONSTANTS.iter().map(|(name, value)| format!("constant {name} {value}")));
    assert_same(of_header("KMLA_LAYOUT"), lines);
}

#[test]
fn types_are_the_headers() {
    let mut lines = field_type_lines();
    lines.extend(function_type_lines());
    assert_same(of_header("KMLA_TYPES"), lines);
}

fn message(error: &kmla_error) -> String {
    unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_string_lossy().into_owned()
}

fn fine(status: i32, error: &kmla_error) {
    assert_eq!(i64::from(status), KMLA_OK, "{}", message(error));
}

#[test]
fn heads_and_lengths() {
    let mut error = kmla_error::default();
    let desc = kmla_heads_desc { local_heads: 11, dcp_ranks: 9, ..Default::default() };
    let mut heads = kmla_heads::default();
    fine(unsafe { kmla_plan_heads(&desc, &mut heads, &mut error) }, &error);
    assert_eq!((heads.effective, heads.padded, heads.tiles, heads.launches), (99, 112, 7, 1));

    let mut locals = [0i64; 9];
    for (rank, local) in locals.iter_mut().enumerate() {
        let dcp = kmla_dcp { ranks: 9, rank: rank as i32, interleave: 64 };
        fine(unsafe { kmla_local_length(&dcp, 131_072, local, &mut error) }, &error);
    }
    assert_eq!(locals, [14592, 14592, 14592, 14592, 14592, 14528, 14528, 14528, 14528]);

    let rule = kmla_length_rule { lengths_kind: KMLA_LENGTHS_PER_REQUEST as i32,
        ..Default::default() };
    let (mut begins, mut ends) = ([-1i64; 3], [-1i64; 3]);
    let status = unsafe {
        kmla_row_ranges(&rule, 10, 3, begins.as_mut_ptr(), ends.as_mut_ptr(), &mut error)
    };
    fine(status, &error);
    assert_eq!((begins, ends), ([0, 0, 0], [8, 9, 10]));

    let mut bytes = 0u64;
    let partial_type = KMLA_FP32 as i32;
    let status = unsafe {
        kmla_workspace_bytes(4, 112, 16, partial_type, &mut bytes, &mut error)
    };
    fine(status, &error);
    assert_eq!(bytes, 14_708_736);
}

#[test]
fn errors_name_the_argument() {
    let mut error = kmla_error::default();
    let shape = kmla_shape { requests: 1, heads: 0, capacity_tokens: 64, ..Default::default() };
    let mut plan = kmla_plan::default();
    let status = unsafe { kmla_plan_decode(&shape, ptr::null(), &mut plan, &mut error) };
    assert_eq!(i64::from(status), KMLA_ERROR_ARGUMENT);
    assert!(message(&error).contains("shape.heads"), "{}", message(&error));
    let name = unsafe { CStr::from_ptr(kmla_status_name(status)) };
    assert_eq!(name.to_str().unwrap(), "KMLA_ERROR_ARGUMENT");
}

#[repr(align(16))]
struct Aligned<const N: usize>([u8; N]);

unsafe extern "C" fn run_all(user: *mut c_void, count: u32, task: kmla_task, data: *mut c_void) {
    *(user as *mut u32) += 1;
    for index in (0..count).rev() {
        task.unwrap()(data, index);
    }
}

/// Two tokens of E4M3 KV with equal scores: latents 1 and 3 come out as 2, by a callback of ours.
#[test]
fn host_decode_through_a_callback() {
    let mut error = kmla_error::default();
    let shape = kmla_shape { requests: 1, heads: 1, capacity_tokens: 64, page_tokens: 2,
        kv_format: KMLA_KV_E4M3 as i32, ..Default::default() };
    let mut plan = kmla_plan::default();
    fine(unsafe { kmla_plan_decode(&shape, ptr::null(), &mut plan, &mut error) }, &error);
    assert_eq!(i64::from(plan.reader), KMLA_READER_HOST);

    let mut pool = Aligned([0u8; 2 * 576]);
    pool.0[..512].fill(0x38); // 1
    pool.0[576..576 + 512].fill(0x44); // 3
    let query = Aligned([0u8; 1152]);
    let table = [0i32; 32];
    let lengths = [2i32];
    let mut out = Aligned([0xFFu8; 2048]);
    let mut lse = [0f32; 1];
    let mut runs = 0u32;
    let args = kmla_decode { query: query.0.as_ptr() as u64, scale: 0.07216878, kv_scale: 1.0,
        kv: pool.0.as_ptr() as u64, kv_pages: 1, block_table: table.as_ptr() as u64,
        block_table_width: 32, lengths: lengths.as_ptr() as u64, out: out.0.as_mut_ptr() as u64,
        out_type: KMLA_FP32 as i32, lse: lse.as_mut_ptr() as u64, ..Default::default() };
    let parallel = kmla_parallel { run: Some(run_all), user: &mut runs as *mut u32 as *mut c_void };
    fine(unsafe { kmla_host_decode(&plan, &args, &parallel, &mut error) }, &error);
    for value in out.0.chunks(4) {
        assert_eq!(f32::from_ne_bytes(value.try_into().unwrap()), 2.0);
    }
    assert!((lse[0] - 2f32.ln()).abs() < 1e-6);
    assert_eq!(runs, 1);
}
