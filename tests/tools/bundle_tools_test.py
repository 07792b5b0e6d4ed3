#!/usr/bin/env python3
"""kiln diff, sign and verify on bundles that kiln made in this test.

    KILN_BIN_DIR=build/release/bin tests/tools/bundle_tools_test.py [-v]
"""

import copy
import json
import os
import pathlib
import shutil
import tempfile
import unittest

from small_bundle import REQUEST, kiln, make

DONE, DIFFERENT, USAGE, REFUSED = 0, 1, 2, 4


def request(**changes):
    out = copy.deepcopy(REQUEST)
    out.update(changes)
    return out


class BundleToolsTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        if not os.path.exists(os.path.join(os.environ["KILN_BIN_DIR"],
                                           "kiln-cc-cpu")):
            raise unittest.SkipTest("this build has no kiln-cc-cpu")
        cls.scratch = tempfile.mkdtemp(prefix="kiln_bundle_tools_test.")
        cls.addClassCleanup(shutil.rmtree, cls.scratch, ignore_errors=True)
        cls.folder = pathlib.Path(cls.scratch)
        cls.bundle = make(cls.folder, "a")
        # A second race of the same programs, one more capacity and one more
        # entry, and a model of another width.
        cls.again = make(cls.folder, "again")
        cls.more = make(cls.folder, "more", request(capacities=[1, 4, 8]),
                        request(name="moe2", top_k=1, capacities=[1]))
        cls.wider = make(cls.folder, "wider", request(hidden=256))

    def run_kiln(self, code, *arguments):
        done = kiln(*arguments)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    # diff

    def diff(self, code, a, b):
        out = json.loads(self.run_kiln(code, "--json", "diff", a, b).stdout)
        self.assertEqual(out["equal"], code == DONE)
        return out["changes"]

    def kinds(self, changes):
        return {change["kind"] for change in changes}

    def test_a_bundle_equals_itself_and_its_copy(self):
        twin = self.folder / "twin.kiln"
        shutil.copyfile(self.bundle, twin)
        self.assertEqual(self.diff(DONE, self.bundle, self.bundle), [])
        self.assertEqual(self.diff(DONE, self.bundle, twin), [])
        self.assertIn("equal: root", self.run_kiln(
            DONE, "diff", self.bundle, twin).stdout)

    def test_another_race_changes_evidence_only(self):
        changes = self.diff(DIFFERENT, self.bundle, self.again)
        self.assertEqual(self.kinds(changes), {"evidence_changed"})
        fields = {change["field"] for change in changes}
        self.assertIn("median_ns", fields)
        self.assertEqual({change["entry"] for change in changes}, {"moe"})
        self.assertLessEqual({change["interval"] for change in changes},
                             {"1..1", "2..4"})

    def test_more_intervals_and_entries_are_named(self):
        changes = self.diff(DIFFERENT, self.bundle, self.more)
        found = {(c["kind"], c.get("entry"), c.get("interval"), c.get("field"))
                 for c in changes}
        self.assertIn(("interval_added", "moe", "5..8", None), found)
        self.assertIn(("entry_added", "moe2", None, None), found)
        self.assertIn(("entry_changed", "moe", None, "capacity"), found)
        back = self.diff(DIFFERENT, self.more, self.bundle)
        found = {(c["kind"], c.get("entry"), c.get("interval")) for c in back}
        self.assertIn(("interval_removed", "moe", "5..8"), found)
        self.assertIn(("entry_removed", "moe2", None), found)

    def test_other_programs_are_named(self):
        changes = self.diff(DIFFERENT, self.bundle, self.wider)
        self.assertLessEqual({"program_added", "program_removed",
                              "entry_changed", "plan_changed"},
                             self.kinds(changes))
        steps = [c for c in changes
                 if c["kind"] == "plan_changed" and c["field"] == "steps"]
        self.assertTrue(steps)
        # For people: one row per change.
        text = self.run_kiln(DIFFERENT, "diff", self.bundle, self.wider).stdout
        self.assertEqual(len(text.splitlines()), len(changes) + 1)

    def test_diff_of_what_is_no_bundle_is_not_called_different(self):
        self.run_kiln(USAGE, "diff", self.bundle, self.folder / "absent.kiln")
        self.run_kiln(REFUSED, "diff", self.bundle, self.folder / "a.json")

    # sign, verify

    def new_key(self, name):
        path = self.folder / name
        if not path.exists():
            self.run_kiln(DONE, "sign", "--new-key", "--key", path)
        return path, pathlib.Path(f"{path}.pub")

    def signed(self, name):
        """A copy of the bundle, signed; with its signature and public key."""
        secret, public = self.new_key(f"{name}.key")
        bundle = self.folder / f"{name}.kiln"
        shutil.copyfile(self.bundle, bundle)
        self.run_kiln(DONE, "sign", bundle, "--key", secret)
        return bundle, pathlib.Path(f"{bundle}.sig"), public

    def test_signs_and_verifies(self):
        bundle, signature, public = self.signed("good")
        out = self.run_kiln(DONE, "--json", "verify", bundle, "--key", public)
        key = public.read_text().split()[1]
        self.assertEqual(json.loads(out.stdout)["signed_by"], key)
        # The signature file may lie elsewhere.
        other = self.folder / "elsewhere.sig"
        signature.rename(other)
        self.run_kiln(DONE, "verify", bundle, "--key", public, "--signature",
                      other)
        self.run_kiln(USAGE, "verify", bundle, "--signature", other)

    def test_a_key_pair_and_a_signature_in_one_call(self):
        bundle = self.folder / "one.kiln"
        shutil.copyfile(self.bundle, bundle)
        key = self.folder / "one.key"
        self.run_kiln(DONE, "sign", bundle, "--new-key", "--key", key, "-o",
                      self.folder / "one.signature")
        self.run_kiln(DONE, "verify", bundle, "--key", f"{key}.pub",
                      "--signature", self.folder / "one.signature")

    def test_signing_twice_gives_the_same_bytes(self):
        bundle, signature, _ = self.signed("twice")
        first = signature.read_bytes()
        self.run_kiln(DONE, "sign", bundle, "--key", self.folder / "twice.key")
        self.assertEqual(signature.read_bytes(), first)

    def test_an_unsigned_bundle_is_refused(self):
        _, public = self.new_key("unsigned.key")
        done = self.run_kiln(REFUSED, "verify", self.bundle, "--key", public)
        self.assertIn("unsigned", done.stderr)

    def test_another_key_is_refused(self):
        bundle, _, public = self.signed("mine")
        _, stranger = self.new_key("stranger.key")
        done = self.run_kiln(REFUSED, "verify", bundle, "--key", stranger)
        self.assertIn(stranger.read_text().split()[1], done.stderr)
        self.assertIn(public.read_text().split()[1], done.stderr)

    def test_a_signature_of_another_bundle_is_refused(self):
        _, signature, public = self.signed("from")
        other = self.folder / "other.kiln"
        shutil.copyfile(self.more, other)
        shutil.copyfile(signature, f"{other}.sig")
        done = self.run_kiln(REFUSED, "verify", other, "--key", public)
        self.assertIn("another bundle", done.stderr)

    def test_every_flipped_digit_of_a_signature_is_refused(self):
        bundle, signature, public = self.signed("flipped")
        text = signature.read_text()
        start = text.index(" ") + 1
        for at in range(start, len(text) - 1, 7):
            digit = "0" if text[at] != "0" else "1"
            signature.write_text(text[:at] + digit + text[at + 1:])
            self.run_kiln(REFUSED, "verify", bundle, "--key", public)

    def test_what_is_left_of_a_signature_is_refused(self):
        bundle, signature, public = self.signed("torn")
        whole = signature.read_bytes()
        for torn in (b"", whole[:20], whole[:-1], whole * 2, whole * 10,
                     bytes(2000)):
            signature.write_bytes(torn)
            self.run_kiln(REFUSED, "verify", bundle, "--key", public)

    def test_a_flipped_byte_of_the_bundle_is_refused(self):
        bundle, _, public = self.signed("damaged")
        data = bytearray(bundle.read_bytes())
        for at in (20, 40, len(data) // 2, len(data) - 1):
            data[at] ^= 1
            bundle.write_bytes(data)
            self.run_kiln(REFUSED, "verify", bundle, "--key", public)
            data[at] ^= 1
        # And is not signed either.
        data[-1] ^= 1
        bundle.write_bytes(data)
        self.run_kiln(REFUSED, "sign", bundle, "--key",
                      self.folder / "damaged.key")

    def test_files_of_another_kind_are_usage_errors(self):
        bundle, signature, public = self.signed("kinds")
        secret = self.folder / "kinds.key"
        self.run_kiln(USAGE, "verify", bundle, "--key", secret)
        self.run_kiln(USAGE, "verify", bundle, "--key", signature)
        self.run_kiln(USAGE, "verify", bundle, "--key", public, "--signature",
                      public)
        os.chmod(public, 0o600)
        self.run_kiln(USAGE, "sign", bundle, "--key", public)
        self.run_kiln(USAGE, "sign", "--key", secret)

    def test_a_secret_key_is_private_or_refused(self):
        bundle, _, _ = self.signed("private")
        secret = self.folder / "private.key"
        self.assertEqual(secret.stat().st_mode & 0o777, 0o600)
        for mode in (0o640, 0o604, 0o660, 0o644, 0o601):
            os.chmod(secret, mode)
            done = self.run_kiln(REFUSED, "sign", bundle, "--key", secret)
            self.assertIn(f"mode {mode:03o}", done.stderr)
        os.chmod(secret, 0o400)
        self.run_kiln(DONE, "sign", bundle, "--key", secret)
        os.chmod(secret, 0o600)
        # A link might point at what others can exchange.
        link = self.folder / "private.link"
        link.symlink_to(secret)
        self.assertNotEqual(
            kiln("sign", bundle, "--key", link).returncode, DONE)

    def test_a_key_is_never_overwritten(self):
        secret, public = self.new_key("kept.key")
        before = secret.read_bytes(), public.read_bytes()
        self.assertNotEqual(
            kiln("sign", "--new-key", "--key", secret).returncode, DONE)
        self.assertEqual((secret.read_bytes(), public.read_bytes()), before)
        # Nor is half a pair left behind.
        lone = self.folder / "lone.key"
        pathlib.Path(f"{lone}.pub").write_text("mine")
        self.assertNotEqual(
            kiln("sign", "--new-key", "--key", lone).returncode, DONE)
        self.assertFalse(lone.exists())


if __name__ == "__main__":
    unittest.main()
