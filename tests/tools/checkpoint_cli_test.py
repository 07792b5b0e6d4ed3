#!/usr/bin/env python3
"""kiln describe, prepare and encode on a small checkpoint, from the command line.

    KILN_BIN_DIR=build/release/bin tests/tools/checkpoint_cli_test.py [-v]
"""

import json
import os
import random
import struct
import subprocess
import tempfile
import unittest

BIN = os.path.abspath(os.environ.get("KILN_BIN_DIR", "build/release/bin"))
KILN = os.path.join(BIN, "kiln")
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 128, 256, 4, 3


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    with open(path, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text + data)


def exl3(key, rows, columns, bits):
    return {
        key + ".trellis": ("I16", [rows // 16, columns // 16, 16 * bits],
                           os.urandom(rows * columns * bits // 8)),
        key + ".suh": ("F16", [rows], struct.pack("<e", 0.5) * rows),
        key + ".svh": ("F16", [columns], struct.pack("<e", -0.25) * columns),
        key + ".mcg": ("I32", [], struct.pack("<I", 0xCBAC1FED)),
    }


def write_checkpoint(folder):
    """Three layers in two shards; the last layer has another rate."""
    config = {"model_type": "qwen3_moe", "hidden_act": "silu",
              "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
              "num_experts": EXPERTS, "num_experts_per_tok": 2,
              "num_hidden_layers": LAYERS, "torch_dtype": "bfloat16"}
    with open(os.path.join(folder, "config.json"), "w") as handle:
        json.dump(config, handle)
    weight_map = {}
    for shard, layers in enumerate([[0, 1], [2]]):
        tensors = {}
        for layer in layers:
            for expert in range(EXPERTS):
                key = f"model.layers.{layer}.mlp.experts.{expert}."
                bits = 3 if layer == 2 else 4
                tensors |= exl3(key + "gate_proj", HIDDEN, INTERMEDIATE, bits)
                tensors |= exl3(key + "up_proj", HIDDEN, INTERMEDIATE, bits)
                tensors |= exl3(key + "down_proj", INTERMEDIATE, HIDDEN, bits)
        name = f"model-{shard}.safetensors"
        write_safetensors(os.path.join(folder, name), tensors)
        weight_map |= {tensor: name for tensor in tensors}
    with open(os.path.join(folder, "model.safetensors.index.json"),
              "w") as handle:
        json.dump({"metadata": {}, "weight_map": weight_map}, handle)


def write_real_checkpoint(folder, hidden=128, intermediate=128, experts=2):
    """One layer of bf16 weights, Gaussian."""
    os.makedirs(folder)
    config = {"model_type": "qwen3_moe", "hidden_act": "silu",
              "hidden_size": hidden, "moe_intermediate_size": intermediate,
              "num_experts": experts,
              "num_experts_per_tok": min(2, experts),
              "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
    with open(os.path.join(folder, "config.json"), "w") as handle:
        json.dump(config, handle)
    rng = random.Random(7)

    def matrix(rows, columns):
        values = [rng.gauss(0, 0.05) for _ in range(rows * columns)]
        floats = struct.pack(f"<{len(values)}f", *values)
        # The upper halves of binary32 are bfloat16.
        return ("BF16", [rows, columns],
                b"".join(floats[i + 2:i + 4] for i in range(0, len(floats), 4)))

    tensors = {"model.embed_tokens.weight": matrix(4, hidden)}
    for expert in range(experts):
        key = f"model.layers.0.mlp.experts.{expert}."
        tensors[key + "gate_proj.weight"] = matrix(intermediate, hidden)
        tensors[key + "up_proj.weight"] = matrix(intermediate, hidden)
        tensors[key + "down_proj.weight"] = matrix(hidden, intermediate)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


class CheckpointCliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.checkpoint = self.folder.name
        write_checkpoint(self.checkpoint)

    def at(self, *names):
        return os.path.join(self.folder.name, *names)

    def kiln(self, *arguments, code=0):
        done = subprocess.run(
            [KILN, "--cache", self.at("cache"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def test_describe_groups_layers_by_rate(self):
        manifest = json.loads(self.kiln("describe", self.checkpoint).stdout)
        self.assertEqual([r["name"] for r in manifest["requests"]],
                         ["moe", "moe-1"])
        self.assertEqual([r["layers"] for r in manifest["requests"]],
                         [[0, 1], [2]])

    @unittest.skipUnless(os.path.exists(os.path.join(BIN, "kiln-cc-cpu")),
                         "this build has no compiler for CPU targets")
    def test_plan_works_on_what_describe_writes(self):
        path = self.at("model.json")
        shown = self.kiln("describe", self.checkpoint, "-o", path, "--tp", "2")
        self.assertIn("fused_moe H128 I128 E4 k2 exl3-mcg K4", shown.stdout)
        planned = self.kiln("--json", "plan", path, "--target",
                            "cpu-x86-64-v2", "--max-capacity", "4")
        intervals = json.loads(planned.stdout)["intervals"]
        self.assertEqual(len(intervals), 2 * 3)
        for interval in intervals:
            self.assertTrue(interval["candidates"])

    def test_prepare_writes_one_file_per_layer_and_rank(self):
        for rank in range(2):
            done = self.kiln("--json", "prepare", self.checkpoint, "-o",
                             self.at("out"), "--layer", "2", "--tp",
                             f"{rank}/2")
            answer = json.loads(done.stdout)
            self.assertEqual(os.path.getsize(answer["file"]), answer["bytes"])
            self.assertIn(f"layer-00002-rank-{rank}-of-2", answer["file"])

    def test_encode_makes_a_checkpoint_that_the_other_verbs_read(self):
        write_real_checkpoint(self.at("real"))
        done = self.kiln("--json", "encode", self.at("real"), "-o",
                         self.at("encoded"), "--bits", "2,3,2", "--codebook",
                         "mul1")
        answer = json.loads(done.stdout)
        self.assertEqual(answer["matrices"], 6)
        self.assertEqual(answer["bytes"], os.path.getsize(
            self.at("encoded", "model.safetensors")))
        # Two thirds at 2 bits (0.069) and one third at 3 (0.0176).
        self.assertAlmostEqual(answer["relative_error"], 0.052, delta=0.004)
        self.assertIn("encode 100%", done.stderr)
        manifest = self.at("encoded.json")
        shown = self.kiln("describe", self.at("encoded"), "-o", manifest)
        self.assertIn("fused_moe H128 I128 E2 k2 exl3-mul1 K2/3/2",
                      shown.stdout)
        self.kiln("prepare", self.at("encoded"), "-o", self.at("out"),
                  "--layer", "0")
        if not os.path.exists(os.path.join(BIN, "kiln-cc-cpu")):
            return
        self.kiln("prewarm", manifest, "--target", "cpu", "--max-capacity",
                  "1", "--max-candidates", "1", "--budget", "0.2")
        bundle = self.at("model.kiln")
        self.kiln("freeze", manifest, "--target", "cpu", "--max-capacity", "1",
                  "--max-candidates", "1", "-o", bundle, "--allow-unqualified")
        done = self.kiln("run", bundle, "--entry", "moe", "--tokens", "1",
                         "--check", "--allow-unqualified")
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_npk_sidecars_are_written_listed_and_prepared(self):
        write_real_checkpoint(self.at("real"), hidden=512, intermediate=256,
                              experts=1)
        done = self.kiln("--json", "encode", self.at("real"), "-o",
                         self.at("npk"), "--format", "npk1", "--bits", "2",
                         "--tp", "2", "--limit", "10")
        answer = json.loads(done.stdout)
        self.assertAlmostEqual(answer["relative_error"], 0.0685, delta=0.004)
        layers = json.loads(
            self.kiln("--json", "describe", self.at("npk")).stdout)
        self.assertEqual(layers, [{
            "format": "npk1", "layer": 0, "ranks": 2, "hidden": 512,
            "intermediate": 256, "experts": 1, "bits": 2,
            "boundary": "coupled", "limit": "10",
            "bytes": layers[0]["bytes"]}])
        done = self.kiln("describe", self.at("npk"), "-o", self.at("m.json"),
                         code=4)
        self.assertIn("no template serves yet", done.stderr)
        done = self.kiln("--json", "prepare", self.at("npk"), "-o",
                         self.at("out"), "--layer", "0", "--tp", "1/2")
        answer = json.loads(done.stdout)
        self.assertEqual(answer["geometry"],
                         "npk1 H512 I128 E1 K2 coupled limit 10")
        self.assertEqual(os.path.getsize(answer["file"]), answer["bytes"])
        # One changed byte is refused by name, and nothing is written.
        name = self.at("npk", "npk1-layer-00000-rank-1-of-2.safetensors")
        with open(name, "r+b") as handle:
            handle.seek(-1000, os.SEEK_END)
            byte = handle.read(1)
            handle.seek(-1000, os.SEEK_END)
            handle.write(bytes([byte[0] ^ 1]))
        done = self.kiln("prepare", self.at("npk"), "-o", self.at("out2"),
                         "--layer", "0", "--tp", "1/2", code=2)
        self.assertIn("rule V11", done.stderr)
        self.assertFalse(os.path.exists(self.at("out2")))
        for options in (["--bits", "6"], ["--bits", "4,4,4"],
                        ["--boundary", "none"], ["--tp", "4"]):
            self.kiln("encode", self.at("real"), "-o", self.at("other"),
                      "--format", "npk1", *options, code=2)

    def test_encode_refuses_bad_input(self):
        write_real_checkpoint(self.at("real"), intermediate=64)
        for options in (["--bits", "9"], ["--bits", "0"], ["--bits", "4,4"],
                        ["--bits", "x"], ["--codebook", "sqg"],
                        ["--threads", "0"], ["--format", "gguf"]):
            self.kiln("encode", self.at("real"), "-o", self.at("encoded"),
                      *options, code=2)
        done = self.kiln("encode", self.at("real"), "-o", self.at("encoded"),
                         code=2)
        self.assertIn("BF16 [64, 128], both must be multiples of 128",
                      done.stderr)
        self.kiln("encode", self.at("none"), "-o", self.at("encoded"), code=1)
        self.assertFalse(os.path.exists(self.at("encoded")))

    def test_refusals_have_their_exit_codes(self):
        done = self.kiln("describe", self.checkpoint, "--tp", "3", code=2)
        self.assertIn("cannot be split over 3 ranks", done.stderr)
        done = self.kiln("prepare", self.checkpoint, "-o", self.at("out"),
                         "--layer", "9", code=2)
        self.assertIn("layer 9 has no routed experts", done.stderr)
        for tp in ("1", "1/x", "2/2", "0/0"):
            self.kiln("prepare", self.checkpoint, "-o", self.at("out"),
                      "--layer", "0", "--tp", tp, code=2)
        with open(self.at("config.json"), "w") as handle:
            json.dump({"model_type": "llama"}, handle)
        done = self.kiln("describe", self.checkpoint, code=4)
        self.assertIn("has no routed experts", done.stderr)
        self.kiln("describe", self.at("none"), code=1)


if __name__ == "__main__":
    unittest.main()
