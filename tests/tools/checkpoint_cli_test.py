#!/usr/bin/env python3
"""kiln describe and kiln prepare on a small checkpoint, from the command line.

    KILN_BIN_DIR=build/release/bin tests/tools/checkpoint_cli_test.py [-v]
"""

import json
import os
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
