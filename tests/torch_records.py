#!/usr/bin/env python3
"""Records that another implementation wrote, and a reference that shares nothing with ours.

PyTorch's own float8_e4m3fn cast packs KV and query records; kimi_mla.h reads them through ctypes,
on torch tensors and torch's current stream; a PyTorch fp64 attention judges the output. Also: the
library's writers give the very bytes that PyTorch gave, and a torch.cuda.graph replays to the same
bits as the eager call.

    python3 tests/torch_records.py [--host]

--host takes the host reader and tensors of the CPU. Without PyTorch, or without a GPU and --host,
the script says so and exits with 0. It needs a C compiler.
"""

import ctypes
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))

try:
    import torch
except ImportError:
    print("torch_records: skipped, no PyTorch here")
    sys.exit(0)

HOST = "--host" in sys.argv[1:]
if not HOST and not torch.cuda.is_available():
    print("torch_records: skipped, PyTorch sees no GPU")
    sys.exit(0)
if not hasattr(torch, "float8_e4m3fn"):
    print("torch_records: skipped, this PyTorch has no float8_e4m3fn")
    sys.exit(0)

DEVICE = "cpu" if HOST else "cuda"
SCALE = 0.07216878  # Kimi-K3: 192 ** -0.5
PACKED, E4M3, BF16 = 0, 1, 2  # kv_format
QUERY_BF16, QUERY_PACKED, QUERY_E4M3 = 0, 1, 2
EXACT, E4M3_QUERY = 0, 1
BYTES = {"packed": 656, "e4m3": 576, "bf16": 1152}
KV_NAMES = ["packed", "e4m3", "bf16"]
QUERY_NAMES = ["bf16", "packed", "e4m3"]

# =============================================================================
# The C structs
# =============================================================================

I32, I64, U64, F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float


def struct(name, fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def fields(kind, names):
    return [(name, kind) for name in names.split()]


Error = struct("kmla_error", fields(I32, "status cuda_result nvrtc_result driver_version "
                                         "nvrtc_version")
               + [("library", ctypes.c_char * 256), ("message", ctypes.c_char * 768)])
Dcp = struct("kmla_dcp", fields(I32, "ranks rank interleave"))
LengthRule = struct("kmla_length_rule", fields(I32, "lengths_kind rows_kind window_tokens")
                    + [("dcp", Dcp)])
Device = struct("kmla_device", fields(I32, "compute_major compute_minor multiprocessors "
                                           "shared_bytes shared_bytes_sm"))
Shape = struct("kmla_shape", fields(I32, "requests rows rows_per_request heads kv_format "
                                         "query_format mode page_tokens")
               + [("capacity_tokens", I64)]
               + fields(I32, "split_mode splits single_split_chunks partial_type tile ragged "
                             "slot_list")
               + [("lengths", LengthRule), ("reader", I32)])
Plan = struct("kmla_plan", fields(I32, "version reader") + [("shape", Shape), ("device", Device)]
              + fields(I32, "tile tiles_per_request groups splits splits_chosen_by chunks "
                            "chunks_per_split threads resident stages shared_bytes launches")
              + [("workspace_bytes", U64), ("reason", ctypes.c_char * 192)])
Decode = struct("kmla_decode", [("query", U64)]
                + fields(I64, "query_row_stride_bytes query_head_stride_bytes")
                + fields(F32, "query_scale scale kv_scale") + [("check_pages", I32)]
                + fields(U64, "kv kv_pages page_pitch_bytes block_table")
                + fields(I64, "block_table_width block_table_stride") + [("slot_list", U64)]
                + fields(I64, "slot_list_width slot_list_stride")
                + fields(U64, "row_offsets lengths out")
                + fields(I64, "out_row_stride out_head_stride")
                + fields(I32, "out_type lse_unused_") + [("lse", U64)]
                + fields(I64, "lse_row_stride lse_head_stride")
                + fields(U64, "workspace workspace_bytes"))
KvWrite = struct("kmla_kv_write", fields(I32, "tokens kv_format source_type scale_rule")
                 + [("kv_scale", F32), ("page_tokens", I32), ("latent", U64),
                    ("latent_stride", I64), ("rope", U64), ("rope_stride", I64)]
                 + fields(U64, "slots kv kv_pages page_pitch_bytes"))
QueryWrite = struct("kmla_query_write", fields(I32, "rows heads query_format source_type")
                    + [("query_scale", F32), ("unused_", I32), ("source", U64)]
                    + fields(I64, "source_row_stride source_head_stride") + [("query", U64)]
                    + fields(I64, "query_row_stride_bytes query_head_stride_bytes"))
STRUCTS = [Error, Dcp, LengthRule, Device, Shape, Plan, Decode, KvWrite, QueryWrite]


def layout_source():
    """C that exports what the compiler thinks of every struct: its size, then its offsets."""
    lines = ["#define KIMI_MLA_IMPLEMENTATION", '#include "kimi_mla.h"',
             "const size_t layout_of_structs[] = {"]
    for s in STRUCTS:
        lines.append(f"sizeof({s.__name__}),")
        lines += [f"offsetof({s.__name__}, {name})," for name, _ in s._fields_]
    return "\n".join(lines + ["};", ""])


def load_library():
    with tempfile.TemporaryDirectory(prefix="kimi_mla_") as folder:
        source, library = os.path.join(folder, "library.c"), os.path.join(folder, "library.so")
        with open(source, "w", encoding="ascii") as file:
            file.write(layout_source())
        subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-O2", "-shared", "-fPIC",
                        "-I", os.path.dirname(HERE), source, "-o", library, "-lm", "-ldl"],
                       check=True)
        return ctypes.CDLL(library)


