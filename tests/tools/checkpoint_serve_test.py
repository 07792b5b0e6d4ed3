#!/usr/bin/env python3
"""From a checkpoint to an engine: kiln encode, describe, prepare, prewarm,
freeze and run --check on generated files, then a launch of the frozen kernels
on the prepared weights, which must compute what the real weights compute.

    KILN_BIN_DIR=build/release/bin checkpoint_serve_test.py libkiln_runtime.so
"""

import array
import json
import math
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
from prepared_layer import aligned, read_prepared  # noqa: E402
from small_checkpoint import (EXPERTS, HIDDEN, INTERMEDIATE, exl3,  # noqa: E402
                              bfloat16, from_bfloat16, write_btx, write_config,
                              write_real_checkpoint, write_safetensors)

LIBRARY = sys.argv.pop(1)
TOKENS, TOP_K = 2, 2
SLOTS = ("w_gate", "w_up", "w_down", "gate_suh", "up_suh", "rotations",
         "down_svh")
# Encoded from real weights: name, codebook, rates, what the output may be off
# by. The error of a matrix is about 1.2 * 2^-K of its norm; three add up.
ENCODED = [("inst", "3inst", "6", 0.06), ("mcg", "mcg", "5,6,7", 0.09),
           ("mul1", "mul1", "7", 0.03)]
REAL = {"hidden": 128, "intermediate": 256, "experts": 2}


