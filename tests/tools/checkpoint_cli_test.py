#!/usr/bin/env python3
"""kiln describe, prepare and encode on small checkpoints, from the command line.

    KILN_BIN_DIR=build/release/bin tests/tools/checkpoint_cli_test.py [-v]
"""

import json
import os
import shutil
import subprocess
import unittest

from small_checkpoint import (DENSE, EXPERTS, HAS_COMPILER, HIDDEN, KILN,
                              CliTest, write_btx, write_checkpoint,
                              write_config, write_dense_checkpoint, write_qsrt,
                              write_qsrt_layer, write_real_checkpoint,
                              write_real_dense_checkpoint)


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

    @unittest.skipUnless(HAS_COMPILER, "this build has no compiler for CPU targets")
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
        if not HAS_COMPILER:
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
        self.assertIn('"hidden" 512, "intermediate" 128 (of one of 2 ranks), '
                      '"experts" 1, "weights" {"format": "trellis_mx", "bits": '
                      '2, "limit": "10", "boundary": "coupled"}', done.stderr)
        # They are for two ranks, and nothing else can be asked for.
        same = self.kiln("--json", "describe", self.at("npk"), "--tp", "2")
        self.assertEqual(json.loads(same.stdout), layers)
        for tp in ("1", "4"):
            done = self.kiln("describe", self.at("npk"), "--tp", tp, code=2)
            self.assertIn(f"--tp is {tp}, and the sidecars of layer 0 are for 2 "
                          "ranks", done.stderr)
        done = self.kiln("--json", "prepare", self.at("npk"), "-o",
                         self.at("out"), "--layer", "0", "--tp", "1/2")
        answer = json.loads(done.stdout)
        self.assertEqual(answer["geometry"],
                         "npk1 H512 I128 E1 K2 coupled limit 10")
        self.assertEqual(os.path.getsize(answer["file"]), answer["bytes"])
        for layer, tp, says in (
                (3, "0/2", "has no sidecar of layer 3; layers that it has: 0"),
                (0, "0/1", "has no sidecar of rank 0/1 of layer 0; of this "
                           "layer --tp may be: 0/2, 1/2"),
                (0, "2/2", "--tp may be: 0/2, 1/2")):
            done = self.kiln("prepare", self.at("npk"), "-o", self.at("out3"),
                             "--layer", str(layer), "--tp", tp, code=2)
            self.assertEqual(done.stderr.count(self.at("npk")), 1, done.stderr)
            self.assertIn(says, done.stderr)
            self.assertFalse(os.path.exists(self.at("out3")))
        # Beside the configuration of an EXL3 checkpoint and under the name of
        # its file it is none.
        os.mkdir(self.at("posing"))
        write_config(self.at("posing"), 512, 256, 1)
        shutil.copy(self.at("npk", "npk1-layer-00000-rank-0-of-2.safetensors"),
                    self.at("posing", "model.safetensors"))
        done = self.kiln("describe", self.at("posing"), code=2)
        self.assertIn('layer 0 lacks "model.layers.0.mlp.experts.0.gate_proj.'
                      'trellis"', done.stderr)
        done = self.kiln("prepare", self.at("posing"), "-o", self.at("out4"),
                         "--layer", "0", code=2)
        self.assertIn("layer 0 has no routed experts", done.stderr)
        self.assertFalse(os.path.exists(self.at("out4")))
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
        done = self.kiln("encode", self.at("real"), "-o", self.at("other"),
                         "--format", "npk1", "--tp", "4", code=2)
        self.assertIn("for each of 4 ranks; possible with --tp: 1, 2\n",
                      done.stderr)
        for options in (["--bits", "6"], ["--bits", "4,4,4"],
                        ["--boundary", "none"]):
            self.kiln("encode", self.at("real"), "-o", self.at("other"),
                      "--format", "npk1", *options, code=2)

    def test_layers_that_differ_are_described_one_by_one(self):
        write_real_checkpoint(self.at("real"), hidden=512, intermediate=128,
                              experts=1, layers=2)
        for boundary in ("identity", "coupled"):
            self.kiln("encode", self.at("real"), "-o", self.at(boundary),
                      "--format", "npk1", "--bits", "2", "--boundary", boundary)
        files = sorted(os.listdir(self.at("identity")))
        shutil.copy(os.path.join(self.at("coupled"), files[1]),
                    os.path.join(self.at("identity"), files[1]))
        done = self.kiln("describe", self.at("identity"), "-o",
                         self.at("m.json"), code=4)
        for layer, boundary in ((0, "identity"), (1, "coupled")):
            self.assertRegex(done.stderr,
                             f'one for layers {layer} with "hidden" 512[^;]*'
                             f'"boundary": "{boundary}"')

    def test_identity_sidecars_are_listed_and_prepared_without_vectors(self):
        write_real_checkpoint(self.at("real"), hidden=128, intermediate=256,
                              experts=1)
        self.kiln("encode", self.at("real"), "-o", self.at("npk"), "--format",
                  "npk1", "--bits", "2", "--tp", "2", "--boundary", "identity")
        layer, = json.loads(
            self.kiln("--json", "describe", self.at("npk")).stdout)
        self.assertEqual(layer["boundary"], "identity")
        done = self.kiln("describe", self.at("npk"), "-o", self.at("m.json"),
                         code=4)
        self.assertIn('"hidden" 128, "intermediate" 128 (of one of 2 ranks), ',
                      done.stderr)
        self.assertIn('"limit": "inf", "boundary": "identity"} and "recipe"',
                      done.stderr)
        done = self.kiln("--json", "prepare", self.at("npk"), "-o",
                         self.at("out"), "--layer", "0", "--tp", "1/2")
        answer = json.loads(done.stdout)
        self.assertEqual(answer["geometry"],
                         "npk1 H128 I128 E1 K2 identity limit inf")
        with open(answer["file"], "rb") as handle:
            header = json.loads(handle.read(
                int.from_bytes(handle.read(8), "little")))
        self.assertEqual(set(header) - {"__metadata__"},
                         {"w13", "w2", "w13_scale", "w2_scale"})
        # A slice of 64 channels is a sidecar, which no kernel reads.
        self.kiln("encode", self.at("real"), "-o", self.at("thin"), "--format",
                  "npk1", "--bits", "2", "--tp", "4", "--boundary", "identity")
        done = self.kiln("prepare", self.at("thin"), "-o", self.at("out"),
                         "--layer", "0", "--tp", "1/4", code=2)
        self.assertIn("hidden 128 and intermediate_local 64 must be multiples "
                      "of 128", done.stderr)
        done = self.kiln("describe", self.at("thin"), "-o", self.at("m.json"),
                         code=4)
        self.assertIn("no request is for the sidecars of layer 0: hidden 128 and "
                      "intermediate_local 64 must be multiples of 128",
                      done.stderr)
        # All that the coupled boundary wants is told at once.
        for tp in (2, 3):
            done = self.kiln("encode", self.at("real"), "-o", self.at("none"),
                             "--format", "npk1", "--tp", str(tp), code=2)
            self.assertIn("hidden is 128, must be a multiple of 512 unless the "
                          "boundary is identity", done.stderr)
            self.assertEqual("for each of 3 ranks; possible with --tp: 1, 2"
                             in done.stderr, tp == 3, done.stderr)

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

    def test_encode_refuses_options_of_the_other_format(self):
        write_real_checkpoint(self.at("real"))
        for form, option, value in (
                ("exl3", "--tp", "2"), ("exl3", "--boundary", "identity"),
                ("exl3", "--limit", "nan"), ("npk1", "--codebook", "mul1"),
                # Nor are those that say what the default is.
                ("exl3", "--tp", "1"), ("exl3", "--boundary", "coupled"),
                ("exl3", "--limit", "inf"), ("npk1", "--codebook", "mcg")):
            with self.subTest(f"{option} {value}"):
                done = self.kiln("encode", self.at("real"), "-o",
                                 self.at("encoded"), "--format", form, option,
                                 value, code=2)
                self.assertIn(f"{option} is an option of --format", done.stderr)
                self.assertFalse(os.path.exists(self.at("encoded")))

    def test_layers_of_pairs_say_which_ranks_are_possible(self):
        atom = (b"\x11" * 36 * HIDDEN + b"\x00\x38" * 96) * EXPERTS
        os.mkdir(self.at("qsrt"))
        write_qsrt_layer(self.at("qsrt"), 7, b"\x01\x10\x00\x11"[:EXPERTS],
                         b"\x00\x38" * 3 * HIDDEN, [atom] * 24)
        for ranks in (1, 2, 4, 6):
            done = self.kiln("prepare", self.at("qsrt"), "-o", self.at("out"),
                             "--layer", "7", "--tp", f"0/{ranks}", code=2)
            self.assertIn(f"768 cannot be split over {ranks} ranks",
                          done.stderr)
            self.assertIn("; possible with --tp: 3\n", done.stderr)
        self.kiln("prepare", self.at("qsrt"), "-o", self.at("out"), "--layer",
                  "7", "--tp", "2/3")
        done = self.kiln("describe", self.at("qsrt"), code=4)
        self.assertIn("kiln prepare --tp K/3 writes part K", done.stderr)
        os.mkdir(self.at("btx"))
        write_btx(self.at("btx"), "sqg_e4m3", ["P33"])
        for verb in (["describe", "--tp", "2"],
                     ["prepare", "-o", self.at("out"), "--layer", "0", "--tp",
                      "0/2"]):
            done = self.kiln(verb[0], self.at("btx"), *verb[1:], code=2)
            self.assertIn("; possible with --tp: 1\n", done.stderr)
            self.assertEqual(done.stderr.count(self.at("btx")), 1, done.stderr)

    def test_a_file_of_the_public_schema_beside_a_checkpoint_is_no_obstacle(
            self):
        name = "p8-layer-003-tp4-rank-0.safetensors"
        with open(os.path.join(self.checkpoint, name), "w", encoding="utf-8"):
            pass
        self.kiln("prepare", self.checkpoint, "-o", self.at("out"), "--layer",
                  "0")
        # Alone, it says which layers and ranks there are.
        alone = self.at("alone")
        os.mkdir(alone)
        with open(os.path.join(alone, name), "w", encoding="utf-8"):
            pass
        done = self.kiln("prepare", alone, "-o", self.at("out"), "--layer",
                         "0", code=2)
        self.assertIn("no sidecar of layer 0; layers that it has: 3",
                      done.stderr)

    def test_a_path_that_is_not_there_is_named_once(self):
        absent = self.at("absent")
        for verb in (["describe", absent],
                     ["prepare", absent, "-o", self.at("out"), "--layer", "0"],
                     ["encode", absent, "-o", self.at("out")],
                     ["encode", absent, "-o", self.at("out"), "--format",
                      "npk1"],
                     ["plan", absent, "--target", "cpu"],
                     ["prewarm", absent, "--target", "cpu"],
                     ["freeze", absent, "--target", "cpu", "-o",
                      self.at("out")],
                     ["verify", absent], ["inspect", absent],
                     ["diff", absent, absent], ["bench", absent],
                     ["run", absent, "--entry", "moe", "--tokens", "1"],
                     ["sign", absent, "--key", absent],
                     ["package", "check", absent], ["package", "pin", absent],
                     ["cache", "import", absent], ["cache", "merge", absent]):
            with self.subTest(verb):
                done = subprocess.run(
                    [KILN, "--cache", self.at("cache"), *verb],
                    capture_output=True, text=True, check=False, timeout=60)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(done.stderr.count(absent), 1, done.stderr)

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
            json.dump({"model_type": "phi3"}, handle)
        done = self.kiln("describe", self.checkpoint, code=4)
        self.assertIn("has no routed experts", done.stderr)
        self.kiln("describe", self.at("none"), code=2)


