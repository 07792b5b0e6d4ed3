#!/usr/bin/env python3
"""kiln describe, prepare and encode on folders that are wrong in every way a
folder can be, under a memory limit, and interrupted.

    KILN_BIN_DIR=build/release/bin tests/tools/checkpoint_hostile_test.py [-v]
"""

import functools
import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import time
import unittest

from small_checkpoint import (EXPERTS, HIDDEN, INTERMEDIATE, KILN, CliTest,
                              bfloat16, exl3, write_btx, write_checkpoint,
                              write_config, write_qsrt, write_real_checkpoint,
                              write_safetensors)

# Refusals: failed, usage (bad input), refused (understood, not served).
REFUSALS = (1, 2, 4)
NOBODY = 65534
MEMORY_LIMIT = 1 << 30


@functools.lru_cache(maxsize=None)
def runs_below(limit):
    """Sanitizers reserve more address space than any limit."""
    return subprocess.run(
        [KILN, "--version"], check=False, capture_output=True,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_AS, (limit, limit))).returncode == 0


class HostileTest(CliTest):
    def refused(self, *arguments, says="", codes=REFUSALS, **process):
        """One line that says why, within a few seconds, and no crash."""
        begin = time.monotonic()
        done = subprocess.run(
            [KILN, "--cache", self.at("cache"), *map(str, arguments)],
            capture_output=True, text=True, check=False, errors="replace",
            timeout=60, **process)
        self.assertIn(done.returncode, codes, (arguments, done.stderr))
        self.assertTrue(done.stderr.startswith("kiln: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertNotIn("bad_alloc", done.stderr)
        self.assertLess(len(done.stderr), 2000)
        self.assertIn(says, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertLess(time.monotonic() - begin, 30)
        return done

    def as_nobody(self):
        """Keyword arguments for a process that may read and write less."""
        if os.geteuid() != 0:
            return {}
        return {"preexec_fn": lambda: os.setuid(NOBODY)}


class HostileDescribeTest(HostileTest):
    def describe(self, says="", codes=REFUSALS, folder=None, **process):
        folder = self.checkpoint if folder is None else folder
        return self.refused("describe", folder, says=says,
                            codes=codes, **process)

    def test_places_that_hold_no_checkpoint(self):
        self.describe("config.json: No such file", codes=(2,))
        self.describe("No such file", folder=self.at("absent"), codes=(2,))
        with open(self.at("file"), "w") as handle:
            handle.write("x")
        self.describe("Not a directory", folder=self.at("file"), codes=(2,))
        self.describe("names nothing", folder="", codes=(2,))
        self.describe("File name too long", folder="x" * 300)

    def test_a_folder_that_may_not_be_read(self):
        write_checkpoint(self.checkpoint)
        os.chmod(self.checkpoint, 0)
        self.addCleanup(os.chmod, self.checkpoint, 0o700)
        self.describe("Permission denied", codes=(1,), **self.as_nobody())

    def test_a_configuration_that_is_no_text(self):
        path = self.at("config.json")
        for text in (b"", b"[]", b"7", b"null", b"\"x\"", b"{", b"{}}", b"\0",
                     b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"{\"a\": \xff}",
                     b"[" * 100000, b"{\"a\":" * 100000,
                     b"{\"model_type\": NaN}", b"{\"model_type\": Infinity}",
                     b"{\"model_type\": 1e999}", b"{'model_type': 'olmoe'}",
                     b"{\"a\": 1, \"a\": 2}"):
            with open(path, "wb") as handle:
                handle.write(text)
            with self.subTest(text[:40]):
                self.describe("config.json", codes=(2,))
        with open(path, "wb") as handle:
            handle.truncate(5 << 20)
        self.describe("at most 4194304 are accepted")
        os.remove(path)
        os.mkdir(path)
        self.describe("config.json is not a regular file", codes=(2,))
        os.rmdir(path)
        os.mkfifo(path)
        self.describe("config.json is not a regular file", codes=(2,))
        os.remove(path)
        os.symlink("config.json", path)
        self.describe("Too many levels of symbolic links")

    def test_values_of_another_type_or_size(self):
        write_checkpoint(self.checkpoint)
        wrong = [None, True, "2048", 2048.5, 1e300, -1, 0, 2**31, 2**64]
        for key in ("hidden_size", "moe_intermediate_size", "num_experts",
                    "num_experts_per_tok", "num_hidden_layers"):
            for value in wrong:
                write_config(self.checkpoint, layers=3, **{key: value})
                with self.subTest(key=key, value=value):
                    self.describe("config.json", codes=(2,))
        for key, value in (("model_type", 7), ("model_type", None),
                           ("hidden_act", 7), ("hidden_act", ["silu"]),
                           ("torch_dtype", 16), ("torch_dtype", "float64"),
                           ("decoder_sparse_step", 0),
                           ("decoder_sparse_step", "1"),
                           ("mlp_only_layers", 3), ("mlp_only_layers", ["0"]),
                           ("mlp_only_layers", [[0]]),
                           ("num_nextn_predict_layers", -1),
                           ("num_nextn_predict_layers", 2**40),
                           ("quantization_config", 7),
                           ("quantization_config", {}),
                           ("quantization_config", {"quant_method": 7}),
                           ("quantization_config", {"quant_method": "exl3",
                                                    "codebook": ["mcg"]})):
            write_config(self.checkpoint, layers=3, **{key: value})
            with self.subTest(key=key, value=value):
                self.describe("config.json:1:", codes=(2,))

    def write_index(self, index):
        with open(self.at("model.safetensors.index.json"), "w") as handle:
            handle.write(index if isinstance(index, str) else
                         json.dumps(index))

    def test_an_index_that_leads_elsewhere(self):
        write_config(self.checkpoint)
        outside = self.at("outside")
        os.mkdir(outside)
        write_safetensors(os.path.join(outside, "s"), {"t": ("U8", [1], b"a")})
        folder = self.at("model")
        os.mkdir(folder)
        write_config(folder)
        for shard in ("../outside/s", os.path.join(outside, "s"), "..", ".",
                      "", "./s", "a/b", ".hidden", "s\0", "x" * 300):
            with open(os.path.join(folder, "model.safetensors.index.json"),
                      "w") as handle:
                json.dump({"weight_map": {"t": shard}}, handle)
            with self.subTest(shard):
                self.describe("must be the name of a file in the same folder",
                              folder=folder, codes=(2,))

    def test_an_index_whose_shards_are_no_files(self):
        write_config(self.checkpoint)
        self.write_index({"weight_map": {"t": "s"}})
        self.describe("No such file", codes=(2,))
        os.symlink("s", self.at("s"))
        self.describe("Too many levels of symbolic links")
        os.remove(self.at("s"))
        os.mkdir(self.at("s"))
        self.describe("is not a regular file", codes=(2,))
        os.rmdir(self.at("s"))
        os.mkfifo(self.at("s"))
        self.describe("is not a regular file", codes=(2,))
        os.remove(self.at("s"))
        os.symlink("/dev/zero", self.at("s"))
        self.describe("is not a regular file", codes=(2,))
        os.remove(self.at("s"))
        write_safetensors(self.at("s"), {"u": ("U8", [1], b"a")})
        self.describe("does not name tensor \"u\"", codes=(2,))
        for index in ("", "[]", "{}", "{\"weight_map\": []}",
                      "{\"weight_map\": {\"t\": 7}}", "{\"weight_map\": {",
                      {"weight_map": {"t": "s"}, "more": 1}):
            self.write_index(index)
            with self.subTest(index):
                self.describe("index.json", codes=(2,))
        os.remove(self.at("model.safetensors.index.json"))
        self.describe("holds neither", codes=(2,))

    def test_a_shard_may_be_a_link_to_elsewhere(self):
        # As in the download caches of model hubs.
        write_checkpoint(self.checkpoint)
        os.mkdir(self.at("blobs"))
        for name in ("model-0.safetensors", "model-1.safetensors"):
            os.rename(self.at(name), self.at("blobs", name))
            os.symlink(os.path.join("blobs", name), self.at(name))
        self.kiln("describe", self.checkpoint)

    def test_a_manifest_replaces_no_file_of_the_checkpoint(self):
        write_checkpoint(self.checkpoint)
        before = {name: pathlib.Path(self.checkpoint, name).read_bytes()
                  for name in os.listdir(self.checkpoint)}
        link = self.at("link.json")
        os.symlink(os.path.join(self.checkpoint, "config.json"), link)
        for output in [*before, link]:
            output = os.path.join(self.checkpoint, output)
            self.refused("describe", self.checkpoint, "-o", output,
                         says="would replace", codes=(2,))
        self.assertEqual(before, {
            name: pathlib.Path(self.checkpoint, name).read_bytes()
            for name in before})
        # A manifest of before may be written anew, there too.
        again = os.path.join(self.checkpoint, "kiln.json")
        for _ in range(2):
            done = self.kiln("describe", self.checkpoint, "-o", again)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_output_that_cannot_be_written(self):
        write_checkpoint(self.checkpoint)
        for output, says in ((self.at("no", "m.json"), "No such file"),
                             (self.checkpoint, "not a regular file"),
                             ("/dev/full", "not a regular file")):
            self.refused("describe", self.checkpoint, "-o", output, says=says)


class HostilePrepareTest(HostileTest):
    def setUp(self):
        super().setUp()
        write_checkpoint(self.checkpoint)

    def prepare(self, output, says="", **process):
        return self.refused("prepare", self.checkpoint, "-o", output,
                            "--layer", "0", says=says, **process)

    def test_places_that_cannot_be_written(self):
        with open(self.at("file"), "w") as handle:
            handle.write("x")
        self.prepare(self.at("file"), "not a folder", codes=(2,))
        self.prepare(self.at("file", "x"), codes=(2,))
        self.prepare("", "names nothing", codes=(2,))
        out = self.at("out")
        os.makedirs(os.path.join(out, "layer-00000.safetensors"))
        self.prepare(out, "not a regular file", codes=(2,))
        os.rmdir(os.path.join(out, "layer-00000.safetensors"))
        os.symlink("/dev/full", os.path.join(out, "layer-00000.safetensors"))
        self.prepare(out, "not a regular file", codes=(2,))

    def test_a_folder_that_may_not_be_written(self):
        os.chmod(self.checkpoint, 0o755)
        os.mkdir(self.at("out"), 0o555)
        self.prepare(self.at("out"), "Permission denied", codes=(1,),
                     **self.as_nobody())
        self.assertEqual(os.listdir(self.at("out")), [])

    def test_a_layer_that_exists_is_replaced_whole_or_stays(self):
        out = self.at("out")
        path = os.path.join(out, "layer-00000.safetensors")
        self.kiln("prepare", self.checkpoint, "-o", out, "--layer", "0")
        with open(path, "rb") as handle:
            first = handle.read()
        with open(path, "wb") as handle:
            handle.write(b"old")
        # No room for the new one.
        self.prepare(
            out, "File too large", codes=(1,), restore_signals=False,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_FSIZE, (10000, 10000)))
        self.assertEqual(os.listdir(out), ["layer-00000.safetensors"])
        with open(path, "rb") as handle:
            self.assertEqual(handle.read(), b"old")
        self.kiln("prepare", self.checkpoint, "-o", out, "--layer", "0")
        with open(path, "rb") as handle:
            self.assertEqual(handle.read(), first)

    def test_a_bias_and_mixed_rates_are_refused_by_name(self):
        key = "model.layers.0.mlp.experts.2.up_proj"
        tensors = {}
        for expert in range(EXPERTS):
            base = f"model.layers.0.mlp.experts.{expert}."
            tensors |= exl3(base + "gate_proj", HIDDEN, INTERMEDIATE, 4)
            tensors |= exl3(base + "up_proj", HIDDEN, INTERMEDIATE, 4)
            tensors |= exl3(base + "down_proj", INTERMEDIATE, HIDDEN, 4)
        os.remove(self.at("model.safetensors.index.json"))
        write_config(self.checkpoint)
        bias = {key + ".bias": ("F16", [INTERMEDIATE], bytes(2 * INTERMEDIATE))}
        for change, says in ((bias, f'"{key}.bias" is a bias'),
                             (exl3(key, HIDDEN, INTERMEDIATE, 5),
                              f'"{key}.trellis" has 5 bits')):
            write_safetensors(self.at("model.safetensors"), tensors | change)
            self.prepare(self.at("out"), says, codes=(4,))
            self.refused("describe", self.checkpoint, says=says, codes=(4,))
        self.assertFalse(os.path.exists(self.at("out")))


class HostileEncodeTest(HostileTest):
    def write_two_shards(self, folder, last, hidden=128, intermediate=128,
                         experts=1):
        """One layer in each; `last` changes the tensors of the second."""
        os.makedirs(folder)
        write_config(folder, hidden, intermediate, experts, layers=2)
        block = bfloat16([0.01 * (i % 97 - 48) for i in range(hidden)])
        weight_map = {}
        for layer in range(2):
            tensors = {}
            for expert in range(experts):
                key = f"model.layers.{layer}.mlp.experts.{expert}."
                for name, rows, columns in (
                        ("gate_proj", intermediate, hidden),
                        ("up_proj", intermediate, hidden),
                        ("down_proj", hidden, intermediate)):
                    tensors[f"{key}{name}.weight"] = (
                        "BF16", [rows, columns],
                        block * (rows * columns // hidden))
            if layer == 1:
                last(tensors)
            name = f"model-{layer}.safetensors"
            write_safetensors(os.path.join(folder, name), tensors)
            weight_map |= {tensor: name for tensor in tensors}
        with open(os.path.join(folder, "model.safetensors.index.json"),
                  "w") as handle:
            json.dump({"weight_map": weight_map}, handle)

    def test_what_cannot_be_encoded_leaves_nothing(self):
        key = "model.layers.1.mlp.experts.0.up_proj.weight"

        def put(pattern):
            def change(tensors):
                dtype, shape, data = tensors[key]
                tensors[key] = (dtype, shape, data[:100] + pattern + data[102:])
            return change

        def become(dtype, shape, size):
            return lambda tensors: tensors.update(
                {key: (dtype, shape, bytes(size))})

        cases = [
            ("nan", put(b"\xc0\x7f"), "nan, must be finite"),
            ("infinity", put(b"\x80\xff"), "inf, must be finite"),
            ("integers", become("I16", [128, 128], 32768), "F32, F16 or BF16"),
            ("doubles", become("F64", [128, 128], 131072), "F32, F16 or BF16"),
            ("fp8", become("F8_E4M3", [128, 128], 16384), "F32, F16 or BF16"),
            ("wide", become("BF16", [128, 129], 33024), "by config.json"),
            ("flat", become("BF16", [16384], 32768), "by config.json"),
            ("cube", become("BF16", [1, 128, 128], 32768), "by config.json"),
            ("empty", become("BF16", [0, 128], 0), "by config.json"),
            ("stacked", lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.gate_up_proj":
                 ("BF16", [1, 128, 256], bytes(65536))}), "stacked experts")]
        for name, change, says in cases:
            self.write_two_shards(self.at(name), change)
            for form in ("exl3", "npk1"):
                if form == "npk1" and name in ("nan", "infinity"):
                    says = "must be finite"
                with self.subTest(name, format=form):
                    boundary = {"exl3": [], "npk1": ["--boundary", "identity"]}
                    done = self.refused_encode(
                        self.at(name), "--format", form, "--bits", "2",
                        *boundary[form])
                    self.assertIn(says, done.stderr)
                    self.assertIn("layer", done.stderr)
                    self.assertFalse(os.path.exists(self.at("out")))

    def refused_encode(self, checkpoint, *options, code=REFUSALS):
        done = subprocess.run([KILN, "encode", checkpoint, "-o",
                               self.at("out"), *options],
                              capture_output=True, text=True, check=False)
        self.assertIn(done.returncode, code, done.stderr)
        return done

    def test_places_that_cannot_be_written(self):
        write_real_checkpoint(self.at("real"))
        os.mkdir(self.at("out"))
        with open(self.at("out", "mine"), "w") as handle:
            handle.write("x")
        self.refused("encode", self.at("real"), "-o", self.at("out"),
                     says="must be an empty folder")
        self.assertEqual(os.listdir(self.at("out")), ["mine"])
        self.refused("encode", self.at("real"), "-o", self.at("out", "mine"),
                     says="not a folder")
        self.refused("encode", self.at("real"), "-o", self.at("real"),
                     says="must be an empty folder")
        self.refused("encode", self.at("real"), "-o", "/proc/nothing/here")

    def test_no_room_leaves_nothing(self):
        self.write_two_shards(self.at("real"), lambda tensors: None)
        done = subprocess.run(
            [KILN, "encode", self.at("real"), "-o", self.at("out"), "--bits",
             "2"], capture_output=True, text=True, check=False,
            restore_signals=False, preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_FSIZE, (10000, 10000)))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("File too large", done.stderr)
        self.assertFalse(os.path.exists(self.at("out")))

    def test_an_interruption_leaves_nothing(self):
        # Minutes of work, of which the first shard is done soon.
        self.write_two_shards(
            self.at("real"), lambda tensors: tensors.update(
                {f"model.layers.1.mlp.experts.{e}.{name}_proj.weight":
                 ("BF16", [512, 512], bfloat16([0.5, -0.25] * 256) * 512)
                 for e in range(8) for name in ("gate", "up", "down")}),
            512, 512, 8)
        with open(self.at("real", "model.safetensors.index.json")) as handle:
            index = json.load(handle)
        # The first shard keeps one small tensor that is only copied.
        write_safetensors(self.at("real", "model-0.safetensors"),
                          {"lm_head.weight": ("U8", [1], b"a")})
        # Shards are written in the order of the index.
        index["weight_map"] = {"lm_head.weight": "model-0.safetensors"} | {
            name: shard for name, shard in index["weight_map"].items()
            if ".layers.1." in name}
        with open(self.at("real", "model.safetensors.index.json"),
                  "w") as handle:
            json.dump(index, handle)
        for number, existed in ((signal.SIGINT, False), (signal.SIGTERM, True),
                                (signal.SIGHUP, False)):
            out = self.at(f"out-{number}")
            if existed:
                os.mkdir(out)
            with self.subTest(number):
                process = subprocess.Popen(
                    [KILN, "encode", self.at("real"), "-o", out, "--bits",
                     "8", "--threads", "1"], stderr=subprocess.PIPE, text=True)
                self.addCleanup(process.kill)
                deadline = time.monotonic() + 60
                while not os.path.exists(
                        os.path.join(out, "model-0.safetensors")) or not any(
                            ".tmp." in name for name in os.listdir(out)):
                    self.assertIsNone(process.poll())
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.01)
                process.send_signal(number)
                _, said = process.communicate(timeout=60)
                self.assertEqual(process.returncode, -number, said)
                self.assertIn("interrupted", said)
                self.assertEqual(os.path.exists(out), existed)
                if existed:
                    self.assertEqual(os.listdir(out), [])

    def test_an_ignored_interruption_is_ignored(self):
        write_real_checkpoint(self.at("real"))
        process = subprocess.Popen(
            [KILN, "encode", self.at("real"), "-o", self.at("out"), "--bits",
             "6", "--threads", "1"], stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, restore_signals=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        self.assertEqual(process.returncode, 0)
        self.assertTrue(os.path.exists(self.at("out", "config.json")))


@unittest.skipUnless(runs_below(MEMORY_LIMIT),
                     "this build does not run within a gigabyte")
class MemoryLimitTest(HostileTest):
    """Counts that a file states are not believed before they are checked."""

    def below(self, verb, *options, says=""):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))

        return self.refused(verb, self.checkpoint, *options, says=says,
                            preexec_fn=limit)

    def each(self, says=""):
        self.below("describe", says=says)
        self.below("prepare", "-o", self.at("out"), "--layer", "0", says=says)
        self.assertFalse(os.path.exists(self.at("out")))

    def write_file(self, name, header, size=None, length=None):
        """A file with `header`, `size` bytes in all; `length` is a lie."""
        with open(self.at(name), "wb") as handle:
            handle.write(struct.pack("<Q", len(header) if length is None
                                     else length) + header)
            if size is not None:
                handle.truncate(size)

    def test_headers_of_safetensors(self):
        write_config(self.checkpoint)
        name = "model.safetensors"
        for length in (2**64 - 1, 2**63, 2**40, 100_000_001):
            self.write_file(name, b"{}", 2**42, length)
            self.each("header's length is")
        # As long as a header may be, and a hole in the disk.
        self.write_file(name, b"{", 2**42, 100_000_000)
        self.each("safetensors header")
        for shape, offsets in (("9223372036854775807", "0,9223372036854775807"),
                               ("4294967296,4294967296,4294967296", "0,8"),
                               (",".join(["1"] * 1000), "0,1")):
            self.write_file(name, (
                '{"t":{"dtype":"U8","shape":[%s],"data_offsets":[%s]}}' %
                (shape, offsets)).encode())
            self.each('tensor "t"')
        for value in ("[" + "0," * 40_000_000 + "0]", "[" * 90_000_000):
            self.write_file(name, b'{"__metadata__":' + value.encode() + b"}")
            self.each("safetensors header")
        # A whole tebibyte, which nobody reads.
        tensors = exl3("model.layers.0.mlp.experts.0.gate_proj", 128, 256, 4)
        key = "model.layers.0.mlp.experts.0.gate_proj.trellis"
        header = json.dumps({key: {
            "dtype": "I16", "shape": [2**16, 2**16, 64],
            "data_offsets": [0, 2**39]}}).encode()
        self.assertIn(key, tensors)
        self.write_file(name, header, 8 + len(header) + 2**39)
        self.each("lacks")

    def test_indexes(self):
        write_config(self.checkpoint)
        path = self.at("model.safetensors.index.json")
        for text in ('{"metadata": [' + "0," * 40_000_000 + "0]}",
                     '{"weight_map": {' + ",".join(
                         f'"{i}": "s{i}"' for i in range(100_000)) + "}}"):
            with open(path, "w") as handle:
                handle.write(text)
            self.each("index.json")
        # More names than any model has.
        with open(path, "w") as handle:
            handle.write('{"weight_map": {' + ",".join(
                f'"{i:x}":"s"' for i in range(2_200_000)) + "}}")
        self.each("more than 2097152 tensors")
        with open(path, "wb") as handle:
            handle.truncate(2**40)
        self.each("are accepted")

    def test_configurations(self):
        write_safetensors(self.at("model.safetensors"),
                          {"t": ("U8", [1], b"a")})
        write_config(self.checkpoint, 65536, 262144, 1024, layers=1024)
        self.below("describe", says="layer 0 lacks")
        with open(self.at("config.json"), "w") as handle:
            handle.write('{"a": [' + "0," * 2_000_000 + "0]}")
        self.each("config.json")

    def test_btx(self):
        write_btx(self.checkpoint)
        path = self.at("btx-manifest.json")
        with open(path) as handle:
            good = json.load(handle)
        for part, changes in (
                ("geometry", {"num_experts": 1024, "hidden_size": 65536}),
                ("geometry", {"num_experts": 2**60}),
                ("geometry", {"moe_layer_indices": [2**40]}),
                ("geometry", {"intermediate_size": 262144,
                              "atom_slots": 8192}),
                ("layout", {"atom_row_alignment": 2**30})):
            with open(path, "w") as handle:
                json.dump(good | {part: good[part] | changes}, handle)
            with self.subTest(changes):
                self.each("btx-")
        with open(path, "w") as handle:
            handle.write('{"kind": [' + "0," * 500_000 + "0]}")
        self.each("btx-manifest.json")

    def test_qsrt(self):
        write_qsrt(self.checkpoint)
        name = "qsrt-layer-007.safetensors"
        with open(self.at(name), "rb") as handle:
            data = handle.read()
        for key in ("experts", "latent_channels", "intermediate_channels",
                    "atom_slot_stride_bytes", "atom_slots"):
            at = data.index(f'"{key}":"'.encode()) + len(key) + 4
            end = data.index(b'"', at)
            huge = b"9223372036854775807"
            # The header keeps its length: spaces at its end give way.
            spaces = len(huge) - (end - at)
            head = data[:at] + huge + data[end:8 + 4088 - spaces]
            with open(self.at(name), "wb") as handle:
                handle.write(head + data[8 + 4088:])
            with self.subTest(key):
                self.below("describe", says=name)
                self.below("prepare", "-o", self.at("out"), "--layer", "7",
                           says=name)

    def test_npk(self):
        name = "npk1-layer-00000-rank-0-of-1.safetensors"
        for length in (2**64 - 1, 2**40, 2**20 + 1):
            self.write_file(name, b"{}", 2**29, length)
            self.each("rule V1")
        header = json.dumps({"__metadata__": {
            "experts": "4096", "hidden": "9223372036854775807",
            "intermediate_local": "262144", "schema": "npk1-sidecar.v1"}},
            sort_keys=True, separators=(",", ":")).encode()
        self.write_file(name, header, 2**29)
        self.each("rule V")
        self.write_file(name, b'{"__metadata__":[' + b"0," * 500_000 + b"0]}")
        self.each("rule V")


if __name__ == "__main__":
    unittest.main()