LIBRARY = load_library()


def check_layout():
    wanted = []
    for s in STRUCTS:
        wanted.append((s.__name__, ctypes.sizeof(s)))
        wanted += [(f"{s.__name__}.{name}", getattr(s, name).offset) for name, _ in s._fields_]
    found = (ctypes.c_size_t * len(wanted)).in_dll(LIBRARY, "layout_of_structs")
    wrong = [name for (name, number), compiled in zip(wanted, found) if number != compiled]
    report("struct layouts", not wrong,
           f"wrong from {wrong[0]} on" if wrong else f"{len(STRUCTS)} structs")


FAILURES = 0


def report(name, good, details):
    global FAILURES
    FAILURES += not good
    print(f"{'ok  ' if good else 'FAIL'} {name} ({details})", flush=True)


def call(function, *arguments):
    error = Error()
    status = getattr(LIBRARY, function)(*arguments, ctypes.byref(error))
    if status != 0:
        print(f"FAIL {function}: {error.message.decode()}")
        sys.exit(1)


# =============================================================================
# The library on torch tensors
# =============================================================================

GPU = ctypes.c_void_p()


def open_gpu():
    torch.zeros(1, device=DEVICE)  # torch's context becomes current
    call("kmla_gpu_open", None, ctypes.byref(GPU))
    call("kmla_gpu_prepare", GPU, None, None)


def plan_of(shape):
    plan = Plan()
    device = Device()
    if not HOST:
        call("kmla_gpu_device", GPU, ctypes.byref(device))
    call("kmla_plan_decode", ctypes.byref(shape), ctypes.byref(device), ctypes.byref(plan))
    if not HOST:
        call("kmla_gpu_prepare", GPU, ctypes.byref(plan), None)
    return plan


def current_stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def decode(plan, args):
    if HOST:
        call("kmla_host_decode", ctypes.byref(plan), ctypes.byref(args), None)
    else:
        call("kmla_gpu_decode", GPU, ctypes.byref(plan), ctypes.byref(args), current_stream())


def write(name, args):
    if HOST:
        call(f"kmla_host_{name}", ctypes.byref(args))
    else:
        call(f"kmla_gpu_{name}", GPU, ctypes.byref(args), current_stream())


