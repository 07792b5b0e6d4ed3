#!/usr/bin/env python3
"""The Python package against the shared library, on a bundle for this CPU; the
PyTorch part where torch is installed.

    python_test.py libkiln_runtime.so
"""

import array
import ctypes
import json
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"),
                str(HERE.parents[1] / "runtime" / "python")]


def has_torch(interpreter):
    return subprocess.run([interpreter, "-c", "import torch"], check=False,
                          capture_output=True).returncode == 0


# Distributions put torch beside their own interpreter only.
if "--same-interpreter" in sys.argv:
    sys.argv.remove("--same-interpreter")
elif not has_torch(sys.executable):
    system = shutil.which("python3", path="/usr/bin")
    if system is not None and has_torch(system):
        os.execv(system, [system, *sys.argv, "--same-interpreter"])

import kiln  # noqa: E402
import small_bundle  # noqa: E402
from small_bundle import REQUEST, make  # noqa: E402

try:
    import torch
    import moe_reference
except ImportError:
    torch = None

LIBRARY = sys.argv.pop(1)
HIDDEN, INTER, EXPERTS, TOP_K, BITS = 128, 128, 4, 2, 4
WEIGHTS = EXPERTS * HIDDEN * INTER // 256 * 16 * BITS


def words(seed, count, mask, bits):
    out = array.array("H", bytes(2 * count))
    for i in range(count):
        seed = (seed * 1664525 + 1013904223) & 0xffffffff
        out[i] = seed >> 16 & mask | bits
    return out


