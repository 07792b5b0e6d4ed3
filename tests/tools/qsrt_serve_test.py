#!/usr/bin/env python3
"""A QSRT layer from its file to launches: kiln prepare, prewarm, freeze and
run --check, then the frozen kernels on the prepared parts, whose outputs must
add up to what qsrt_layer.py computes; which arm answers which token counts, and
what is refused.

    KILN_BIN_DIR=build/release/bin qsrt_serve_test.py libkiln_runtime.so
"""

import array
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] /
                       "runtime" / "python"))

import kiln  # noqa: E402
import qsrt_layer  # noqa: E402
import small_bundle  # noqa: E402
from prepared_layer import aligned, read_prepared  # noqa: E402
from small_checkpoint import bfloat16, from_bfloat16, write_qsrt_layer  # noqa: E402

LIBRARY = sys.argv.pop(1)
HIDDEN, PARTS, LAYER, TOP_K = 256, 2, 3, 2
# Pairs of 2 and 4 bits: none, of down, of gate and up, of both, all.
CODES = b"\x00\x01\x10\x11\x22"
# 0 SiLU, 1 SiTU.
ACTIVATIONS = [0, 1, 0, 1, 0]
REQUEST = {
    "name": "part", "op": "fused_moe", "layers": 1, "hidden": HIDDEN,
    "intermediate": 256, "experts": len(CODES), "top_k": TOP_K,
    "activation": "per_expert", "io_dtype": "bf16", "id_dtype": "i32",
    "weights": {"format": "qsrt", "pairs": "p24_p33", "scales": "shared"},
    "recipe": "w4a8", "decode_max_tokens": 2, "capacities": [2, 6]}
POOLS = {
    **REQUEST, "name": "pools", "activation": "situ", "id_dtype": "i64",
    "weights": {"format": "qsrt", "pairs": "p33_p43", "scales": "per_expert"},
    "recipe": "w4a16", "capacities": [1, 4]}
del POOLS["decode_max_tokens"]


def kiln_done(*arguments):
    done = small_bundle.kiln(*arguments)
    if done.returncode != 0:
        raise RuntimeError(f"kiln {arguments[0]} exits {done.returncode}: "
                           f"{done.stdout}{done.stderr}")
    return done


class QsrtServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not os.access(small_bundle.BIN / "kiln-cc-cpu", os.X_OK):
            raise unittest.SkipTest("this build has no kiln-cc-cpu")
        scratch = tempfile.mkdtemp(prefix="kiln_qsrt_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.folder = pathlib.Path(scratch)
        cls.layer = qsrt_layer.Layer(HIDDEN, PARTS, CODES, LAYER, 5)
        write_qsrt_layer(cls.folder, LAYER, CODES, cls.layer.shared_scales(),
                         cls.layer.atoms())
        cls.parts = []
        for part in range(PARTS):
            done = kiln_done("--json", "prepare", cls.folder, "-o",
                             cls.folder / "native", "--layer", LAYER, "--tp",
                             f"{part}/{PARTS}")
            cls.parts.append(json.loads(done.stdout)["file"])
        cls.bundle = small_bundle.make(cls.folder, "qsrt", REQUEST, POOLS)
        with kiln.Runtime(LIBRARY).open(str(cls.bundle)) as bundle:
            cls.modules = bundle.load(allow_unqualified=True)
        cls.addClassCleanup(cls.modules.close)

    def manifest(self, **changes):
        path = self.folder / "changed.json"
        path.write_text(json.dumps({"schema": "kiln.model/1", "name": "qsrt",
                                    "requests": [{**REQUEST, **changes}]}))
        return path

    # Numbers.

    def inputs(self, tokens):
        """Some routes are inactive; every expert has one."""
        rng = qsrt_layer.random.Random(11)
        x = [list(from_bfloat16(bfloat16(
            [rng.gauss(0, 1) for _ in range(HIDDEN)]))) for _ in range(tokens)]
        ids = [0, 4, 3, 1, 2, 2, 1, -1, 5, 0, -1, 9][:tokens * TOP_K]
        weights = [rng.uniform(0.2, 1) for _ in ids]
        return x, ids, array.array("f", weights).tolist()

    def expected(self, x, ids, weights):
        out = []
        for token, row in enumerate(x):
            total = [0.0] * HIDDEN
            for j in range(TOP_K):
                route = token * TOP_K + j
                if not 0 <= ids[route] < len(CODES):
                    continue
                activation = (qsrt_layer.situ if ACTIVATIONS[ids[route]]
                              else qsrt_layer.silu)
                y = self.layer.route(ids[route], row, activation)
                total = [t + weights[route] * v for t, v in zip(total, y)]
            out.append(total)
        return out

    def launch(self, x, ids, weights):
        """The outputs of all parts, added."""
        tokens = len(x)
        entry = self.modules.find("part", tokens)
        total = [[0.0] * HIDDEN for _ in x]
        for path in self.parts:
            given = {"x": b"".join(map(bfloat16, x)),
                     "topk_ids": struct.pack(f"<{len(ids)}i", *ids),
                     "topk_weights": struct.pack(f"<{len(weights)}f", *weights),
                     "activations": struct.pack(f"<{len(CODES)}i",
                                                *ACTIVATIONS)}
            names = [p.name for p in entry.params if p.name not in given]
            names.remove("out")
            native = read_prepared(path, names)
            out = array.array("f", [math.nan] * (tokens * HIDDEN))
            params = []
            for index, param in enumerate(entry.params):
                if param.name == "out":
                    params.append(out)
                    continue
                data = {**native, **given}[param.name]
                # The prepared tensors are the parameters, byte for byte.
                self.assertEqual(entry.param_bytes(index, tokens), len(data),
                                 param.name)
                params.append(aligned(data))
            entry.launch(tokens, params, kiln.aligned_buffer(entry.arena_bytes))
            for token, row in enumerate(total):
                for c in range(HIDDEN):
                    row[c] += out[token * HIDDEN + c]
        return total

    def errors(self, tokens):
        x, ids, weights = self.inputs(tokens)
        return [math.dist(row, wanted) / math.hypot(*wanted)
                if any(wanted) else math.hypot(*row)
                for row, wanted in zip(self.launch(x, ids, weights),
                                       self.expected(x, ids, weights))]

    def test_the_codebook_of_the_oracle_is_that_of_the_vector_file(self):
        vectors = json.loads((small_bundle.SOURCE / "tests/data/vectors" /
                              "codebooks.json").read_text())
        self.assertEqual(hashlib.sha256(qsrt_layer.CODES).hexdigest(),
                         vectors["sha256"]["t12_4096_bytes"])

    def test_the_parts_add_up_to_the_layer(self):
        for error in self.errors(6):
            self.assertLess(error, 2e-3)

    def test_with_few_tokens_the_error_is_that_of_8_bit_activations(self):
        for error in self.errors(2):
            self.assertLess(error, 0.1)
            self.assertGreater(error, 5e-3)

    # Plans.

    def test_up_to_the_limit_8_bits_answer_above_it_16(self):
        done = kiln_done("plan", self.manifest(), "--target", "cpu",
                         "--max-candidates", "2")
        found = {}
        for line in done.stdout.splitlines():
            interval = re.search(r" m (\d+\.\.\d+)$", line)
            if interval:
                found[interval[1]] = set()
            point = re.match(r"  fused_moe\.qsrt_cpu\{activation_bits=(\d+)",
                             line)
            if point:
                list(found.values())[-1].add(int(point[1]))
        self.assertEqual(found, {"1..2": {8}, "3..6": {16}})

    def test_every_count_passes_the_oracle_of_its_arm(self):
        for entry, counts in (("part", (1, 2, 3, 6)), ("pools", (1, 3))):
            for tokens in counts:
                done = kiln_done("run", self.bundle, "--entry", entry,
                                 "--tokens", tokens, "--check",
                                 "--allow-unqualified")
                self.assertIn("PASS", done.stdout)

    def test_every_plan_repeats_its_digest(self):
        done = kiln_done("verify", self.bundle, "--selftest",
                         "--allow-unqualified")
        self.assertEqual(done.stdout.count("passed"), 4)

    def test_another_kind_of_pairs_is_another_plan(self):
        done = small_bundle.kiln(
            "--cache", self.folder / "qsrt.cache", "freeze",
            self.manifest(weights={"format": "qsrt", "pairs": "p33_p43",
                                   "scales": "shared"}),
            "--target", "cpu", "--max-candidates", "1", "-o",
            self.folder / "other.kiln", "--allow-unqualified")
        self.assertEqual(done.returncode, 3, done.stdout)
        self.assertIn("no plan for part m 1..2", done.stderr)

    # Refusals.

    def test_more_channels_than_a_part_are_refused(self):
        done = small_bundle.kiln("plan", self.manifest(intermediate=512),
                                 "--target", "cpu")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('"intermediate" is 512, must be 256', done.stderr)


if __name__ == "__main__":
    unittest.main()
