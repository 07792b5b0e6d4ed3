#!/usr/bin/env python3
"""kiln describe, prepare and encode on small checkpoints, from the command line.

    KILN_BIN_DIR=build/release/bin tests/tools/checkpoint_cli_test.py [-v]
"""

import hashlib
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


def write_safetensors(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if "_qsrt_format_section" in tensors:
        text = text.ljust(4088)  # the header's one length
    with open(path, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text + data)


def halves(*shape):
    count = 1
    for size in shape:
        count *= size
    return ("F16", list(shape), struct.pack("<e", 0.5) * count)


def write_btx(folder, codebook="mcg", pair_kinds=None):
    """Layer 0 of one layer, at 3 bits or at pairs of rates of 6 bits."""
    slots = INTERMEDIATE // 32
    row = EXPERTS * 3 * (HIDDEN // 16) * 32 * 6
    tensors = {"atoms": ("U8", [slots, row], os.urandom(slots * row)),
               "rotations": halves(slots, EXPERTS, 3, 32)}
    for name in ("gate_suh", "up_suh", "down_svh"):
        tensors[name] = halves(HIDDEN)
    rates = {"structure": "uniform", "bits": 3}
    if pair_kinds:
        rates = {"structure": "per_expert_pair", "pair_kinds": pair_kinds}
        for name in ("rates_fc1", "rates_fc2"):
            tensors[name] = ("U8", [slots // 8, EXPERTS], b"\x33" * EXPERTS)
    path = os.path.join(folder, "btx-layer-00000.safetensors")
    write_safetensors(path, tensors, {
        "schema": "btx-atoms-v1", "codebook": codebook, "layer": "0",
        "num_experts": str(EXPERTS), "hidden_size": str(HIDDEN),
        "intermediate_size": str(INTERMEDIATE), "atom_channels": "32"})
    with open(path, "rb") as handle:
        digest = hashlib.sha256(handle.read()).hexdigest()
    manifest = {
        "kind": "btx-manifest", "schema": "btx-atoms-v1", "codebook": codebook,
        "geometry": {"num_experts": EXPERTS, "hidden_size": HIDDEN,
                     "intermediate_size": INTERMEDIATE, "atom_channels": 32,
                     "atom_slots": slots, "moe_layer_indices": [0]},
        "rates": rates,
        "hadamard": {"coupled": False, "per_expert_input_rotations": False},
        "layout": {"atom_row_alignment": 64, "extent_alignment_slots": 4},
        "layers": {"0": {"file": os.path.basename(path), "sha256": digest}}}
    if codebook == "mcg":
        manifest["codebook_seed"] = 0xCBAC1FED
    with open(os.path.join(folder, "btx-manifest.json"), "w") as handle:
        json.dump(manifest, handle)
    with open(os.path.join(folder, "config.json"), "w") as handle:
        json.dump({"model_type": "qwen3_moe", "hidden_act": "silu",
                   "hidden_size": HIDDEN,
                   "moe_intermediate_size": INTERMEDIATE,
                   "num_experts": EXPERTS, "num_experts_per_tok": 2,
                   "num_hidden_layers": 1}, handle)


def write_qsrt(folder):
    """Layer 7, of Kimi-K3's schema."""
    slots, bundle = INTERMEDIATE // 32, 36 * HIDDEN + 192
    payload = EXPERTS * bundle
    stride = (payload + 4095) // 4096 * 4096
    # Random trellis data, and scales that are finite.
    atom = (os.urandom(bundle - 192) + struct.pack("<e", 0.5) * 96) * EXPERTS
    scales = struct.pack("<e", 0.5) * 3 * HIDDEN
    tensors = {
        "_qsrt_format_section": ("U8", [4096],
                                 b"\x01\x10\x00\x11".ljust(4096, b"\0")),
        "_qsrt_shared_scale_section": ("U8", [4096],
                                       scales.ljust(4096, b"\0")),
        "qsrt_atoms": ("U8", [slots, stride],
                       atom.ljust(stride, b"\0") * slots)}
    numbers = {
        "version": 1, "layer": 7, "profile_id": 1, "experts": EXPERTS,
        "compressed_experts": EXPERTS, "x4t_experts": 0,
        "intermediate_channels": INTERMEDIATE, "latent_channels": HIDDEN,
        "atom_channels": 32, "atom_slots": slots, "atom_bundle_bytes": bundle,
        "atom_slot_payload_bytes": payload, "atom_slot_stride_bytes": stride,
        "alignment_bytes": 4096}
    write_safetensors(
        os.path.join(folder, "qsrt-layer-007.safetensors"), tensors,
        {"format": "pt", "schema": "kquant_kimi_k3_qsrt_atoms_v1",
         "encoding": "qsrt_sqg_e4m3"} | {k: str(v) for k, v in numbers.items()})


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


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.checkpoint = self.folder.name

    def at(self, *names):
        return os.path.join(self.folder.name, *names)

    def kiln(self, *arguments, code=0):
        done = subprocess.run(
            [KILN, "--cache", self.at("cache"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done


class CheckpointCliTest(CliTest):
    def setUp(self):
        super().setUp()
        write_checkpoint(self.checkpoint)

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
        self.kiln("encode", self.at("none"), "-o", self.at("encoded"), code=2)
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
        self.kiln("describe", self.at("none"), code=2)


class ContainerCliTest(CliTest):
    def prepared(self, layer, rank="0/1"):
        done = self.kiln("--json", "prepare", self.checkpoint, "-o",
                         self.at("out"), "--layer", str(layer), "--tp", rank)
        answer = json.loads(done.stdout)
        self.assertEqual(os.path.getsize(answer["file"]), answer["bytes"])
        return answer["geometry"]

    def test_a_uniform_btx_layer_is_described_and_prepared(self):
        write_btx(self.checkpoint)
        manifest = json.loads(self.kiln("describe", self.checkpoint).stdout)
        self.assertEqual([r["layers"] for r in manifest["requests"]], [[0]])
        for rank in ("0/2", "1/2"):
            self.assertEqual(self.prepared(0, rank),
                             "H128 I128 E4 mcg K3 shared scales")

    def test_pairs_are_prepared_and_describe_says_that_none_serves_them(self):
        write_btx(self.checkpoint, "sqg_e4m3", ["P33"])
        self.assertEqual(self.prepared(0),
                         "H128 I256 E4 sqg_e4m3 pairs P33 shared scales")
        done = self.kiln("describe", self.checkpoint, code=4)
        self.assertIn('tensor "rates_fc1": has a pair of rates for each expert; '
                      "no template of this build serves it", done.stderr)

    def test_a_qsrt_layer_is_prepared_and_describe_says_the_same(self):
        write_qsrt(self.checkpoint)
        self.assertEqual(self.prepared(7),
                         "H128 I256 E4 sqg_e4m3 pairs P24 P33 shared scales")
        done = self.kiln("describe", self.checkpoint, code=4)
        self.assertIn("no template of this build serves it", done.stderr)

    def test_a_damaged_layer_leaves_nothing_behind(self):
        write_btx(self.checkpoint)
        with open(self.at("btx-layer-00000.safetensors"), "r+b") as handle:
            handle.seek(-1, os.SEEK_END)
            handle.write(b"\x01")
        done = self.kiln("prepare", self.checkpoint, "-o", self.at("out"),
                         "--layer", "0", code=2)
        self.assertIn("has the SHA-256", done.stderr)
        self.assertFalse(os.path.exists(self.at("out")))


if __name__ == "__main__":
    unittest.main()
