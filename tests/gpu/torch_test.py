#!/usr/bin/env python3
"""The Python package on a GPU beside PyTorch: a bundle that kiln makes here,
launched on torch's contexts, streams and graphs, against float64.

    torch_test.py libkiln_runtime.so

Exits with 77 where torch, a GPU or a compiler for it is missing.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"),
                str(HERE.parents[1] / "runtime" / "python")]

SKIPPED = 77


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


try:
    import torch
except ImportError:
    # Machines have torch in the interpreter of the shell's path, if anywhere.
    other = shutil.which("python3")
    if "--same-interpreter" in sys.argv or other is None:
        skip("PyTorch is not installed")
    os.execv(other, [other, *sys.argv, "--same-interpreter"])
if "--same-interpreter" in sys.argv:
    sys.argv.remove("--same-interpreter")
if not torch.cuda.is_available():
    skip("torch sees no GPU")

import kiln  # noqa: E402
import moe_reference  # noqa: E402
import small_bundle  # noqa: E402

REQUEST = {**small_bundle.REQUEST, "hidden": 256, "experts": 8,
           "capacities": [1, 4, 32]}
CAPACITY = 32
# The unrounded reference against fp16 operands; a wrong expert, scale or
# element gives 0.1 and more.
TOLERANCE = 2e-3
GPUS = torch.cuda.device_count()
LIBRARY = sys.argv.pop(1)


def on(device, tensors):
    return [t.to(device) for t in tensors]


class TorchGpuTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        found = json.loads(small_bundle.kiln("--json", "doctor").stdout)
        if not found["devices"] or not found["nvrtc"]["found"]:
            raise unittest.SkipTest("kiln finds no GPU or no NVRTC")
        scratch = tempfile.mkdtemp(prefix="kiln_torch_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.path = small_bundle.make(scratch, "moe", REQUEST,
                                     target=found["devices"][0]["target"])
        cls.runtime = kiln.Runtime(LIBRARY)
        cls.modules = cls.load(0)
        cls.both = [cls.modules]
        if GPUS > 1:
            cls.both.append(cls.load(1))
        cls.op = staticmethod(
            kiln.torch_op(cls.both, "moe", "kiln_gpu_test::moe"))

    @classmethod
    def tearDownClass(cls):
        torch.cuda.synchronize()
        for modules in cls.both:
            modules.close()

    @classmethod
    def load(cls, device):
        """On the device's primary context, which torch makes current."""
        with torch.cuda.device(device):
            torch.zeros(1, device="cuda")
            with cls.runtime.open(cls.path) as bundle:
                modules = bundle.load(target="cuda", allow_unqualified=True)
        assert modules.device == device
        return modules

    def check(self, out, inputs):
        expected = moe_reference.reference(inputs)
        self.assertEqual(tuple(out.shape), tuple(expected.shape))
        error = moe_reference.worst_error(out, expected)
        self.assertLess(error, TOLERANCE)
        return error

    def launch(self, modules, inputs, stream=None):
        """Through Entry.launch; output and scratch are poisoned first."""
        m = inputs[0].shape[0]
        entry = modules.find("moe", m)
        device = inputs[0].device
        out = torch.full((m, REQUEST["hidden"]), float("nan"), device=device)
        arena = torch.full((entry.arena_bytes + 256,), 255, dtype=torch.uint8,
                           device=device)
        arena = arena[-arena.data_ptr() % 256:][:entry.arena_bytes]
        entry.launch(m, [*inputs, out], arena,
                     stream or torch.cuda.current_stream(device))
        return out

    def test_the_reference_tells_wrong_results(self):
        x, ids, *rest = moe_reference.make_inputs(REQUEST, 4, 1)
        right = moe_reference.reference([x, ids, *rest])
        wrong = moe_reference.reference([x, (ids + 1) % 8, *rest])
        self.assertGreater(moe_reference.worst_error(wrong, right), 0.1)

    def test_a_launch_agrees_with_float64(self):
        errors = {}
        for m in (1, 2, 4, 5, 17, CAPACITY):
            inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, m, m))
            errors[m] = self.check(self.launch(self.modules, inputs), inputs)
        print("worst row errors:", {m: f"{e:.1e}" for m, e in errors.items()})

    def test_the_operator_agrees_with_float64(self):
        for m in (1, 3, CAPACITY):
            inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, m, m + 9))
            self.check(self.op(inputs), inputs)

    def test_the_operator_passes_the_checks_of_torch_library(self):
        if not hasattr(torch.library, "opcheck"):
            self.skipTest(f"torch {torch.__version__} has no opcheck")
        inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, 4, 2))
        torch.library.opcheck(self.op, (inputs,), test_utils=(
            "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))

    def test_work_waits_for_its_place_on_the_current_stream(self):
        inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, 8, 3))
        for call in (self.op, lambda i: self.launch(self.modules, i)):
            late = [torch.zeros_like(inputs[0]), *inputs[1:]]
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                # On any other stream the launch would still see zeros.
                torch.cuda._sleep(50_000_000)
                late[0].copy_(inputs[0])
                out = call(late)
                torch.cuda.current_stream().synchronize()
            self.check(out, inputs)

    def test_streams_and_threads_launch_at_once(self):
        sets = [on("cuda:0", moe_reference.make_inputs(REQUEST, m, m + 20))
                for m in (1, 4, 7, CAPACITY)]
        outs = [[] for _ in sets]
        torch.cuda.synchronize()

        def work(index):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    outs[index].append(self.op(sets[index]))
                    outs[index].append(self.launch(self.modules, sets[index]))
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=work, args=(i,))
                   for i in range(len(sets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for inputs, results in zip(sets, outs):
            self.assertEqual(len(results), 40)
            expected = moe_reference.reference(inputs)
            for out in results:
                self.assertLess(moe_reference.worst_error(out, expected),
                                TOLERANCE)

    def captured(self, call, m):
        inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, m, 40))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch's own capture stream is on the device that captured first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(0)):
            out = call(inputs)
        for seed in range(41, 45):
            # Routes change with the data; the addresses stay.
            fresh = moe_reference.make_inputs(REQUEST, m, seed)
            for old, new in zip(inputs, fresh):
                old.copy_(new)
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            self.check(out, fresh)

    def test_the_operator_is_captured_and_replays_with_changed_inputs(self):
        for m in (1, 6):
            self.captured(self.op, m)

    def test_the_first_launch_of_modules_may_be_captured(self):
        modules = self.load(0)
        self.captured(lambda inputs: self.launch(modules, inputs), 9)
        modules.close()

    def test_the_operator_works_under_torch_compile(self):
        if not hasattr(torch, "compile"):
            self.skipTest(f"torch {torch.__version__} has no torch.compile")

        op = self.op

        def layer(x, rest):
            return x + torch.relu(op([x * 2, *rest]))

        for options in ({}, {"mode": "reduce-overhead"}):
            torch.compiler.reset()
            compiled = torch.compile(layer, fullgraph=True, **options)
            for m, seed in ((4, 50), (4, 51), (4, 52), (8, 53), (16, 54)):
                x, *rest = on("cuda:0",
                              moe_reference.make_inputs(REQUEST, m, seed))
                with torch.inference_mode():
                    out = compiled(x, rest).clone()
                expected = x.cpu().double() + torch.relu(
                    moe_reference.reference([x * 2, *rest]))
                # The operator is in float32, and so is the sum.
                self.assertEqual(out.dtype, torch.float32)
                self.assertLess(moe_reference.worst_error(out, expected),
                                TOLERANCE)

    def test_undeclared_launches_are_refused(self):
        inputs = on("cuda:0",
                    moe_reference.make_inputs(REQUEST, CAPACITY + 1, 4))
        with self.assertRaisesRegex(Exception, "above its capacity 32"):
            self.op(inputs)
        inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, 4, 4))
        with self.assertRaisesRegex(TypeError, "topk_ids is on cpu"):
            self.launch(self.modules,
                        [inputs[0], inputs[1].cpu(), *inputs[2:]])
        with self.assertRaisesRegex(ValueError, "not contiguous"):
            self.launch(self.modules, [inputs[0].repeat(1, 2)[:, ::2],
                                       *inputs[1:]])
        out = self.op(inputs)  # nothing is left broken
        self.check(out, inputs)

    @unittest.skipIf(GPUS < 2, "one GPU")
    def test_another_device_works_while_the_first_is_current(self):
        inputs = moe_reference.make_inputs(REQUEST, 8, 5)
        there = on("cuda:1", inputs)
        torch.cuda.set_device(0)
        self.check(self.launch(self.both[1], there), inputs)
        out = self.op(there)
        self.assertEqual(out.device, torch.device("cuda:1"))
        self.check(out, inputs)
        self.assertEqual(torch.cuda.current_device(), 0)

    @unittest.skipIf(GPUS < 2, "one GPU")
    def test_two_devices_work_at_once(self):
        sets = [on(f"cuda:{d}", moe_reference.make_inputs(REQUEST, 8, 60 + d))
                for d in (0, 1)]
        outs = [[], []]
        for device in (0, 1):
            with torch.cuda.device(device):
                torch.cuda._sleep(50_000_000)
        for _ in range(20):
            for device in (0, 1):
                outs[device].append(self.op(sets[device]))
        for inputs, results in zip(sets, outs):
            torch.cuda.synchronize(inputs[0].device)
            expected = moe_reference.reference(inputs)
            for out in results:
                self.assertLess(moe_reference.worst_error(out, expected),
                                TOLERANCE)

    @unittest.skipIf(GPUS < 2, "one GPU")
    def test_a_graph_of_another_device_is_captured(self):
        with torch.cuda.device(1):
            inputs = on("cuda:1", moe_reference.make_inputs(REQUEST, 8, 70))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
                out = self.op(inputs)
        for seed in (71, 72):
            fresh = moe_reference.make_inputs(REQUEST, 8, seed)
            for old, new in zip(inputs, fresh):
                old.copy_(new)
            torch.cuda.synchronize(1)
            graph.replay()
            torch.cuda.synchronize(1)
            self.check(out, fresh)

    @unittest.skipIf(GPUS < 2, "one GPU")
    def test_tensors_and_streams_of_another_device_are_refused(self):
        inputs = on("cuda:0", moe_reference.make_inputs(REQUEST, 4, 6))
        mixed = [inputs[0], inputs[1].to("cuda:1"), *inputs[2:]]
        with self.assertRaisesRegex(
                TypeError, "topk_ids is on cuda:1, the modules run on cuda:0"):
            self.launch(self.modules, mixed)
        with self.assertRaisesRegex(TypeError, "stream is on cuda:1"):
            self.launch(self.modules, inputs,
                        stream=torch.cuda.Stream(device=1))


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {GPUS} x "
          f"{torch.cuda.get_device_name(0)}")
    program = unittest.main(exit=False, verbosity=2)
    result = program.result
    if not result.wasSuccessful():
        sys.exit(1)
    if result.testsRun == 0:
        skip(result.skipped[0][1] if result.skipped else "no test ran")
