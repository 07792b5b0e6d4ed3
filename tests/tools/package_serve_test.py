#!/usr/bin/env python3
"""A kernel package's plan from its folder to launches: raced, frozen, checked
when it is loaded and whenever golden replay is asked for, and at no launch.

    KILN_BIN_DIR=build/release/bin package_serve_test.py libkiln_runtime.so
"""

import ctypes
import hashlib
import json
import math
import mmap
import os
import pathlib
import random
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] /
                       "runtime" / "python"))

import kiln  # noqa: E402
import small_bundle  # noqa: E402
from prepared_layer import aligned  # noqa: E402
from small_checkpoint import bfloat16  # noqa: E402

LIBRARY = sys.argv.pop(1)
EXAMPLE = small_bundle.SOURCE / "tools/examples/package_cpu"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 4, 2
REQUEST = {**small_bundle.REQUEST, "hidden": HIDDEN,
           "intermediate": INTERMEDIATE, "experts": EXPERTS, "top_k": TOP_K,
           "capacities": [1]}
# What the thrifty package needs, and none of Kiln's own candidates.
ARENA = 4 * TOP_K * (2 * HIDDEN + INTERMEDIATE)
# The kernel that writes the output, and the instruction that ends it at once.
KERNEL, RETURN = "example_moe_combine", 0xC3


def thrifty_package(folder):
    """The example, whose second product puts its rows where the input of the
    first one was."""
    shutil.copytree(EXAMPLE, folder)
    path = folder / "package.json"
    text = path.read_text()
    routed = ',\n  {"name": "routed", "bytes": "4 * capacity * top_k * hidden"}'
    if routed not in text:
        raise RuntimeError(f"{path} has another arena than the test expects")
    path.write_text(text.replace(routed, "").replace("arena:routed",
                                                     "arena:gate_in"))


def code_offset(program, name):
    """Where a function's code is in a shared object, and in its memory."""
    table, = struct.unpack_from("<Q", program, 40)
    size, count = struct.unpack_from("<2H", program, 58)
    sections = [struct.unpack_from("<2I4Q2I2Q", program, table + i * size)
                for i in range(count)]
    symbols = next(s for s in sections if s[1] == 11)  # SHT_DYNSYM
    names = sections[symbols[6]][4]
    for at in range(symbols[4], symbols[4] + symbols[5], symbols[9]):
        text, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", program, at)
        end = program.index(b"\0", names + text)
        if program[names + text:end] == name.encode():
            section = sections[index]
            if section[3] != section[4]:
                raise RuntimeError(f"{name} is loaded to another offset")
            return value
    raise RuntimeError(f"no function {name}")


def loaded_program():
    """Where the only program that is loaded begins."""
    starts = [int(line.split("-")[0], 16)
              for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
              if "memfd:kiln-program" in line and
              line.split()[2] == "00000000"]
    if len(starts) != 1:
        raise RuntimeError(f"{len(starts)} programs are loaded, expected 1")
    return starts[0]


def write_code(address, byte):
    page = address & -mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    for protection, act in ((mmap.PROT_READ | mmap.PROT_WRITE, True),
                            (mmap.PROT_READ | mmap.PROT_EXEC, False)):
        if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, protection):
            raise OSError(ctypes.get_errno(), "mprotect")
        if act:
            ctypes.memset(address, byte, 1)


class PackageServeTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        if not os.access(small_bundle.BIN / "kiln-cc-cpu", os.X_OK):
            raise unittest.SkipTest("this build has no kiln-cc-cpu")
        scratch = tempfile.mkdtemp(prefix="kiln_package_serve_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.folder = pathlib.Path(scratch)
        thrifty_package(cls.folder / "package")
        manifest = cls.folder / "model.json"
        manifest.write_text(json.dumps({
            "schema": "kiln.model/1", "name": "small", "requests": [REQUEST]}))
        cls.bundle = cls.folder / "small.kiln"
        planning = [manifest, "--target", "cpu", "--max-arena", ARENA,
                    "--package", cls.folder / "package"]
        cls.report = cls.kiln("--json", "prewarm", *planning, "--budget", "0.2")
        cls.kiln("freeze", *planning, "-o", cls.bundle, "--allow-unqualified")
        cls.bytes = cls.bundle.read_bytes()
        section, = json.loads(
            cls.kiln("--json", "inspect", cls.bundle))["sections"]
        cls.plan, = section["entries"][0]["plans"]
        program, = section["programs"]
        cls.begin = cls.bytes.index(b"\x7fELF")
        cls.program = cls.bytes[cls.begin:cls.begin + program["bytes"]]
        if hashlib.sha256(cls.program).hexdigest() != program["binary_digest"]:
            raise RuntimeError("the program is elsewhere in the bundle")
        cls.offset = code_offset(cls.program, KERNEL)
        cls.runtime = kiln.Runtime(LIBRARY)

    @classmethod
    def kiln(cls, *arguments, code=0):
        """What a verb prints."""
        done = small_bundle.kiln("--cache", cls.folder / "cache", *arguments)
        if done.returncode != code:
            raise RuntimeError(f"kiln {arguments} exits {done.returncode}: "
                               f"{done.stdout}{done.stderr}")
        return done.stdout + done.stderr * (code != 0)

    def load(self, path):
        with self.runtime.open(str(path)) as bundle:
            modules = bundle.load(allow_unqualified=True)
        self.addCleanup(modules.close)
        return modules

    def written(self, data):
        path = self.folder / "changed.kiln"
        path.write_bytes(data)
        return path

    def launch(self, modules):
        """One token's row, or the NaNs that were there before."""
        rng = random.Random(1)
        entry = modules.find("moe", 1)
        params = []
        for index, param in enumerate(entry.params):
            count = entry.param_bytes(index, 1)
            if param.output:
                data = struct.pack("<f", math.nan) * (count // 4)
            elif param.name == "x":
                data = bfloat16([rng.gauss(0, 1) for _ in range(HIDDEN)])
            elif param.name == "topk_ids":
                data = struct.pack("<2i", 0, 3)
            elif param.name == "topk_weights":
                data = struct.pack("<2f", 0.75, 0.25)
            elif param.dtype == "f16":
                data = struct.pack(f"<{count // 2}e", *[
                    rng.choice((-1, 1)) * rng.uniform(0.05, 0.15)
                    for _ in range(count // 2)])
            else:
                data = rng.randbytes(count)
            params.append(aligned(data))
        entry.launch(1, params, kiln.aligned_buffer(entry.arena_bytes))
        out, = [p for p, slot in zip(params, entry.params) if slot.output]
        return struct.unpack(f"<{HIDDEN}f",
                             ctypes.string_at(out.data_ptr(), 4 * HIDDEN))

    def expect_mismatch(self, modules):
        with self.assertRaises(kiln.PreflightError) as caught:
            modules.selftest()
        self.assertEqual(caught.exception.status,
                         kiln.Status.SELFTEST_MISMATCH)

    def test_the_packages_plan_is_measured_and_frozen_and_right(self):
        report = json.loads(self.report.strip().splitlines()[-1])
        self.assertTrue(report["complete"])
        self.assertTrue(self.plan["label"].startswith("example.scalar@"))
        self.assertEqual(self.plan["state"], "measured")
        self.assertFalse(self.plan["qualified"])
        done = json.loads(self.kiln(
            "--json", "run", self.bundle, "--entry", "moe", "--tokens", 1,
            "--check", "--allow-unqualified"))
        self.assertTrue(done["passed"] and done["replayed"])
        self.assertEqual(done["plan"], self.plan["label"])

    def test_an_engine_must_consent(self):
        with self.runtime.open(str(self.bundle)) as bundle:
            with self.assertRaises(kiln.PreflightError) as caught:
                bundle.load()
        self.assertEqual(caught.exception.status,
                         kiln.Status.UNQUALIFIED_PLANS)

    def test_golden_replay_passes_whenever_it_is_asked_for(self):
        modules = self.load(self.bundle)
        first = self.launch(modules)
        self.assertTrue(all(map(math.isfinite, first)) and any(first))
        for _ in range(2):
            self.assertEqual(modules.selftest(), kiln.Selftest(1, 0, 0))
            self.assertEqual(self.launch(modules), first)

    def test_a_changed_byte_of_its_program_is_refused(self):
        last = len(self.program) - 1
        for at in [*range(0, last, 97), self.offset, last]:
            data = bytearray(self.bytes)
            data[self.begin + at] ^= 1
            with self.assertRaises(kiln.BundleError) as caught:
                self.runtime.open(str(self.written(data)))
            self.assertEqual(caught.exception.status,
                             kiln.Status.BUNDLE_DAMAGED)
        self.kiln("verify", self.folder / "changed.kiln", code=4)

    def test_a_changed_instruction_under_a_right_root_fails_golden_replay(self):
        """Whoever wrote this bundle can write a root too: it loads, and its
        launches tell nothing."""
        data = bytearray(self.bytes)
        data[self.begin + self.offset] = RETURN
        digest = hashlib.sha256(data[self.begin:self.begin + len(self.program)])
        at = data.index(hashlib.sha256(self.program).digest())
        data[at:at + 32] = digest.digest()
        small_bundle.repair_root(data)
        modules = self.load(self.written(data))
        self.assertTrue(all(map(math.isnan, self.launch(modules))))
        self.expect_mismatch(modules)

    def test_a_launch_checks_nothing_and_golden_replay_does_again(self):
        """The limit of what a load promises: neither the file nor the program
        in memory is looked at by a launch."""
        path = self.written(self.bytes)
        modules = self.load(path)
        first = self.launch(modules)
        path.write_bytes(bytes(len(self.bytes)))
        self.assertEqual(self.launch(modules), first)
        path.unlink()
        self.assertEqual(self.launch(modules), first)
        code = loaded_program() + self.offset
        was = ctypes.string_at(code, 1)[0]
        self.assertEqual(was, self.program[self.offset])
        self.assertNotEqual(was, RETURN)
        write_code(code, RETURN)
        try:
            self.assertTrue(all(map(math.isnan, self.launch(modules))))
            self.expect_mismatch(modules)
        finally:
            write_code(code, was)
        self.assertEqual(modules.selftest(), kiln.Selftest(1, 0, 0))
        self.assertEqual(self.launch(modules), first)


if __name__ == "__main__":
    unittest.main()
