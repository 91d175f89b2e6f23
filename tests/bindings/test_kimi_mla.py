#!/usr/bin/env python3
"""kimi_mla.py against the header, and the functions that plan and decode on the host, called.

    test_kimi_mla.py LIBRARY LAYOUT TYPES

The last two files are what declarations.py makes of the header.
"""

import ctypes
import math
import sys
import unittest

sys.dont_write_bytecode = True  # the tree stays as it is
import kimi_mla as k  # noqa: E402

SIMPLE = {k.i32: "i32", k.i64: "i64", k.u8: "u8", k.u16: "u16", k.u32: "u32", k.u64: "u64",
          k.f32: "f32", ctypes.c_char: "c_char", ctypes.c_void_p: "*c_void",
          ctypes.c_char_p: "*c_char"}


def structs():
    return {name: kind for name, kind in vars(k).items()
            if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
            and hasattr(kind, "_fields_")}


def type_name(kind):
    """A ctypes type in the words of declarations.py, as far as ctypes tells them apart."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if issubclass(kind, ctypes.Array):
        return f"[{type_name(kind._type_)}; {kind._length_}]"
    if issubclass(kind, ctypes._CFuncPtr):
        return "function pointer"
    if issubclass(kind, ctypes._Pointer):
        return f"*{type_name(kind._type_)}"
    return kind.__name__


def lines_of(file, changes=()):
    with open(file) as lines:
        text = lines.read()
    for old, new in changes:
        text = text.replace(old, new)
    return set(text.splitlines())


class Declarations(unittest.TestCase):
    def assert_same(self, of_header, of_python):
        self.assertEqual(sorted(of_header - of_python), [], "only in the header")
        self.assertEqual(sorted(of_python - of_header), [], "only in kimi_mla.py")
        self.assertGreater(len(of_python), 50)

    def test_layout_and_constants(self):
        lines = {f"constant {name} {value}" for name, value in vars(k).items()
                 if name.startswith("KMLA_")}
        for name, kind in structs().items():
            lines.add(f"struct {name} {ctypes.sizeof(kind)} {ctypes.alignment(kind)}")
            for field, _ in kind._fields_:
                at = getattr(kind, field)
                lines.add(f"field {name}.{field} {at.offset} {at.size}")
        self.assert_same(lines_of(LAYOUT), lines)

    def test_types(self):
        lines = {f"field {name}.{field} {type_name(kind)}" for name, struct in structs().items()
                 for field, kind in struct._fields_}
        for name, (result, parameters) in k.FUNCTIONS.items():
            returned = f" -> {type_name(result)}" if result else ""
            lines.add(f"function {name}({', '.join(map(type_name, parameters))}){returned}")
        # ctypes knows no const, and size_t only as the integer that it is.
        changes = [("*const ", "*"), ("*mut ", "*"), ("usize", type_name(k.size))]
        self.assert_same(lines_of(TYPES, changes), lines)


class Calls(unittest.TestCase):
    def fine(self, status, error):
        self.assertEqual(status, k.KMLA_OK, error.message.decode())

    def test_heads(self):
        error, heads = k.kmla_error(), k.kmla_heads()
        desc = k.kmla_heads_desc(local_heads=11, dcp_ranks=9)
        self.fine(LIBRARY.kmla_plan_heads(desc, heads, error), error)
        self.assertEqual((heads.effective, heads.padded, heads.tiles, heads.launches),
                         (99, 112, 7, 1))

    def test_lengths(self):
        error, local = k.kmla_error(), k.i64()
        locals_ = []
        for rank in range(9):
            dcp = k.kmla_dcp(ranks=9, rank=rank, interleave=64)
            self.fine(LIBRARY.kmla_local_length(dcp, 131072, local, error), error)
            locals_.append(local.value)
        self.assertEqual(locals_, [14592] * 5 + [14528] * 4)
        rule = k.kmla_length_rule(lengths_kind=k.KMLA_LENGTHS_PER_REQUEST)
        begins, ends = (k.i64 * 3)(), (k.i64 * 3)()
        self.fine(LIBRARY.kmla_row_ranges(rule, 10, 3, begins, ends, error), error)
        self.assertEqual((list(begins), list(ends)), ([0, 0, 0], [8, 9, 10]))

    def test_workspace(self):
        error, need = k.kmla_error(), k.u64()
        self.fine(LIBRARY.kmla_workspace_bytes(4, 112, 16, k.KMLA_FP32, need, error), error)
        self.assertEqual(need.value, 14708736)

    def test_plan(self):
        error, plan = k.kmla_error(), k.kmla_plan()
        shape = k.kmla_shape(requests=1, rows=4, rows_per_request=4, heads=99,
                             capacity_tokens=16384)
        card = k.kmla_device(9, 0, 132, 232448, 233472)
        self.fine(LIBRARY.kmla_plan_decode(shape, card, plan, error), error)
        self.assertEqual((plan.version, plan.shape.heads, plan.device.multiprocessors),
                         (k.KMLA_VERSION, 99, 132))
        self.assertEqual(plan.chunks, 256)
        self.assertEqual(plan.reader, k.KMLA_READER_HOPPER)
        self.assertIn(b"tile", plan.reason)

    def test_errors_name_the_argument(self):
        error, plan = k.kmla_error(), k.kmla_plan()
        shape = k.kmla_shape(requests=1, capacity_tokens=64)
        status = LIBRARY.kmla_plan_decode(shape, None, plan, error)
        self.assertEqual((status, error.status), (k.KMLA_ERROR_ARGUMENT,) * 2)
        self.assertIn(b"shape.heads", error.message)
        self.assertEqual(LIBRARY.kmla_status_name(status), b"KMLA_ERROR_ARGUMENT")

    def test_host_decode_through_a_callback(self):
        """Two tokens of E4M3 KV with equal scores: latents 1 and 3 come out as 2."""
        error, plan = k.kmla_error(), k.kmla_plan()
        shape = k.kmla_shape(requests=1, heads=1, capacity_tokens=64, page_tokens=2,
                             kv_format=k.KMLA_KV_E4M3)
        self.fine(LIBRARY.kmla_plan_decode(shape, None, plan, error), error)
        self.assertEqual(plan.reader, k.KMLA_READER_HOST)
        zero, one, three = bytes(64), b"\x38", b"\x44"
        kept = []  # what the addresses are of

        def place(data):
            """Bytes at an address that 16 divides."""
            room = ctypes.create_string_buffer(len(data) + 15)
            address = (ctypes.addressof(room) + 15) // 16 * 16
            ctypes.memmove(address, data, len(data))
            kept.append(room)
            return address

        out = place(b"\xff" * 2048)
        lse = place(bytes(4))
        args = k.kmla_decode(
            query=place(bytes(1152)), scale=0.07216878, kv_scale=1.0, kv_pages=1,
            kv=place(one * 512 + zero + three * 512 + zero), block_table=place(bytes(4 * 32)),
            block_table_width=32, lengths=place(bytes(k.i32(2))), out=out,
            out_type=k.KMLA_FP32, lse=lse)
        runs = []

        @k.kmla_run
        def run(_user, count, task, data):
            runs.append(count)
            for index in reversed(range(count)):
                task(data, index)

        self.fine(LIBRARY.kmla_host_decode(plan, args, k.kmla_parallel(run=run), error), error)
        self.assertEqual(list((k.f32 * 512).from_address(out)), [2.0] * 512)
        self.assertAlmostEqual(k.f32.from_address(lse).value, math.log(2), places=6)
        self.assertEqual(runs, [1])


if __name__ == "__main__":
    LAYOUT, TYPES = sys.argv[2:4]
    LIBRARY = k.load(sys.argv[1])
    unittest.main(argv=sys.argv[:1])
