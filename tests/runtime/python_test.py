#!/usr/bin/env python3
"""The Python package against the shared library, on a bundle for this CPU; the
PyTorch part where torch is installed.

    python_test.py libkiln_runtime.so
"""

import array
import ctypes
import json
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

    def test_array_interfaces_and_addresses_are_taken(self):
        expected = self.launch(2)

        class Array:
            def __init__(self, data):
                self.data = data
                address, count = data.buffer_info()
                self.__array_interface__ = {
                    "data": (address, False), "shape": (count,),
                    "typestr": f"<u{data.itemsize}", "version": 3}

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