def inputs(m):
    """The same as tools/examples/engine.c."""
    x = words(1, m * HIDDEN, 0x807f, 0x3e00)
    ids = array.array("i", [(i * 7 + i // TOP_K) % EXPERTS
                            for i in range(m * TOP_K)])
    weights = array.array("f", [0.5] * (m * TOP_K))
    return [x, ids, weights,
            *[words(seed, WEIGHTS, 0xffff, 0) for seed in (2, 3, 4)],
            words(5, EXPERTS * HIDDEN, 0x83ff, 0x3000),
            words(6, EXPERTS * HIDDEN, 0x83ff, 0x3000),
            words(7, EXPERTS * 3 * INTER, 0x83ff, 0x3000),
            words(8, EXPERTS * HIDDEN, 0x83ff, 0x3000)]


class Tensor:
    """As an array library has it, over an array or a whole number of bytes."""

    def __init__(self, data, dtype, shape, device="cpu"):
        self.data, self.dtype, self.shape = data, f"torch.{dtype}", shape
        self.device = unittest.mock.Mock(type=device, index=None)

    def data_ptr(self):
        return (self.data.buffer_info()[0] if isinstance(self.data, array.array)
                else self.data)

    def is_contiguous(self):
        return True

    def numel(self):
        count = 1
        for size in self.shape:
            count *= size
        return count

    def element_size(self):
        return int("".join(filter(str.isdigit, self.dtype))) // 8


SHAPES = (("bfloat16", lambda m: (m, HIDDEN)), ("int32", lambda m: (m, TOP_K)),
          ("float32", lambda m: (m, TOP_K)),
          *[("int16", lambda m: (EXPERTS, 8, 8, 16 * BITS))] * 3,
          *[("float16", lambda m: (EXPERTS, HIDDEN))] * 2,
          ("float16", lambda m: (EXPERTS, 3 * INTER)),
          ("float16", lambda m: (EXPERTS, HIDDEN)),
          ("float32", lambda m: (m, HIDDEN)))
(X, IDS, WEIGHTS_OF_ROUTES, W_GATE, W_UP, W_DOWN, GATE_SUH, UP_SUH, ROTATIONS,
 DOWN_SVH, OUT) = range(len(SHAPES))


class WithBundle(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.mkdtemp(prefix="kiln_python_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.folder = pathlib.Path(scratch)
        cls.path = make(cls.folder, "tiny", REQUEST)
        cls.runtime = kiln.Runtime(LIBRARY)
        with cls.runtime.open(cls.path) as bundle:
            cls.root = bundle.root
            cls.modules = bundle.load(allow_unqualified=True)

    @classmethod
    def tearDownClass(cls):
        cls.modules.close()

    def launch(self, m, params=None):
        entry = self.modules.find("moe", m)
        out = array.array("f", [float("nan")] * (m * HIDDEN))
        arena = kiln.aligned_buffer(entry.arena_bytes)
        entry.launch(m, [*(params or inputs(m)), out], arena)
        return out


class RuntimeTest(WithBundle):

    def refused(self, error, status, call, *arguments, **named):
        with self.assertRaises(error) as caught:
            call(*arguments, **named)
        self.assertEqual(caught.exception.status, status)
        self.assertTrue(str(caught.exception))
        return caught.exception

    def test_launches_and_repeats_itself(self):
        for m in (1, 3, 4):
            out = self.launch(m)
            self.assertFalse(any(v != v for v in out))
            self.assertTrue(any(v != 0 for v in out))
            self.assertEqual(self.launch(m), out)

    def test_tokens_are_independent(self):
        # Token 0 of a batch has the result it has alone.
        self.assertEqual(self.launch(4)[:HIDDEN], self.launch(1))

    def test_zero_tokens_look_at_nothing(self):
        self.modules.find("moe", 0).launch(0, [])

    def test_golden_replay_passes_here_and_tells_other_results(self):
        self.assertEqual(self.modules.selftest(), kiln.Selftest(2, 0, 0))
        # One digit of one digest, under a right root.
        data = bytearray(self.path.read_bytes())
        plans = json.loads(small_bundle.kiln(
            "--json", "inspect", self.path).stdout)[
                "sections"][0]["entries"][0]["plans"]
        data[data.index(bytes.fromhex(plans[1]["golden"]))] ^= 1
        small_bundle.repair_root(data)
        other = self.folder / "other.kiln"
        other.write_bytes(data)
        with self.runtime.open(other) as bundle, bundle.load(
                allow_unqualified=True) as modules:
            error = self.refused(kiln.PreflightError,
                                 kiln.Status.SELFTEST_MISMATCH,
                                 modules.selftest)
        self.assertIn("entry 'moe' (fused_moe), plan for m 2..4", str(error))

    def test_says_what_the_bundle_declares(self):
        entry = self.modules.find("moe", 3)
        self.assertEqual([p.name for p in entry.params],
                         ["x", "topk_ids", "topk_weights", "w_gate", "w_up",
                          "w_down", "gate_suh", "up_suh", "rotations",
                          "down_svh", "out"])
        self.assertEqual([p.output for p in entry.params],
                         [False] * 10 + [True])
        self.assertEqual(entry.shape(0, 3), (3, HIDDEN))
        self.assertEqual(entry.shape(3, 3),
                         (EXPERTS, HIDDEN // 16, INTER // 16, 16 * BITS))
        self.assertEqual(entry.shape(8, 3), (EXPERTS, 3 * INTER))
        self.assertEqual(entry.param_bytes(10, 3), 3 * HIDDEN * 4)
        self.assertEqual(self.modules.backend, "cpu")
        self.assertEqual(self.modules.root, self.root)
        self.assertIs(self.modules.find("moe", 2), self.modules.find("moe", 4))

    def test_opening_is_refused_with_its_own_class_and_status(self):
        status = kiln.Status
        self.refused(kiln.BundleError, status.FILE_NOT_FOUND,
                     self.runtime.open, self.folder / "absent")
        self.refused(kiln.BundleError, status.BUNDLE_NOT_A_BUNDLE,
                     self.runtime.open, __file__)
        self.refused(kiln.BundleError, status.ROOT_MISMATCH,
                     self.runtime.open, self.path, root=bytes(32))
        self.runtime.open(self.path, root=self.root).close()
        with self.assertRaises(ValueError):
            self.runtime.open(self.path, root=b"short")

    def test_loading_is_refused_with_its_own_class_and_status(self):
        predicted = make(self.folder, "predicted", REQUEST, predicted=True)
        with self.runtime.open(predicted) as bundle:
            self.refused(kiln.PreflightError, kiln.Status.PREDICTED_PLANS,
                         bundle.load, allow_unqualified=True)
            bundle.load(allow_unqualified=True, allow_predicted=True).close()
        with self.runtime.open(self.path) as bundle:
            self.refused(kiln.PreflightError, kiln.Status.TARGET_MISSING,
                         bundle.load, target="cuda")
        self.refused(kiln.UsageError, kiln.Status.CLOSED_HANDLE, bundle.load)

    def test_dispatch_is_refused_with_its_own_class_and_status(self):
        status = kiln.Status
        error = self.refused(kiln.DispatchError, status.TOKENS_OUT_OF_RANGE,
                             self.modules.find, "moe", 5)
        self.assertIn("declared intervals", str(error))
        self.refused(kiln.DispatchError, status.ENTRY_NOT_FOUND,
                     self.modules.find, "dense", 1)
        entry = self.modules.find("moe", 1)
        good = [*inputs(1), array.array("f", bytes(4 * HIDDEN))]
        arena = kiln.aligned_buffer(entry.arena_bytes + 256)
        at = arena.data_ptr()
        launch = entry.launch
        self.refused(kiln.DispatchError, status.PARAMS_SHORT, launch, 1,
                     good[:-1], arena)
        self.refused(kiln.DispatchError, status.PARAM_NULL, launch, 1,
                     [0, *good[1:]], arena)
        self.refused(kiln.DispatchError, status.ARENA_MISSING, launch, 1, good)
        self.refused(kiln.DispatchError, status.ARENA_MISALIGNED, launch, 1,
                     good, at + 16)
        self.refused(kiln.DispatchError, status.ARENA_SHORT, launch, 1, good,
                     kiln.Buffer(at, entry.arena_bytes - 1))
        self.refused(kiln.DispatchError, status.STREAM_NOT_ALLOWED, launch, 1,
                     good, arena, stream=7)

    def test_use_after_close_is_refused(self):
        with self.runtime.open(self.path) as bundle:
            modules = bundle.load(allow_unqualified=True)
        entry = modules.find("moe", 1)
        modules.close()
        modules.close()
        self.refused(kiln.UsageError, kiln.Status.CLOSED_HANDLE,
                     modules.find, "moe", 1)
        self.refused(kiln.UsageError, kiln.Status.CLOSED_HANDLE,
                     entry.launch, 0, [])

    def test_buffers_of_the_wrong_size_or_place_are_refused(self):
        for index, what in ((0, "x"), (3, "w_gate")):
            params = inputs(4)
            params[index] = params[index][:-1]
            with self.assertRaisesRegex(ValueError, f"parameter {what} has"):
                self.launch(4, params)
        params = inputs(1)
        params[0] = kiln.Buffer(4096, 2 * HIDDEN, "cuda")
        with self.assertRaisesRegex(TypeError, "is on cuda"):
            self.launch(1, params)
        params[0] = bytes(2 * HIDDEN)
        with self.assertRaisesRegex(ValueError, "read-only"):
            self.launch(1, params)
        params[0] = object()
        with self.assertRaisesRegex(TypeError, "pass a tensor"):
            self.launch(1, params)
        params[0] = memoryview(words(1, 2 * HIDDEN, 0x807f, 0x3e00))[::2]
        with self.assertRaisesRegex(ValueError, "not contiguous"):
            self.launch(1, params)

    def tensors(self, m, **changes):
        """Typed and shaped parameters; the named ones are changed."""
        data = [*inputs(m), array.array("f", bytes(4 * m * HIDDEN))]
        out = []
        for index, (dtype, shape) in enumerate(SHAPES):
            name = self.modules.find("moe", m).params[index].name
            made = {"data": data[index], "dtype": dtype, "shape": shape(m)}
            out.append(Tensor(**{**made, **changes.get(name, {})}))
        return out

    def launch_tensors(self, m, arena=None, **changes):
        entry = self.modules.find("moe", m)
        tensors = self.tensors(m, **changes)
        entry.launch(m, tensors,
                     arena or kiln.aligned_buffer(entry.arena_bytes))
        return tensors[OUT].data

    def refused_tensor(self, error, text, m=2, **changes):
        """Refused, and neither the output nor the workspace was written."""
        before = array.array("f", [0.5] * (m * HIDDEN))
        out = before[:]
        size = self.modules.find("moe", m).arena_bytes
        arena = kiln.aligned_buffer(size)
        ctypes.memset(arena.data_ptr(), 0xa5, size)
        changes["out"] = {"data": out, **changes.get("out", {})}
        with self.assertRaisesRegex(error, text) as caught:
            self.launch_tensors(m, arena, **changes)
        self.assertEqual(out, before)
        self.assertEqual(ctypes.string_at(arena.data_ptr(), size),
                         b"\xa5" * size)
        return caught.exception

    def test_typed_and_shaped_tensors_are_taken(self):
        expected = self.launch(2)
        self.assertEqual(self.launch_tensors(2), expected)
        # Bits of 16-bit numbers, words two by two, bytes, flat memory, and
        # more tokens than the launch has.
        self.assertEqual(self.launch_tensors(
            2, x={"dtype": "int16"}, gate_suh={"dtype": "uint16"},
            w_gate={"dtype": "int32", "shape": (EXPERTS, 8, 8, 8 * BITS)},
            w_up={"dtype": "uint8", "shape": (2 * WEIGHTS,)},
            w_down={"shape": (WEIGHTS,)}), expected)
        data = inputs(4)
        data[IDS] = inputs(2)[IDS] + inputs(2)[IDS]
        self.assertEqual(self.launch_tensors(
            2, x={"data": data[X], "shape": (4, HIDDEN)},
            topk_ids={"data": data[IDS], "shape": (4, TOP_K)}), expected)

    # The rows of the specification's fail-closed table (templates/formats/
    # README.md) that a caller's tensors can break.

    def test_row17_refuses_a_trellis_of_another_type(self):
        for name in ("w_gate", "w_up", "w_down"):
            for dtype, found in (("float16", "f16"), ("bfloat16", "bf16"),
                                 ("int64", "i64"), ("int8", "i8")):
                with self.subTest(name=name, dtype=dtype):
                    self.refused_tensor(
                        TypeError, f"parameter {name} is {found}, must be i16",
                        **{name: {"dtype": dtype}})

    def test_row18_refuses_a_trellis_of_another_shape_or_place(self):
        for shape in ((EXPERTS, 8, 8, 8 * BITS), (EXPERTS, 8, 4, 32 * BITS),
                      (EXPERTS * 8, 8, 16 * BITS), (1, EXPERTS, 8, 8, 16 * BITS),
                      (EXPERTS + 1, 8, 8, 16 * BITS), ()):
            with self.subTest(shape=shape):
                self.refused_tensor(
                    ValueError, r"parameter w_gate has the shape .*must have "
                    r"\[4, 8, 8, 64\]", w_gate={"shape": shape})
        with self.assertRaisesRegex(TypeError, "w_up is on cuda"):
            tensors = self.tensors(2)
            tensors[W_UP].device.type = "cuda"
            self.modules.find("moe", 2).launch(2, tensors)
        with self.assertRaisesRegex(ValueError, "not contiguous"):
            tensors = self.tensors(2)
            tensors[W_UP].is_contiguous = lambda: False
            self.modules.find("moe", 2).launch(2, tensors)

    def test_row18_refuses_a_misaligned_trellis(self):
        longer = array.array("H", [0]) + inputs(2)[W_DOWN]
        error = self.refused(
            kiln.DispatchError, kiln.Status.PARAM_MISALIGNED,
            self.launch_tensors, 2,
            w_down={"data": longer.buffer_info()[0] + 2})
        self.assertIn("parameter 5 'w_down' is misaligned by 2 bytes, it must "
                      "be a multiple of 16", str(error))
        self.refused(kiln.DispatchError, kiln.Status.PARAM_MISALIGNED,
                     self.launch_tensors, 2, x={
                         "data": longer.buffer_info()[0] + 8})

    def test_row19_refuses_scale_tables_of_another_type_or_shape(self):
        for name, columns in (("gate_suh", HIDDEN), ("up_suh", HIDDEN),
                              ("rotations", 3 * INTER), ("down_svh", HIDDEN)):
            with self.subTest(name):
                for dtype, found in (("bfloat16", "bf16"), ("float32", "f32")):
                    self.refused_tensor(
                        TypeError, f"parameter {name} is {found}, must be f16",
                        **{name: {"dtype": dtype}})
                # One row for all experts beside a row of each.
                self.refused_tensor(
                    ValueError, rf"parameter {name} has the shape \[1, "
                    rf"{columns}\], must have \[4, {columns}\]",
                    **{name: {"shape": (1, columns)}})
                # A table that is not there.
                error = self.refused_tensor(
                    kiln.DispatchError, f"'{name}' is null",
                    **{name: {"data": 0}})
                self.assertEqual(error.status, kiln.Status.PARAM_NULL)

    def test_refusals_touch_no_memory(self):
        """As freed memory may be, all pages are closed to reads and writes: a
        check or a kernel that looked at them would end the process."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                              ctypes.c_int, ctypes.c_int, ctypes.c_long]
        size = 1 << 20
        no_access = 0
        memory = libc.mmap(None, (len(SHAPES) + 1) * size, no_access,
                           mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.assertNotIn(memory, (None, ctypes.c_void_p(-1).value))
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.addCleanup(libc.munmap, memory, (len(SHAPES) + 1) * size)
        entry = self.modules.find("moe", 2)
        freed = {p.name: {"data": memory + i * size}
                 for i, p in enumerate(entry.params)}
        arena = kiln.Buffer(memory + len(SHAPES) * size, entry.arena_bytes)

        def refused(error, text, **changes):
            both = {name: {**place, **changes.get(name, {})}
                    for name, place in freed.items()}
            with self.assertRaisesRegex(error, text):
                self.launch_tensors(2, arena, **both)

        for name in ("w_gate", "w_up", "w_down"):
            refused(TypeError, f"parameter {name} is f16, must be i16",
                    **{name: {"dtype": "float16"}})
            refused(ValueError, f"parameter {name} has the shape",
                    **{name: {"shape": (EXPERTS, 8, 4, 32 * BITS)}})
            refused(kiln.DispatchError, f"'{name}' is misaligned by 2 bytes",
                    **{name: {"data": freed[name]["data"] + 2}})
        for name in ("gate_suh", "up_suh", "rotations", "down_svh"):
            refused(TypeError, f"parameter {name} is f32, must be f16",
                    **{name: {"dtype": "float32"}})
            refused(ValueError, f"parameter {name} has the shape",
                    **{name: {"shape": (1, HIDDEN)}})
            refused(kiln.DispatchError, f"'{name}' is null",
                    **{name: {"data": 0}})

    def test_row21_refuses_a_workspace_that_is_shared_or_elsewhere(self):
        entry = self.modules.find("moe", 2)
        arena = kiln.aligned_buffer(entry.arena_bytes + 4096)
        with self.assertRaisesRegex(ValueError, "overlaps arena"):
            self.launch_tensors(2, arena=arena, out={"data": arena.data_ptr()})
        with self.assertRaisesRegex(ValueError, "overlaps arena|arena, which"):
            self.launch_tensors(2, arena=arena, x={"data": arena.data_ptr()})
        with self.assertRaisesRegex(TypeError, "arena is on cuda"):
            self.launch_tensors(2, arena=kiln.Buffer(
                arena.data_ptr(), entry.arena_bytes, "cuda"))

    def test_row35_refuses_inputs_of_another_type(self):
        for name, dtype, wanted in (
                ("x", "float16", "bf16"), ("x", "float32", "bf16"),
                ("topk_ids", "int64", "i32"), ("topk_ids", "float32", "i32"),
                ("topk_ids", "uint32", "i32"), ("topk_weights", "int32", "f32"),
                ("topk_weights", "bfloat16", "f32")):
            with self.subTest(name=name, dtype=dtype):
                self.refused_tensor(
                    TypeError, f"parameter {name} is .*, must be {wanted}",
                    **{name: {"dtype": dtype}})
        # The same of every other kind of buffer.
        for bad, found in ((array.array("d", bytes(16 * HIDDEN)), "f64"),
                           ((ctypes.c_float * (2 * HIDDEN))(), "f32"),
                           ((ctypes.c_uint16.__ctype_be__ * (2 * HIDDEN))(),
                            "u16 big-endian")):
            params = inputs(2)
            params[X] = bad
            with self.assertRaisesRegex(
                    TypeError, f"parameter x is {found}, must be bf16"):
                self.launch(2, params)

    def test_row35_and_36_refuse_inputs_of_another_shape(self):
        for name, shape, wanted in (
                ("x", (2, 2 * HIDDEN), [2, HIDDEN]),
                ("x", (1, 2, HIDDEN), [2, HIDDEN]),
                ("x", (1, HIDDEN), [2, HIDDEN]),
                ("topk_ids", (2, 2 * TOP_K), [2, TOP_K]),
                ("topk_weights", (2, TOP_K, 1), [2, TOP_K]),
                ("topk_weights", (1, TOP_K), [2, TOP_K])):
            with self.subTest(name=name, shape=shape):
                self.refused_tensor(
                    ValueError, f"parameter {name} has the shape " +
                    re.escape(f"{list(shape)}, must have {wanted}"),
                    **{name: {"shape": shape}})

    def test_row36_refuses_a_down_svh_of_other_channels(self):
        self.refused_tensor(
            ValueError, r"parameter down_svh has the shape \[4, 64\], must "
            r"have \[4, 128\]", down_svh={"shape": (EXPERTS, 64)})

    def test_row37_refuses_an_output_that_overlaps_what_is_read(self):
        for name in ("x", "topk_weights", "w_down", "down_svh"):
            with self.subTest(name):
                tensors = self.tensors(2)
                index = [p.name for p in self.modules.find("moe", 2).params
                         ].index(name)
                # Large enough that the two overlap nothing else.
                memory = kiln.aligned_buffer(1 << 20)
                tensors[OUT].data = memory.data_ptr()
                tensors[index].data = memory.data_ptr()
                arena = kiln.aligned_buffer(1 << 20)
                with self.assertRaisesRegex(
                        ValueError, "parameter out, which is written, overlaps "
                        f"parameter {name}: bytes 0x"):
                    self.modules.find("moe", 2).launch(2, tensors, arena)

    def test_row39_refuses_an_output_of_another_type_or_shape(self):
        self.refused_tensor(TypeError, "parameter out is bf16, must be f32",
                            out={"dtype": "bfloat16"})
        self.refused_tensor(ValueError, r"parameter out has the shape \[1, "
                            r"128\], must have \[2, 128\]",
                            out={"shape": (1, HIDDEN)})

    def test_array_interfaces_and_addresses_are_taken(self):
        expected = self.launch(2)

        class Array:
            def __init__(self, data):
                self.data = data
                address, count = data.buffer_info()
                self.__array_interface__ = {
                    "data": (address, False), "shape": (count,),
                    "typestr": {"H": "<u2", "i": "<i4",
                                "f": "<f4"}[data.typecode], "version": 3}

        kept = inputs(2)
        self.assertEqual(self.launch(2, [Array(p) for p in kept]), expected)
        self.assertEqual(
            self.launch(2, [p.buffer_info()[0] for p in kept]), expected)
        raw = [(ctypes.c_char * (len(p) * p.itemsize)).from_buffer(p)
               for p in kept]
        self.assertEqual(self.launch(2, raw), expected)

    def test_buffers_of_another_gpu_are_refused(self):
        entry = self.modules.find("moe", 1)
        check = entry._check_place
        self.addCleanup(setattr, self.modules, "backend", "cpu")
        self.addCleanup(setattr, self.modules, "device", None)
        self.modules.backend, self.modules.device = "cuda", 1
        check("x", "cuda", 1)
        check("x", "cuda", None)
        check("x", None, None)
        with self.assertRaisesRegex(
                TypeError, "x is on cuda:0, the modules run on cuda:1"):
            check("x", "cuda", 0)

    def test_the_device_of_a_context_is_asked_of_the_driver(self):

        class Driver:
            calls = []
            refuses = None

            def __getattr__(self, name):
                def call(argument):
                    self.calls.append(name)
                    if name == "cuCtxGetDevice":
                        argument._obj.value = 3
                    return 201 if name == self.refuses else 0
                return call

        driver = Driver()
        with unittest.mock.patch("ctypes.CDLL", return_value=driver):
            self.assertEqual(kiln._runtime._device_of(0), 3)
            self.assertEqual(driver.calls, ["cuCtxGetDevice"])
            driver.calls.clear()
            self.assertEqual(kiln._runtime._device_of(0x1000), 3)
            self.assertEqual(driver.calls, [
                "cuCtxPushCurrent_v2", "cuCtxGetDevice", "cuCtxPopCurrent_v2"])
            driver.refuses = "cuCtxGetDevice"
            error = self.refused(kiln.UsageError, kiln.Status.DRIVER,
                                 kiln._runtime._device_of, 0)
            self.assertEqual(error.driver_code, 201)
            driver.calls.clear()
            driver.refuses = "cuCtxPushCurrent_v2"
            self.refused(kiln.UsageError, kiln.Status.DRIVER,
                         kiln._runtime._device_of, 0x1000)
            # What was not pushed is not popped.
            self.assertNotIn("cuCtxPopCurrent_v2", driver.calls)

    def test_every_status_of_the_header_is_here(self):
        header = (HERE.parents[1] / "runtime" / "kiln.h").read_text()
        found = {name: int(value) for name, value in
                 re.findall(r"KILN_STATUS_(\w+) = (\d+)", header)}
        self.assertEqual(found, {s.name: s.value for s in kiln.Status})


@unittest.skipIf(torch is None, "PyTorch is not installed (python3-torch)")
class TorchTest(WithBundle):

    def tensors(self, m):
        types = {"H": torch.int16, "i": torch.int32, "f": torch.float32}
        return [torch.frombuffer(bytearray(p), dtype=types[p.typecode])
                for p in inputs(m)]

    def operator(self):
        if not hasattr(TorchTest, "op"):
            TorchTest.op = kiln.torch_op(self.modules, "moe", "kiln_test::moe")
        return TorchTest.op

    def shaped(self, m):
        """With the token count as first size of the first input."""
        x, *rest = self.tensors(m)
        return [x.reshape(m, HIDDEN), *rest]

    def test_tensors_are_taken(self):
        self.assertEqual(self.launch(3, self.tensors(3)), self.launch(3))

    def test_tensors_are_taken_through_dlpack(self):

        class OnlyDlpack:
            def __init__(self, tensor):
                self.__dlpack__ = tensor.__dlpack__
                self.__dlpack_device__ = tensor.__dlpack_device__

        params = self.tensors(3)
        self.assertEqual(self.launch(3, [OnlyDlpack(p) for p in params]),
                         self.launch(3))
        # A view that begins inside its storage.
        longer = torch.cat([torch.zeros(8, dtype=torch.int16), params[0]])
        params[0] = OnlyDlpack(longer[8:])
        self.assertEqual(self.launch(3, params), self.launch(3))
        params[0] = OnlyDlpack(torch.zeros(3 * HIDDEN, 2)[:, 0])
        with self.assertRaisesRegex(ValueError, "not contiguous"):
            self.launch(3, params)

    def test_a_strided_tensor_is_refused(self):
        params = self.tensors(3)
        params[0] = torch.zeros(3 * HIDDEN, 2)[:, 0]
        with self.assertRaisesRegex(ValueError, "not contiguous"):
            self.launch(3, params)

    def test_the_operator_gives_what_a_launch_gives(self):
        for m in (1, 2, 4):
            out = self.operator()(self.shaped(m))
            self.assertEqual(tuple(out.shape), (m, HIDDEN))
            self.assertEqual(out.flatten().tolist(), self.launch(m).tolist())

    def test_the_operator_agrees_with_float64(self):
        for m in (1, 4):
            tensors = moe_reference.make_inputs(REQUEST, m, m)
            expected = moe_reference.reference(tensors)
            self.assertLess(
                moe_reference.worst_error(self.operator()(tensors), expected),
                2e-3)
            x, ids, *rest = tensors
            other = moe_reference.reference([x, (ids + 1) % EXPERTS, *rest])
            self.assertGreater(moe_reference.worst_error(other, expected), 0.1)

    def test_an_operator_has_one_set_of_modules_for_each_device(self):
        with self.assertRaisesRegex(ValueError, "2 sets of modules for 1"):
            kiln.torch_op([self.modules, self.modules], "moe", "kiln_test::two")
        with self.assertRaisesRegex(ValueError, "0 sets of modules"):
            kiln.torch_op([], "moe", "kiln_test::none")

    def test_the_operator_knows_its_shape_on_meta_tensors(self):
        # torch 1.13 has no autograd fallback for meta tensors.
        with torch.inference_mode():
            out = self.operator()([t.to("meta") for t in self.shaped(4)])
        self.assertEqual(out.device.type, "meta")
        self.assertEqual(tuple(out.shape), (4, HIDDEN))
        self.assertEqual(out.dtype, torch.float32)

    def test_the_operator_refuses_what_the_bundle_does_not_declare(self):
        with self.assertRaisesRegex(Exception, "above its capacity 4"):
            self.operator()(self.shaped(5))

    def test_the_operator_works_under_torch_compile(self):
        if not hasattr(torch, "compile"):
            self.skipTest(f"torch {torch.__version__} has no torch.compile")
        op = self.operator()
        compiled = torch.compile(lambda tensors: op(tensors) * 2,
                                 backend="aot_eager", fullgraph=True)
        out = compiled(self.shaped(4))
        self.assertEqual(out.flatten().tolist(),
                         [2 * v for v in self.launch(4)])


if __name__ == "__main__":
    unittest.main()