class DenseCliTest(CliTest):
    def setUp(self):
        super().setUp()
        write_dense_checkpoint(self.checkpoint)

    def test_describe_has_a_request_for_each_projection(self):
        path = self.at("model.json")
        shown = self.kiln("describe", self.checkpoint, "-o", path)
        self.assertIn("linear [256, 512] exl3-mcg K4 w4a16 bf16 bias",
                      shown.stdout)
        with open(path) as handle:
            requests = json.load(handle)["requests"]
        self.assertEqual(
            [(r["name"], r["layers"], r["weights"]["bits"]) for r in requests],
            [("q_proj", [0, 1], 4), ("k_proj", [0, 1], 4),
             ("v_proj", [0, 1], 4), ("o_proj", [0, 1], 4),
             ("gate_proj", [0, 1], 4), ("up_proj", [0, 1], 4),
             ("down_proj", [0], 4), ("down_proj-1", [1], 3),
             ("lm_head", [2], 6)])

    def test_ranks_share_what_can_be_shared(self):
        manifest = json.loads(
            self.kiln("describe", self.checkpoint, "--tp", "2").stdout)
        sizes = {r["name"]: (r["in_features"], r["out_features"])
                 for r in manifest["requests"]}
        self.assertEqual(sizes, {
            "q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128),
            "o_proj": (256, 256), "gate_proj": (256, 384),
            "up_proj": (256, 384), "down_proj": (384, 256),
            "down_proj-1": (384, 256), "lm_head": (256, 384)})
        done = self.kiln("describe", self.checkpoint, "--tp", "4", code=2)
        self.assertIn('tensor "model.layers.0.self_attn.k_proj.trellis": '
                      "output size 256 cannot be split over 4 ranks",
                      done.stderr)

    def test_prepare_writes_all_matrices_of_a_layer_and_the_head(self):
        for layer, text in ((1, "down_proj [384, 256] K3"),
                            (2, "linear lm_head [256, 384] K6")):
            done = self.kiln("--json", "prepare", self.checkpoint, "-o",
                             self.at("out"), "--layer", str(layer), "--tp",
                             "1/2")
            answer = json.loads(done.stdout)
            self.assertEqual(os.path.getsize(answer["file"]), answer["bytes"])
            self.assertIn(text, answer["geometry"])
        done = self.kiln("prepare", self.checkpoint, "-o", self.at("out"),
                         "--layer", "3", code=2)
        self.assertIn("has no layer 3; it has 0..2, of which the last is the "
                      "head", done.stderr)

    def test_what_describe_writes_is_compiled_for_gpus(self):
        nvrtc = json.loads(self.kiln("--json", "doctor").stdout)["nvrtc"]
        if not nvrtc["found"]:
            self.skipTest(f"no NVRTC: {nvrtc.get('problem')}")
        path = self.at("model.json")
        self.kiln("describe", self.checkpoint, "-o", path)
        done = self.kiln("--json", "prewarm", path, "--target", "sm_90a",
                         "--compile-only", "--max-capacity", "4",
                         "--max-candidates", "1")
        report = json.loads(done.stdout.strip().splitlines()[-1])
        self.assertEqual(report["rejects"], 0)
        self.assertGreater(report["programs_compiled"], 0)

    @unittest.skipUnless(HAS_COMPILER, "needs kiln-cc-cpu")
    def test_what_describe_writes_is_served_on_the_cpu(self):
        path, bundle = self.at("model.json"), self.at("model.kiln")
        self.kiln("describe", self.checkpoint, "-o", path)
        few = ["--target", "cpu", "--max-capacity", "4",
               "--max-candidates", "1"]
        self.kiln("prewarm", path, *few, "--budget", "0.05")
        self.kiln("freeze", path, *few, "-o", bundle, "--allow-unqualified")
        for entry in ("q_proj", "down_proj-1", "lm_head"):
            self.kiln("run", bundle, "--entry", entry, "--tokens", "3",
                      "--check", "--allow-unqualified")

    def test_encode_makes_a_dense_checkpoint(self):
        write_real_dense_checkpoint(self.at("real"))
        done = self.kiln("encode", self.at("real"), "-o", self.at("encoded"),
                         "--bits", "4,4,3", code=2)
        self.assertIn("a dense model, whose matrices get one rate",
                      done.stderr)
        done = self.kiln("--json", "encode", self.at("real"), "-o",
                         self.at("encoded"), "--bits", "5")
        answer = json.loads(done.stdout)
        self.assertEqual(answer["matrices"], 7)
        self.assertAlmostEqual(answer["relative_error"], 0.00121,
                               delta=0.00015)
        manifest = json.loads(self.kiln("describe", self.at("encoded")).stdout)
        self.assertEqual([r["name"] for r in manifest["requests"]],
                         [name.split(".")[1] for name in DENSE])
        self.assertTrue(manifest["requests"][0]["bias"])
        self.kiln("prepare", self.at("encoded"), "-o", self.at("out"),
                  "--layer", "0")

    def test_sidecars_are_not_made_of_a_dense_model(self):
        done = self.kiln("encode", self.checkpoint, "-o", self.at("npk"),
                         "--format", "npk1", code=4)
        self.assertIn('"qwen2" has no routed experts', done.stderr)
        self.assertFalse(os.path.exists(self.at("npk")))


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

    def test_pairs_of_sqg_e4m3_are_prepared_and_described(self):
        write_btx(self.checkpoint, "sqg_e4m3", ["P33"])
        self.assertEqual(self.prepared(0),
                         "H128 I256 E4 sqg_e4m3 pairs P33 shared scales")
        manifest = json.loads(self.kiln("describe", self.checkpoint).stdout)
        self.assertEqual(manifest["requests"][0]["weights"],
                         {"format": "qsrt", "pairs": "p24_p33",
                          "scales": "shared"})

    def test_pairs_of_mcg_are_prepared_and_describe_says_that_none_serves_them(
            self):
        write_btx(self.checkpoint, "mcg", ["P33"])
        self.assertEqual(self.prepared(0),
                         "H128 I256 E4 mcg pairs P33 shared scales")
        done = self.kiln("describe", self.checkpoint, code=4)
        self.assertIn('tensor "rates_fc1": has a pair of rates for each expert '
                      "and the codebook mcg; no template of this build serves "
                      "it", done.stderr)

    def test_a_qsrt_layer_is_prepared_and_describe_says_what_is_not_in_it(self):
        write_qsrt(self.checkpoint)
        self.assertEqual(self.prepared(7),
                         "H128 I256 E4 sqg_e4m3 pairs P24 P33 shared scales")
        done = self.kiln("describe", self.checkpoint, code=4)
        self.assertIn("whose files name neither top_k", done.stderr)

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
