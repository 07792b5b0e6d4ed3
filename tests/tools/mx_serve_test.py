#!/usr/bin/env python3
"""A request over TrellisMX weights from its manifest to a launch: which arm
answers which token counts, what changes a plan's identity, what is refused."""

import json
import os
import pathlib
import re
import tempfile
import unittest

import small_bundle
from small_bundle import kiln

REQUEST = {
    "name": "moe", "op": "fused_moe", "layers": 1, "hidden": 512,
    "intermediate": 128, "experts": 4, "top_k": 2, "activation": "silu",
    "io_dtype": "bf16", "id_dtype": "i32",
    "weights": {"format": "trellis_mx", "bits": 3, "limit": "10"},
    "recipe": "w4a8", "smallm_max_tokens": 4, "capacities": [1, 4, 8]}
# The direct arm instead of the small-M one.
DIRECT = {"smallm_max_tokens": 0, "direct_max_tokens": 4, "remainder": "rp2"}
# Layers without a boundary, of which each arm is served.
IDENTITY = {"hidden": 384, "weights": {**REQUEST["weights"],
                                       "boundary": "identity"}}
LIMITS = ["--target", "cpu", "--max-candidates", "1"]


def manifest(folder, **changes):
    path = pathlib.Path(folder) / "changed.json"
    path.write_text(json.dumps({"schema": "kiln.model/1", "name": "mx",
                                "requests": [{**REQUEST, **changes}]}))
    return path


class ServeTest(unittest.TestCase):
    """A bundle of `requests`, and the cache that it was made from."""

    requests = []

    @classmethod
    def setUpClass(cls):
        if not os.access(small_bundle.BIN / "kiln-cc-cpu", os.X_OK):
            raise unittest.SkipTest("this build has no kiln-cc-cpu")
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        cls.bundle = small_bundle.make(cls.folder, "served", *cls.requests)
        cls.cache = cls.folder / "served.cache"

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()


class MxServeTest(ServeTest):
    requests = [REQUEST]

    def arms(self, **changes):
        """Activation bits of the candidates, by interval; where there is a
        remainder, with the number of terms."""
        done = kiln("plan", manifest(self.folder, **changes), *LIMITS)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = {}
        for line in done.stdout.splitlines():
            interval = re.search(r" m (\d+\.\.\d+)$", line)
            if interval:
                found[interval[1]] = set()
            point = re.match(
                r"  fused_moe\.mx_cpu\{activation_bits=(\d+)"
                r"(?:,activation_terms=(\d+))?", line)
            if point:
                arm = int(point[1])
                list(found.values())[-1].add(
                    (arm, int(point[2])) if point[2] else arm)
        return found

    def run_bundle(self, bundle, tokens):
        return kiln("--json", "run", bundle, "--entry", "moe", "--tokens",
                    tokens, "--check", "--allow-unqualified")

    def test_up_to_the_limit_the_small_m_arm_answers_above_it_the_grouped(self):
        self.assertEqual(self.arms(),
                         {"1..1": {16}, "2..4": {16}, "5..8": {8}})

    def test_limit_zero_sends_one_token_to_the_grouped_arm(self):
        self.assertEqual(self.arms(smallm_max_tokens=0),
                         {"1..1": {8}, "2..4": {8}, "5..8": {8}})

    def test_up_to_its_limit_the_direct_arm_has_the_remainder(self):
        self.assertEqual(self.arms(**DIRECT),
                         {"1..1": {(8, 2)}, "2..4": {(8, 2)}, "5..8": {8}})
        self.assertEqual(self.arms(**{**DIRECT, "remainder": "none"}),
                         {"1..1": {8}, "2..4": {8}, "5..8": {8}})

    def test_every_count_passes_the_oracle_of_its_arm(self):
        """Rows of the small-M arm against the reference without quantised
        activations, those of the grouped arm against the one with them."""
        for tokens in (1, 3, 4, 5, 8):
            done = self.run_bundle(self.bundle, tokens)
            self.assertEqual(done.returncode, 0, done.stderr)
            result = json.loads(done.stdout)
            self.assertTrue(result["passed"])
            self.assertIn(f'activation_bits={16 if tokens <= 4 else 8}',
                          result["plan"])
            self.assertGreaterEqual(result["worst_cosine"],
                                    0.99995 if tokens <= 4 else 0.9998)
            self.assertLessEqual(result["worst_error"], result["tolerance"])

    def test_every_plan_repeats_its_digest(self):
        done = kiln("verify", self.bundle, "--selftest", "--allow-unqualified")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("passed"), 3)

    def test_bench_times_every_capacity(self):
        done = kiln("bench", self.bundle, "--allow-unqualified")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("fused_moe.mx_cpu{"), 3)

    def test_another_limit_is_another_plan(self):
        """The cache holds plans of limit 4 alone, also where the arm is equal:
        1..1 has the small-M arm under limit 1 too."""
        freeze = ["freeze", manifest(self.folder, smallm_max_tokens=1), *LIMITS,
                  "-o", self.folder / "other.kiln", "--allow-unqualified"]
        done = kiln("--cache", self.cache, *freeze)
        self.assertEqual(done.returncode, 3, done.stdout)
        self.assertIn("no plan for moe m 1..1", done.stderr)

    def test_a_limit_inside_an_interval_is_refused(self):
        done = kiln("plan", manifest(self.folder, smallm_max_tokens=2), *LIMITS)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('"smallm_max_tokens" is 2, must be one of "capacities"',
                      done.stderr)

    def test_without_the_grouped_plan_its_counts_fail_and_nothing_compiles(self):
        """A bundle of the small-M intervals answers them and refuses the
        others; a freeze that wants the missing plan names it."""
        small = kiln("--cache", self.cache, "freeze",
                     manifest(self.folder, capacities=[1, 4]), *LIMITS, "-o",
                     self.folder / "small.kiln", "--allow-unqualified",
                     "--keep-intervals")
        self.assertEqual(small.returncode, 0, small.stderr)
        self.assertEqual(
            self.run_bundle(self.folder / "small.kiln", 4).returncode, 0)
        done = self.run_bundle(self.folder / "small.kiln", 5)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("KILN_STATUS_TOKENS_OUT_OF_RANGE", done.stderr)
        freeze = kiln("--cache", self.cache, "freeze",
                      manifest(self.folder, capacities=[1, 4, 16]), *LIMITS,
                      "-o", self.folder / "none.kiln", "--allow-unqualified")
        self.assertEqual(freeze.returncode, 3, freeze.stdout)
        self.assertIn("no plan for moe m 5..16", freeze.stderr)
        self.assertFalse((self.folder / "none.kiln").exists())