# =============================================================================
# Records by PyTorch
# =============================================================================


def to_codes(values):
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def raw(tensor):
    """The bytes of a tensor's last dimension."""
    return tensor.contiguous().view(torch.uint8)


def groups_of(values):
    return values[..., :512].unflatten(-1, (4, 128))


def kv_scales(values):
    largest = groups_of(values).abs().amax(-1)
    # By a tensor: a number on the right would become a product with its inverse.
    scales = largest / torch.full_like(largest, 448.0)
    return scales.clamp_min(torch.finfo(torch.float32).tiny)


def query_scales(values):
    inverse = torch.tensor(1.0 / 448.0, dtype=torch.float32, device=values.device)
    raw_scale = (groups_of(values).abs().amax(-1) * inverse).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(raw_scale)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # a power of two stays
    return torch.ldexp(torch.ones_like(raw_scale), exponent)


def pack(values, scales):
    codes = to_codes((groups_of(values) / scales.unsqueeze(-1)).flatten(-2))
    rope = values[..., 512:].to(torch.bfloat16)
    return torch.cat([raw(codes), raw(scales), raw(rope)], -1)


def unpack(records):
    codes = records[..., :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = records[..., 512:528].contiguous().view(torch.float32).double()
    rope = records[..., 528:].contiguous().view(torch.bfloat16).double()
    latent = (codes.unflatten(-1, (4, 128)) * scales.unsqueeze(-1)).flatten(-2)
    return torch.cat([latent, rope], -1)


def encode(name, values, scales_of, tensor_scale):
    if name == "packed":
        return pack(values, scales_of(values))
    if name == "e4m3":
        return raw(to_codes(values / torch.tensor(tensor_scale, dtype=torch.float32,
                                                  device=values.device)))
    return raw(values.to(torch.bfloat16))


def values_of(name, records, tensor_scale):
    if name == "packed":
        return unpack(records)
    if name == "e4m3":
        return (records.contiguous().view(torch.float8_e4m3fn).double()
                * ctypes.c_float(tensor_scale).value)
    return records.contiguous().view(torch.bfloat16).double()


# =============================================================================
# Cases
# =============================================================================

PAGE = 64


class Batch:
    """Requests of 4 verify rows each, their tokens in shuffled pages."""

    def __init__(self, kv_format, query_format, mode, heads, lengths, seed):
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self.kv_name, self.query_name = KV_NAMES[kv_format], QUERY_NAMES[query_format]
        self.kv_scale, self.query_scale = 0.0137, 0.0075
        self.mode, self.heads, self.rows = mode, heads, 4
        requests = len(lengths)
        capacity = max(lengths)
        width = (capacity + PAGE - 1) // PAGE
        # Every request has a page for its whole capacity, and a few belong to nobody.
        pages = torch.randperm(requests * width + 3, generator=generator)
        self.table = pages[:requests * width].to(torch.int32).view(requests, width).to(DEVICE)
        record = BYTES[self.kv_name]
        self.pool = torch.full((len(pages), PAGE, record), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.lengths = torch.tensor([[n - 3 + i for i in range(4)] for n in lengths],
                                    dtype=torch.int32).clamp_min(0).flatten().to(DEVICE)
        self.tokens = [torch.randn(n, 576, generator=generator).to(DEVICE) for n in lengths]
        for request, values in enumerate(self.tokens):
            slots = self.slots(request, len(values))
            self.pool.view(-1, record)[slots] = encode(self.kv_name, values, kv_scales,
                                                       self.kv_scale)
        self.queries = 1.2 * torch.randn(requests * 4, heads, 576, generator=generator).to(DEVICE)
        self.query = encode(self.query_name, self.queries, query_scales, self.query_scale)
        shape = Shape(requests=requests, rows_per_request=4, heads=heads, kv_format=kv_format,
                      query_format=query_format, mode=mode, page_tokens=PAGE,
                      capacity_tokens=capacity, partial_type=1)
        self.plan = plan_of(shape)
        self.out = torch.full((requests * 4, heads, 512), float("nan"), dtype=torch.bfloat16,
                              device=DEVICE)
        self.lse = torch.full((requests * 4, heads), float("nan"), device=DEVICE)
        self.workspace = torch.full((max(self.plan.workspace_bytes, 16),), 0xFF, dtype=torch.uint8,
                                    device=DEVICE)
        self.args = Decode(query=self.query.data_ptr(), query_scale=self.query_scale, scale=SCALE,
                           kv_scale=self.kv_scale, kv=self.pool.data_ptr(), kv_pages=len(pages),
                           block_table=self.table.data_ptr(), block_table_width=width,
                           lengths=self.lengths.data_ptr(), out=self.out.data_ptr(), out_type=0,
                           lse=self.lse.data_ptr(), workspace=self.workspace.data_ptr(),
                           workspace_bytes=self.plan.workspace_bytes)

    def slots(self, request, count):
        token = torch.arange(count, device=DEVICE)
        return self.table[request, token // PAGE].long() * PAGE + token % PAGE

    def run(self):
        decode(self.plan, self.args)

    def clear(self):
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def right(self):
        """fp64 attention over the very values that are read."""
        query = values_of(self.query_name, self.query, self.query_scale)
        if self.mode == E4M3_QUERY and self.query_name == "bf16":
            plain = self.query.contiguous().view(torch.bfloat16).float()
            query = unpack(pack(plain, query_scales(plain)))
        out = torch.zeros(query.shape[:2] + (512,), dtype=torch.float64, device=DEVICE)
        lse = torch.full(query.shape[:2], -float("inf"), dtype=torch.float64, device=DEVICE)
        scale = ctypes.c_float(SCALE).value
        for row, length in enumerate(self.lengths.tolist()):
            if length > 0:
                slots = self.slots(row // 4, length)
                records = self.pool.view(-1, self.pool.shape[-1])[slots]
                kv = values_of(self.kv_name, records, self.kv_scale)
                scores = scale * (query[row] @ kv.T)
                lse[row] = torch.logsumexp(scores, -1)
                out[row] = torch.softmax(scores, -1) @ kv[:, :512]
        return out, lse

    def check(self, name):
        self.clear()
        self.run()
        if not HOST:
            torch.cuda.synchronize()
        out, lse = self.right()
        live = torch.isfinite(lse)
        off = ((self.out.double() - out).norm() / out.norm()).item()
        lse_off = ((self.lse.double() - lse).abs() / lse.abs().clamp_min(1.0))[live].max().item()
        dead = bool((self.out[~live] == 0).all()) and bool((self.lse[~live] < -1e38).all())
        bound = 3e-3 if self.mode == E4M3_QUERY else 2e-3
        report(name, off <= bound and lse_off <= 3e-4 and dead,
               f"out {off:.1e}, lse {lse_off:.1e}, {self.plan.splits} splits, tile "
               f"{self.plan.tile}")


def check_decodes():
    heads, lengths = (12, [300, 2, 65]) if HOST else (99, [2048, 2, 65, 517])
    for kv_format in (PACKED, E4M3, BF16):
        for query_format in (QUERY_BF16, QUERY_PACKED, QUERY_E4M3):
            for mode in (EXACT, E4M3_QUERY):
                batch = Batch(kv_format, query_format, mode, heads, lengths, seed=kv_format + 1)
                batch.check(f"kv {KV_NAMES[kv_format]}, query {QUERY_NAMES[query_format]}, "
                            f"{'e4m3' if mode else 'exact'} mode")


def check_kv_writer(kv_format):
    name, tokens = KV_NAMES[kv_format], 1000
    values = torch.randn(tokens, 576).to(DEVICE) * torch.logspace(-6, 6, tokens)[:, None].to(DEVICE)
    values[7] = 0.0
    pages = (tokens + PAGE - 1) // PAGE
    pool = torch.full((pages * PAGE, BYTES[name]), 0xFF, dtype=torch.uint8, device=DEVICE)
    slots = torch.randperm(pages * PAGE)[:tokens].to(DEVICE)
    write("write_kv", KvWrite(tokens=tokens, kv_format=kv_format, source_type=1, kv_scale=0.0137,
                              page_tokens=PAGE, latent=values.data_ptr(), latent_stride=576,
                              rope=values.data_ptr() + 2048, rope_stride=576,
                              slots=slots.data_ptr(), kv=pool.data_ptr(), kv_pages=pages))
    if not HOST:
        torch.cuda.synchronize()
    wrong = (pool[slots] != encode(name, values, kv_scales, 0.0137)).any(-1).sum().item()
    report(f"{name} KV writer gives PyTorch's bytes", wrong == 0,
           f"{tokens} records, {wrong} differ")


def check_query_writer(query_format):
    name, rows, heads = QUERY_NAMES[query_format], 8, 99
    values = torch.randn(rows, heads, 576).to(DEVICE)
    values *= torch.logspace(-6, 4, rows)[:, None, None].to(DEVICE)
    records = torch.full((rows, heads, BYTES[name]), 0xFF, dtype=torch.uint8, device=DEVICE)
    write("write_query", QueryWrite(rows=rows, heads=heads, query_format=query_format,
                                    source_type=1, query_scale=0.0075, source=values.data_ptr(),
                                    query=records.data_ptr()))
    if not HOST:
        torch.cuda.synchronize()
    wrong = (records != encode(name, values, query_scales, 0.0075)).any(-1).sum().item()
    report(f"{name} query writer gives PyTorch's bytes", wrong == 0,
           f"{rows * heads} records, {wrong} differ")


def check_stream_and_graph():
    """torch.cuda.graph captures the call on its own stream; replays have the eager bits."""
    batch = Batch(PACKED, QUERY_BF16, EXACT, 99, [2048, 700], seed=5)
    batch.run()
    torch.cuda.synchronize()
    eager_out, eager_lse = batch.out.clone(), batch.lse.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch.clear()
        batch.run()
    side.synchronize()
    same = torch.equal(batch.out, eager_out) and torch.equal(batch.lse, eager_lse)
    report("a side stream of torch", same, "bits of the current stream")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run()
    same = True
    for _ in range(10):
        batch.clear()
        batch.workspace.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        same &= torch.equal(batch.out, eager_out) and torch.equal(batch.lse, eager_lse)
    report("torch.cuda.graph", same, "10 replays with the eager bits")

    # Lengths are read when the graph runs: shorter ones, and a dead request.
    batch.lengths.copy_(torch.tensor([100, 101, 102, 103, 0, -1, 0, 0], dtype=torch.int32))
    batch.clear()
    graph.replay()
    torch.cuda.synchronize()
    replayed_out, replayed_lse = batch.out.clone(), batch.lse.clone()
    batch.check("shorter lengths, eager")
    same = torch.equal(batch.out, replayed_out) and torch.equal(batch.lse, replayed_lse)
    report("shorter lengths, replayed", same, "the eager bits")


def main():
    name = "host reader" if HOST else torch.cuda.get_device_name()
    print(f"torch_records on {name}, PyTorch {torch.__version__}")
    torch.manual_seed(1)
    check_layout()
    if FAILURES:
        sys.exit(1)
    if not HOST:
        open_gpu()
    check_decodes()
    for kv_format in (PACKED, E4M3, BF16):
        check_kv_writer(kv_format)
    for query_format in (QUERY_BF16, QUERY_PACKED, QUERY_E4M3):
        check_query_writer(query_format)
    if not HOST:
        check_stream_and_graph()
        LIBRARY.kmla_gpu_close(GPU)
    print(f"torch_records: {'all passed' if FAILURES == 0 else f'{FAILURES} FAILED'}")
    sys.exit(FAILURES != 0)


if __name__ == "__main__":
    main()
