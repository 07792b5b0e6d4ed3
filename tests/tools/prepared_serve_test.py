#!/usr/bin/env python3
"""A TrellisMX layer from real weights to launches at twelve token counts up to
4096: kiln encode, prepare, prewarm and freeze, then the frozen kernels on the
prepared tensors, of which every row must be what mx_layer.py computes with the
sidecar; and again through the same plan and buffers with other contents.

    KILN_BIN_DIR=build/release/bin prepared_serve_test.py libkiln_runtime.so
"""

import array
import ctypes
import hashlib
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
import mx_layer  # noqa: E402
import small_bundle  # noqa: E402
from prepared_layer import aligned, read_prepared  # noqa: E402
from small_checkpoint import (bfloat16, from_bfloat16,  # noqa: E402
                              write_real_checkpoint)

LIBRARY = sys.argv.pop(1)
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, BITS = 512, 128, 4, 2, 3
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
SMALL_M = 16
REQUEST = {
    "name": "moe", "op": "fused_moe", "layers": 1, "hidden": HIDDEN,
    "intermediate": INTERMEDIATE, "experts": EXPERTS, "top_k": TOP_K,
    "activation": "silu", "io_dtype": "bf16", "id_dtype": "i32",
    "weights": {"format": "trellis_mx", "bits": BITS, "limit": "10"},
    "recipe": "w4a8", "smallm_max_tokens": SMALL_M,
    "capacities": [SMALL_M, 128, 4096]}
# Of a row against its arm in float64; the other arm is off by 0.05.
ERROR, COSINE = 4e-3, {"half": 0.99995, "mxfp8": 0.9998}
# Calls are made of this many different tokens, in any order, so that the oracle
# has every row of 4096.
TOKENS = 24


def run_kiln(*arguments):
    done = small_bundle.kiln(*arguments)
    if done.returncode != 0:
        raise RuntimeError(f"kiln {arguments[0]} exits {done.returncode}: "
                           f"{done.stdout}{done.stderr}")
    return done


class Tokens:
    """The different tokens of one draw, and their rows by each arm."""

    def __init__(self, layer, draw):
        rng = random.Random(draw)
        self.layer, self.expected = layer, {}
        self.x = [bfloat16([rng.gauss(0, 1) for _ in range(HIDDEN)])
                  for _ in range(TOKENS)]
        # Some routes are inactive; the last token has no active one.
        self.ids = [[rng.randrange(-1, EXPERTS + 1) for _ in range(TOP_K)]
                    for _ in range(TOKENS - 1)] + [[-1, EXPERTS]]
        self.weights = [
            array.array("f", [rng.uniform(0.2, 1) for _ in range(TOP_K)])
            for _ in range(TOKENS)]

    def row(self, token, arm):
        key = token, arm
        if key not in self.expected:
            self.expected[key] = self.layer.token(
                list(from_bfloat16(self.x[token])), self.ids[token],
                self.weights[token], getattr(mx_layer, arm))
        return self.expected[key]


class Call:
    """One plan of the loaded bundle with its buffers, which stay where they
    are."""

    def __init__(self, modules, native, m):
        self.entry, self.m = modules.find("moe", m), m
        given = {"x": 2 * HIDDEN * m, "topk_ids": 4 * TOP_K * m,
                 "topk_weights": 4 * TOP_K * m, "out": 4 * HIDDEN * m}
        self.buffers = {name: kiln.aligned_buffer(size)
                        for name, size in given.items()}
        self.params = [{**native, **self.buffers}[param.name]
                       for param in self.entry.params]
        self.arena = kiln.aligned_buffer(self.entry.arena_bytes)

    def launch(self, tokens, order):
        """The bytes of each row."""
        contents = {
            "x": b"".join(tokens.x[t] for t in order),
            "topk_ids": b"".join(struct.pack(f"<{TOP_K}i", *tokens.ids[t])
                                 for t in order),
            "topk_weights": b"".join(tokens.weights[t].tobytes()
                                     for t in order)}
        for name, data in contents.items():
            ctypes.memmove(self.buffers[name].data_ptr(), data, len(data))
        # Whatever the launch does not write is no number.
        out = self.buffers["out"]
        ctypes.memset(out.data_ptr(), 0xFF, out.numel())
        ctypes.memset(self.arena.data_ptr(), 0xFF, self.arena.numel())
        self.entry.launch(self.m, self.params, self.arena)
        data = ctypes.string_at(out.data_ptr(), 4 * HIDDEN * self.m)
        return [data[i:i + 4 * HIDDEN]
                for i in range(0, len(data), 4 * HIDDEN)]


class PreparedServeTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        if not os.access(small_bundle.BIN / "kiln-cc-cpu", os.X_OK):
            raise unittest.SkipTest("this build has no kiln-cc-cpu")
        scratch = tempfile.mkdtemp(prefix="kiln_prepared_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.folder = pathlib.Path(scratch)
        cls.real = write_real_checkpoint(
            cls.folder / "real", hidden=HIDDEN, intermediate=INTERMEDIATE,
            experts=EXPERTS)
        run_kiln("encode", cls.folder / "real", "-o", cls.folder / "npk",
                 "--format", "npk1", "--bits", BITS, "--limit", "10")
        done = run_kiln("--json", "prepare", cls.folder / "npk", "-o",
                        cls.folder / "native", "--layer", "0")
        cls.prepared = json.loads(done.stdout)["file"]
        # Nothing is raced: a race of 4096 tokens takes a minute, and what it
        # would prove is proved here.
        cls.bundle = small_bundle.make(cls.folder, "prepared", REQUEST,
                                       predicted=True)
        with kiln.Runtime(LIBRARY).open(str(cls.bundle)) as bundle:
            cls.modules = bundle.load(allow_predicted=True,
                                      allow_unqualified=True)
        cls.addClassCleanup(cls.modules.close)
        names = [p.name for p in cls.modules.find("moe", 1).params]
        cls.native = {name: aligned(data) for name, data in read_prepared(
            cls.prepared, [name for name in names if name not in (
                "x", "topk_ids", "topk_weights", "out")]).items()}
        cls.layer = mx_layer.Layer(
            cls.folder / "npk" / "npk1-layer-00000-rank-0-of-1.safetensors",
            HIDDEN, INTERMEDIATE, EXPERTS, BITS, 10.0)
        cls.draws = [Tokens(cls.layer, draw) for draw in (1, 2)]

    def check(self, row, wanted, arm, where):
        found = struct.unpack(f"<{HIDDEN}f", row)
        norm = math.hypot(*wanted)
        if norm == 0:
            self.assertEqual(set(found), {0.0}, where)
            return
        self.assertLessEqual(math.dist(found, wanted) / norm, ERROR, where)
        self.assertGreaterEqual(
            sum(map(float.__mul__, found, wanted)) /
            (norm * math.hypot(*found)), COSINE[arm], where)

    def test_every_row_of_twelve_counts_is_that_of_its_arm_also_repeated(self):
        """Every launch of a count has the same plan, addresses and buffers. One
        token has the same bits in all calls of an arm, whatever is beside it."""
        self.assertEqual(len(COUNTS), 12)
        seen = {}
        for m in COUNTS:
            arm = "half" if m <= SMALL_M else "mxfp8"
            call = Call(self.modules, self.native, m)
            # What prepare wrote are the parameters, byte for byte.
            for index, param in enumerate(call.entry.params):
                if param.name in self.native:
                    self.assertEqual(call.entry.param_bytes(index, m),
                                     self.native[param.name].numel())
            first = None
            for repeat, draw in enumerate((0, 1, 0)):
                tokens = self.draws[draw]
                rng = random.Random(100 * m + draw)
                order = [rng.randrange(TOKENS) for _ in range(m)]
                rows = call.launch(tokens, order)
                self.assertEqual(len(rows), m)
                for at, (token, row) in enumerate(zip(order, rows)):
                    key = arm, draw, token
                    where = f"m={m} launch {repeat} row {at} token {token}"
                    if key not in seen:
                        self.check(row, tokens.row(token, arm), arm, where)
                        seen[key] = row
                    self.assertTrue(row == seen[key], f"{where}: other bits")
                if repeat == 0:
                    first = rows
            self.assertEqual(rows, first)
        # Beyond the smallest counts every token was there.
        self.assertEqual(sum(key[0] == "mxfp8" for key in seen), 2 * TOKENS)

    def test_the_oracle_tells_the_arms_apart(self):
        tokens = self.draws[0]
        for token in range(4):
            small, grouped = tokens.row(token, "half"), tokens.row(token,
                                                                   "mxfp8")
            error = math.dist(small, grouped) / math.hypot(*small)
            self.assertGreater(error, 5 * ERROR)

    def test_the_law_of_the_oracle_has_the_digest_of_its_description(self):
        self.assertEqual(
            hashlib.sha256(mx_layer.LAW).hexdigest(),
            "f81eb38a599601d856c28a8c6c6e334d57f547827124c452655c0e0ada6fe1ec")

    def test_the_oracle_computes_what_the_real_weights_do(self):
        """But for the error of 3 bits, 0.13 of each matrix, of which three add
        up."""
        matrices = {}
        for key, (_, shape, data) in self.real.items():
            values = from_bfloat16(data)
            matrices[key] = [values[i:i + shape[1]]
                             for i in range(0, len(values), shape[1])]

        def times(name, vector):
            return [sum(map(float.__mul__, row, vector))
                    for row in matrices[name + ".weight"]]

        x = list(from_bfloat16(self.draws[0].x[0]))
        for expert in range(EXPERTS):
            key = f"model.layers.0.mlp.experts.{expert}."
            gate, up = times(key + "gate_proj", x), times(key + "up_proj", x)
            wanted = times(key + "down_proj", [
                g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)])
            found = self.layer.token(x, [expert], [1.0], mx_layer.half)
            error = math.dist(found, wanted) / math.hypot(*wanted)
            self.assertLess(error, 0.3)
            self.assertGreater(error, 0.15)

    def test_a_count_beyond_the_capacity_is_refused(self):
        with self.assertRaises(kiln.DispatchError) as caught:
            self.modules.find("moe", 4097)
        self.assertEqual(caught.exception.status,
                         kiln.Status.TOKENS_OUT_OF_RANGE)

    def test_kiln_run_agrees_at_the_same_counts_with_its_own_oracle(self):
        """With weights of its own; the second launch is a recorded one, with
        changed inputs and routes."""
        for m in COUNTS:
            done = run_kiln("--json", "run", self.bundle, "--entry", "moe",
                            "--tokens", m, "--check", "--allow-predicted",
                            "--allow-unqualified")
            result = json.loads(done.stdout)
            self.assertTrue(result["passed"] and result["replayed"], result)
            self.assertIn(f"activation_bits={16 if m <= SMALL_M else 8}",
                          result["plan"])


if __name__ == "__main__":
    unittest.main()