class DirectServeTest(ServeTest):
    """A bundle of the direct arm with its remainder and the grouped arm."""

    requests = [{**REQUEST, **DIRECT}]

    def run_bundle(self, tokens):
        return kiln("run", self.bundle, "--entry", "moe", "--tokens", tokens,
                    "--check", "--allow-unqualified")

    def test_every_count_passes_the_oracle_of_its_arm(self):
        for tokens in (1, 3, 4, 5, 8):
            done = self.run_bundle(tokens)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("PASS", done.stdout)

    def test_a_count_beyond_the_capacities_is_refused(self):
        done = self.run_bundle(9)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("KILN_STATUS_TOKENS_OUT_OF_RANGE", done.stderr)

    def test_every_plan_repeats_its_digest(self):
        done = kiln("verify", self.bundle, "--selftest", "--allow-unqualified")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("passed"), 3)

    def test_the_verbs_name_the_arm(self):
        path = manifest(self.folder, **DIRECT)
        done = kiln("plan", path, *LIMITS)
        self.assertIn("interval is that of the direct rp2 arm", done.stdout)
        self.assertIn("mx.w4a8rp2.fold32", done.stdout)
        done = kiln("inspect", self.bundle)
        self.assertIn("trellis_mx K3 silu limit 10 w4a8 direct 4 rp2",
                      done.stdout)
        self.assertEqual(done.stdout.count("activation_terms=2"), 2)
        done = kiln("bench", self.bundle, "--allow-unqualified")
        self.assertEqual(done.stdout.count("activation_terms=2"), 2)
        done = kiln("--cache", self.cache, "explain", path, *LIMITS,
                    "--entry", "moe", "--tokens", "4")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("activation_terms=2", done.stdout)

    def test_another_remainder_is_another_plan(self):
        done = kiln("--cache", self.cache, "freeze",
                    manifest(self.folder, **{**DIRECT, "remainder": "none"}),
                    *LIMITS, "-o", self.folder / "other.kiln",
                    "--allow-unqualified")
        self.assertEqual(done.returncode, 3, done.stdout)
        self.assertIn("no plan for moe m 1..1", done.stderr)

    def test_two_arms_for_the_same_counts_are_refused(self):
        done = kiln("plan", manifest(self.folder, direct_max_tokens=4), *LIMITS)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('"smallm_max_tokens" is 4, must be 0 or missing where '
                      '"direct_max_tokens" is 4', done.stderr)


class IdentityServeTest(ServeTest):
    """A bundle of identity layers: with the small-M arm, and with the direct
    one and its remainder."""

    requests = [{**REQUEST, **IDENTITY},
                {**REQUEST, **IDENTITY, **DIRECT, "name": "direct"}]

    def test_every_count_passes_the_oracle_of_its_arm(self):
        for entry in ("moe", "direct"):
            for tokens in (1, 3, 4, 5, 8):
                done = kiln("run", self.bundle, "--entry", entry, "--tokens",
                            tokens, "--check", "--allow-unqualified")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("PASS", done.stdout)

    def test_every_plan_repeats_its_digest(self):
        done = kiln("verify", self.bundle, "--selftest", "--allow-unqualified")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("passed"), 6)

    def test_the_bundle_says_which_boundary_it_is_for(self):
        done = kiln("inspect", self.bundle)
        self.assertIn("trellis_mx K3 identity silu limit 10 w4a8 small-m 4",
                      done.stdout)
        self.assertIn("trellis_mx K3 identity silu limit 10 w4a8 direct 4 rp2",
                      done.stdout)

    def test_a_coupled_layer_of_the_shape_is_another_plan(self):
        same = {**REQUEST, **IDENTITY, "hidden": 512}
        path = manifest(self.folder, **{
            **IDENTITY, "hidden": 512, "weights": REQUEST["weights"]})
        small_bundle.make(self.folder, "wide", same)
        done = kiln("--cache", self.folder / "wide.cache", "freeze", path,
                    *LIMITS, "-o", self.folder / "other.kiln",
                    "--allow-unqualified")
        self.assertEqual(done.returncode, 3, done.stdout)
        self.assertIn("no plan for moe m 1..1", done.stderr)


if __name__ == "__main__":
    unittest.main()