def write_legacy(folder, spelled_out):
    """Signs as bits, or as the +1 and -1 that they stand for."""
    os.makedirs(folder)
    write_config(folder)
    rng = random.Random(3)
    tensors = {}
    for expert in range(EXPERTS):
        for name, rows, columns in (("gate_proj", HIDDEN, INTERMEDIATE),
                                    ("up_proj", HIDDEN, INTERMEDIATE),
                                    ("down_proj", INTERMEDIATE, HIDDEN)):
            key = f"model.layers.0.mlp.experts.{expert}.{name}"
            group = exl3(key, rows, columns, 2)
            group[key + ".trellis"] = (
                *group[key + ".trellis"][:2],
                rng.randbytes(rows * columns * 2 // 8))
            for side, size in (("u", rows), ("v", columns)):
                bits = rng.randbytes(size // 8)
                if spelled_out:
                    signs = [-1.0 if bits[i // 8] >> i % 8 & 1 else 1.0
                             for i in range(size)]
                    group[f"{key}.s{side}h"] = (
                        "F16", [size], struct.pack(f"<{size}e", *signs))
                else:
                    del group[f"{key}.s{side}h"]
                    group[f"{key}.s{side}"] = ("I16", [size // 16], bits)
            tensors |= group
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


def real_moe(tensors, x, ids, weights):
    """What the weights compute: silu(gate x) (up x) through down."""

    def times(key, vector):
        _, (rows, columns), data = tensors[key + ".weight"]
        values = from_bfloat16(data)
        return [sum(map(float.__mul__, values[r * columns:(r + 1) * columns],
                        vector)) for r in range(rows)]

    out = []
    for token in range(TOKENS):
        total = [0.0] * REAL["hidden"]
        for j in range(TOP_K):
            route = token * TOP_K + j
            key = f"model.layers.0.mlp.experts.{ids[route]}."
            gate = times(key + "gate_proj", x[token])
            up = times(key + "up_proj", x[token])
            middle = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
            for c, y in enumerate(times(key + "down_proj", middle)):
                total[c] += weights[route] * y
        out.append(total)
    return out


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.mkdtemp(prefix="kiln_serve_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.folder = pathlib.Path(scratch)
        cls.real, requests = {}, []
        for name, codebook, bits, _ in ENCODED:
            cls.real[name] = write_real_checkpoint(
                cls.folder / f"{name}-real", **REAL)
            cls.run_kiln("encode", cls.folder / f"{name}-real", "-o",
                         cls.folder / name, "--bits", bits, "--codebook",
                         codebook)
        write_legacy(cls.folder / "legacy", False)
        write_legacy(cls.folder / "spelled", True)
        os.makedirs(cls.folder / "btx")
        write_btx(cls.folder / "btx")
        cls.geometries = {}
        for name in [row[0] for row in ENCODED] + ["legacy", "btx"]:
            path = cls.folder / f"{name}.json"
            shown = cls.run_kiln("describe", cls.folder / name, "-o", path)
            cls.geometries[name] = shown.stdout.splitlines()[-1]
            [request] = json.loads(path.read_text())["requests"]
            # What describe wrote, under its own name and for few tokens.
            requests.append(request | {"name": name, "capacities": [TOKENS]})
            cls.run_kiln("prepare", cls.folder / name, "-o",
                         cls.folder / f"{name}-native", "--layer", "0")
        cls.bundle = small_bundle.make(cls.folder, "all", *requests)
        with kiln.Runtime(LIBRARY).open(str(cls.bundle)) as bundle:
            cls.modules = bundle.load(allow_unqualified=True)
        cls.addClassCleanup(cls.modules.close)

    @staticmethod
    def run_kiln(*arguments):
        done = small_bundle.kiln(*arguments)
        if done.returncode != 0:
            raise RuntimeError(f"kiln {arguments[0]} exits {done.returncode}: "
                               f"{done.stdout}{done.stderr}")
        return done

    def launch(self, name, x, ids, weights):
        native = read_prepared(
            self.folder / f"{name}-native" / "layer-00000.safetensors", SLOTS)
        entry = self.modules.find(name, TOKENS)
        out = array.array("f", [math.nan] * (TOKENS * HIDDEN))
        params = [aligned(b"".join(map(bfloat16, x))),
                  aligned(struct.pack(f"<{len(ids)}i", *ids)),
                  aligned(struct.pack(f"<{len(weights)}f", *weights)),
                  *(aligned(native[slot]) for slot in SLOTS)]
        # The prepared tensors are the parameters, byte for byte.
        for index, slot in enumerate(SLOTS):
            self.assertEqual(entry.params[3 + index].name, slot)
            self.assertEqual(entry.param_bytes(3 + index, TOKENS),
                             len(native[slot]), slot)
        entry.launch(TOKENS, [*params, out],
                     kiln.aligned_buffer(entry.arena_bytes))
        return [out[t * HIDDEN:(t + 1) * HIDDEN] for t in range(TOKENS)]

    def inputs(self):
        rng = random.Random(11)
        x = [list(from_bfloat16(bfloat16(
            [rng.gauss(0, 1) for _ in range(HIDDEN)]))) for _ in range(TOKENS)]
        return x, [0, 1, 1, 0], [0.75, 0.25, 0.5, 0.5]

    def test_every_entry_agrees_with_the_oracle(self):
        for name in self.geometries:
            with self.subTest(name):
                done = self.run_kiln("run", self.bundle, "--entry", name,
                                     "--tokens", TOKENS, "--check",
                                     "--allow-unqualified")
                self.assertIn(name, done.stdout)

    def test_geometries_are_those_of_the_files(self):
        for name, wanted in {
                "inst": "H128 I256 E2 k2 exl3-3inst K6",
                "mcg": "H128 I256 E2 k2 exl3-mcg K5/6/7",
                "mul1": "H128 I256 E2 k2 exl3-mul1 K7",
                "legacy": "H128 I256 E4 k2 exl3-mcg K2",
                "btx": "H128 I256 E4 k2 exl3-mcg K3"}.items():
            self.assertIn(wanted, self.geometries[name])

    def test_prepared_weights_compute_what_the_real_ones_do(self):
        x, ids, weights = self.inputs()
        for name, _, _, bound in ENCODED:
            with self.subTest(name):
                expected = real_moe(self.real[name], x, ids, weights)
                found = self.launch(name, x, ids, weights)
                for row, wanted in zip(found, expected):
                    error = math.dist(row, wanted) / math.hypot(*wanted)
                    self.assertLess(error, bound)
                    # Rates of these sizes leave an error; none would mean that
                    # the expected values came from the same place.
                    self.assertGreater(error, bound / 30)

    def test_legacy_signs_are_prepared_as_the_scales_that_they_stand_for(self):
        self.run_kiln("prepare", self.folder / "spelled", "-o",
                      self.folder / "spelled-native", "--layer", "0")
        files = [(self.folder / f"{name}-native" /
                  "layer-00000.safetensors").read_bytes()
                 for name in ("legacy", "spelled")]
        self.assertEqual(files[0], files[1])
        out = self.launch("legacy", *self.inputs())
        self.assertTrue(all(math.isfinite(v) for row in out for v in row))
        self.assertTrue(any(v != 0 for v in out[0]))

    def test_a_btx_layer_is_launched_as_it_was_prepared(self):
        out = self.launch("btx", *self.inputs())
        self.assertTrue(all(math.isfinite(v) for row in out for v in row))
        self.assertTrue(any(v != 0 for v in out[0]))


if __name__ == "__main__":
    unittest.main()
