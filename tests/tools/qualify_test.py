#!/usr/bin/env python3
"""tools/qualify.py on a small suite of its own, and what it refuses.

    KILN_BIN_DIR=build/release/bin tests/tools/qualify_test.py [-v]
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from small_bundle import BIN, KILN, REQUEST, SOURCE

QUALIFY = SOURCE / "tools" / "qualify.py"


class QualifyTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.receipt = self.folder / "receipt.json"

    def qualify(self, suite, kiln=KILN, target="cpu"):
        return subprocess.run(
            [sys.executable, QUALIFY, "--kiln", kiln, "--target", target,
             "--suite", suite, "-o", self.receipt], capture_output=True,
            text=True, timeout=600, check=False)

    def write(self, name, value):
        path = self.folder / name
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            path.write_text(value if isinstance(value, str)
                            else json.dumps(value))
        return path

    def refuse(self, done, code, *words):
        """One message, no traceback, no receipt."""
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse(self.receipt.exists())

    @unittest.skipUnless(os.access(BIN / "kiln-cc-cpu", os.X_OK),
                         f"this build has no kiln-cc-cpu in {BIN}")
    def test_the_receipt_names_the_suite_that_was_run(self):
        suite = self.write("mine.json", {
            "schema": "kiln.model/1", "name": "Mine",
            "requests": [{**REQUEST, "capacities": [2]}]})
        done = self.qualify(suite)
        self.assertEqual(done.returncode, 0, done.stderr)
        receipt = json.loads(self.receipt.read_text())
        self.assertEqual(receipt["suite"], {
            "name": "mine.json",
            "sha256": hashlib.sha256(suite.read_bytes()).hexdigest()})
        self.assertEqual(receipt["requests"], 1)
        self.assertEqual([t["name"] for t in receipt["templates"]],
                         ["fused_moe.cpu"])
        self.assertEqual(receipt, json.loads(done.stdout))

    def test_what_is_no_suite_is_refused(self):
        request = {**REQUEST, "capacities": [2]}
        for name, value, words in (
                ("text", "hello", ["is no JSON"]),
                ("bytes", b"\xff\xfe{}", ["is no JSON"]),
                ("deep", "[" * 100000, ["is no JSON"]),
                ("empty", "", ["is no JSON"]),
                ("list", [], ['"requests"']),
                ("nothing", {}, ['"requests"']),
                ("none", {"requests": []}, ['"requests"']),
                ("number", {"requests": [3]}, ["request 0 is no object"]),
                ("no op", {"requests": [request, {"name": "x"}]},
                 ["request 1", '"op"']),
                ("no format", {"requests": [{**request, "weights": {}}]},
                 ["request 0", '"format"']),
                ("no capacities", {"requests": [{**request,
                                                 "capacities": []}]},
                 ["request 0", "capacities"]),
                ("text as capacity", {"requests": [{**request,
                                                    "capacities": ["1"]}]},
                 ["request 0", "capacities"]),
                ("a list of experts", {"requests": [{**request,
                                                     "experts": [8]}]},
                 ["request 0", '"experts"'])):
            with self.subTest(name):
                suite = self.write(f"{name}.json", value)
                self.refuse(self.qualify(suite), 2, "--suite", str(suite),
                            *words)
        self.receipt = self.write("same.json", {"requests": [request]})
        done = self.qualify(self.receipt)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("would replace", done.stderr)
        self.assertEqual(json.loads(self.receipt.read_text()),
                         {"requests": [request]})
        self.receipt = self.folder / "receipt.json"
        self.refuse(self.qualify(self.folder / "absent.json"), 2, "--suite",
                    "absent.json", "No such file")
        self.refuse(self.qualify(self.folder), 2, "--suite", "suite.v1.json",
                    "No such file")

    def test_a_suite_that_nothing_serves_is_refused(self):
        suite = self.write("other.json", {"requests": [
            {**REQUEST, "op": "attention"}]})
        self.refuse(self.qualify(suite), 1, str(suite), "no request")

    def test_what_is_no_kiln_is_refused(self):
        suite = self.write("suite.json", {"requests": [REQUEST]})
        silent = self.write("silent", "#!/bin/sh\n")
        talks = self.write("talks", "#!/bin/sh\necho '[1]'\n")
        broken = self.write("broken", "#!/nonexistent/interpreter\n")
        no_program = self.write("no_program", "\0\0\0\0")
        for path in (silent, talks, broken, no_program):
            path.chmod(0o755)
        for path, code, word in (
                (silent, 1, "is no kiln of this version"),
                (talks, 1, "is no kiln of this version"),
                (broken, 1, "cannot be started"),
                (no_program, 1, "cannot be started"),
                (self.folder / "absent", 2, "is no program"),
                (self.folder, 2, "is no program"),
                (suite, 2, "is no program")):
            with self.subTest(path.name):
                self.refuse(self.qualify(suite, kiln=path), code, path.name,
                            word)


if __name__ == "__main__":
    if not os.access(KILN, os.X_OK):
        sys.exit(f"{KILN} is not built")
    unittest.main()
