#!/usr/bin/env python3
"""kiln diff, sign and verify on bundles that kiln made in this test.

    KILN_BIN_DIR=build/release/bin tests/tools/bundle_tools_test.py [-v]
"""

import copy
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from small_bundle import KILN, REQUEST, kiln, make, repair_root

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
                 if c["kind"] == "plan_changed" and
                 c["field"].startswith("steps[")]
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

    def test_inputs_that_are_not_there_are_usage_errors_everywhere(self):
        absent = self.folder / "absent.kiln"
        _, public = self.new_key("absent.key")
        for arguments in (
                ("verify", absent), ("verify", self.folder),
                ("inspect", absent), ("inspect", self.folder),
                ("diff", absent, self.bundle), ("diff", self.bundle, absent),
                ("run", absent, "--entry", "moe", "--tokens", 1),
                ("run", self.folder, "--entry", "moe", "--tokens", 1),
                ("sign", absent, "--key", self.folder / "absent.key"),
                ("sign", self.bundle, "--key", absent),
                ("verify", self.bundle, "--key", absent),
                ("verify", absent, "--key", public)):
            done = self.run_kiln(USAGE, *arguments)
            self.assertEqual(done.stdout, "", arguments)
            self.assertIn("kiln: cannot open" if self.folder not in arguments
                          else "not a regular file", done.stderr)

    def test_no_keys_are_left_when_there_is_nothing_to_sign(self):
        damaged = self.folder / "unsignable.kiln"
        damaged.write_bytes(self.bundle.read_bytes()[:-1])
        for code, file, *rest in (
                (USAGE, self.folder / "absent.kiln"), (REFUSED, damaged),
                (USAGE, self.bundle, "-o", self.folder / "no" / "such" / "folder")):
            key = self.folder / "homeless.key"
            self.run_kiln(code, "sign", file, "--new-key", "--key", key, *rest)
            self.assertFalse(key.exists())
            self.assertFalse(pathlib.Path(f"{key}.pub").exists())

    # hostile files

    def test_what_is_no_file_is_refused_at_once_by_every_verb(self):
        """Nothing waits for a pipe, reads a device for ever or takes the
        memory that a file of holes declares."""
        _, public = self.new_key("hostile.key")
        key = self.folder / "hostile.key"
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        empty = self.folder / "empty"
        empty.touch()
        sparse = self.folder / "sparse"
        with open(sparse, "wb") as out:
            out.write(self.bundle.read_bytes()[:300])
            try:
                out.truncate(1 << 40)
            except OSError:
                out.truncate((1 << 34) + 1)  # the most this file system takes
        loop = self.folder / "loop"
        loop.symlink_to(loop)
        for path in (fifo, empty, sparse, loop, "/dev/zero", "/dev/full",
                     "/proc/self/mem", self.folder):
            for arguments in (
                    ("verify", path), ("inspect", path),
                    ("diff", self.bundle, path), ("sign", path, "--key", key),
                    ("run", path, "--entry", "moe", "--tokens", 1),
                    ("verify", self.bundle, "--key", path),
                    ("verify", self.bundle, "--key", public, "--signature",
                     path),
                    ("sign", self.bundle, "--key", path)):
                done = subprocess.run(
                    [str(KILN), *map(str, arguments)], capture_output=True,
                    text=True, check=False, timeout=60)
                self.assertIn(done.returncode, (1, USAGE, REFUSED), arguments)
                if path == loop and arguments[-2] != "--key":
                    self.assertEqual(done.returncode, USAGE, arguments)
                self.assertEqual(done.stdout, "", arguments)
                self.assertRegex(done.stderr, "^kiln: .+", arguments)

    def test_keys_that_are_none_are_refused_and_not_shown(self):
        bundle, signature, public = self.signed("strange")
        secret = self.folder / "strange.key"
        whole = secret.read_bytes()
        digits = whole.split()[1].decode()
        good = signature.read_bytes()
        for text in (b"", whole[:-1], whole[:30], whole * 2, whole.upper(),
                     b"kiln-ed25519-secret-1 " + b"g" * 64 + b"\n",
                     b"-----BEGIN PRIVATE KEY-----\n", bytes(70000),
                     public.read_bytes(), good):
            secret.write_bytes(text)
            done = self.run_kiln(USAGE, "sign", bundle, "--key", secret)
            self.assertNotIn(digits, done.stdout + done.stderr)
            self.assertEqual(signature.read_bytes(), good)
        for text in (b"", public.read_bytes()[:-1], bytes(100), whole,
                     b"kiln-ed25519-public-1 " + b"0" * 62 + b"\n"):
            other = self.folder / "strange.pub2"
            other.write_bytes(text)
            done = self.run_kiln(USAGE, "verify", bundle, "--key", other)
            self.assertNotIn(digits, done.stdout + done.stderr)
        # A key of the right form that is no point of the curve, or a bad one.
        for point in ("00" * 32, "01" + "00" * 31, "ff" * 32):
            other.write_text(f"kiln-ed25519-public-1 {point}\n")
            self.run_kiln(REFUSED, "verify", bundle, "--key", other)
            signature.write_text(
                f"kiln-ed25519-signature-1 {point}{'00' * 64}\n")
            self.run_kiln(REFUSED, "verify", bundle, "--key", other)
            signature.write_bytes(good)

    def test_a_signature_replaces_nothing_that_it_needs(self):
        bundle, _, public = self.signed("own")
        key = self.folder / "own.key"
        link = self.folder / "own.link"
        link.symlink_to(key)
        for output in (bundle, key, public, link):
            before = [p.read_bytes() for p in (bundle, key, public)]
            done = self.run_kiln(USAGE, "sign", bundle, "--key", key, "-o",
                                 output)
            self.assertIn("would replace", done.stderr)
            self.assertEqual([p.read_bytes() for p in (bundle, key, public)],
                             before)

    def test_signing_through_a_link_keeps_the_link(self):
        bundle, signature, public = self.signed("linked")
        real = self.folder / "linked.elsewhere"
        signature.rename(real)
        real.write_text("old")
        signature.symlink_to(real)
        self.run_kiln(DONE, "sign", bundle, "--key", self.folder / "linked.key")
        self.assertTrue(signature.is_symlink())
        self.assertTrue(real.read_text().startswith("kiln-ed25519-signature"))
        self.run_kiln(DONE, "verify", bundle, "--key", public)
        # To nowhere: refused, nothing is made there.
        real.unlink()
        self.assertNotEqual(kiln("sign", bundle, "--key", self.folder /
                                 "linked.key").returncode, DONE)
        self.assertFalse(real.exists())

    def test_a_bundle_goes_nowhere_where_it_cannot(self):
        freeze = ["--cache", self.folder / "a.cache", "freeze",
                  self.folder / "a.json", "--target", "cpu",
                  "--max-candidates", "1", "--allow-unqualified", "-o"]
        fifo = self.folder / "out.fifo"
        os.mkfifo(fifo)
        manifest = (self.folder / "a.json").read_bytes()
        there = set(os.listdir(self.folder))
        for output in (self.folder, "/dev/full", "/dev/null", fifo,
                       self.folder / "no" / "such" / "folder.kiln",
                       self.bundle / "below", "/proc/self/no.kiln",
                       self.folder / "a.json"):
            done = kiln(*freeze, output)
            self.assertNotEqual(done.returncode, DONE, output)
            self.assertEqual(done.stdout, "", output)
            self.assertIn("kiln: ", done.stderr)
            self.assertEqual(set(os.listdir(self.folder)), there, output)
        self.assertEqual((self.folder / "a.json").read_bytes(), manifest)
        self.assertTrue(os.path.exists("/dev/null"))

    def test_a_bundle_that_exists_is_replaced_whole_or_not_at_all(self):
        target = self.freeze("replaced")
        expected = target.read_bytes()
        target.write_text("old")
        os.chmod(target, 0o640)
        self.freeze("replaced")
        self.assertEqual(target.read_bytes(), expected)
        self.assertEqual(target.stat().st_mode & 0o777, 0o640)
        # No more than 4 KiB may be written: as on a full disk, the old file
        # stands and nothing else is left.
        target.write_text("old")
        there = set(os.listdir(self.folder))
        done = subprocess.run(
            ["sh", "-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh",
             str(KILN), "--cache", str(self.folder / "a.cache"), "freeze",
             str(self.folder / "a.json"), "--target", "cpu",
             "--max-candidates", "1", "--allow-unqualified", "--no-golden", "-o",
             str(target)],
            capture_output=True, text=True, check=False)
        self.assertNotEqual(done.returncode, DONE)
        self.assertIn("replaced.kiln", done.stderr)
        self.assertEqual(target.read_text(), "old")
        self.assertEqual(set(os.listdir(self.folder)), there)

    def test_a_folder_that_may_not_be_written_is_named(self):
        place, options = self.place_of_another_user()
        closed = place / "closed"
        closed.mkdir()
        os.chmod(closed, 0o555)
        done = subprocess.run(
            [str(place / "kiln"), "--cache", str(place / "cache"), "freeze",
             str(place / "a.json"), "--target", "cpu", "--max-candidates", "1",
             "--allow-unqualified", "--no-golden", "-o",
             str(closed / "a.kiln")],
            capture_output=True, text=True, check=False, **options)
        self.assertNotEqual(done.returncode, DONE)
        self.assertIn(str(closed), done.stderr)
        self.assertEqual(os.listdir(closed), [])

    # golden replay

    def test_golden_replay_passes_where_the_bundle_was_frozen(self):
        done = self.run_kiln(DONE, "--json", "verify", self.bundle,
                             "--selftest", "--allow-unqualified")
        out = json.loads(done.stdout)["selftest"]
        self.assertEqual((out["passed"], out["failed"], out["no_digest"],
                          out["not_deterministic"]), (2, 0, 0, 0))
        done = self.run_kiln(DONE, "verify", self.bundle, "--selftest",
                             "--allow-unqualified")
        self.assertEqual(done.stdout.count(" passed"), 2, done.stdout)

    def test_a_changed_constant_of_a_program_is_caught(self):
        # 1.0f beside the machine code, under a right digest and a right root:
        # the file itself has nothing to say.
        whole = self.bundle.read_bytes()
        programs = json.loads(self.run_kiln(
            DONE, "--json", "inspect",
            self.bundle).stdout)["sections"][0]["programs"]
        one, caught = b"\x00\x00\x80\x3f", 0
        for program in programs:
            digest = bytes.fromhex(program["binary_digest"])
            begin = next(
                at for at in range(0, len(whole), 64)
                if whole[at:at + 4] == b"\x7fELF" and hashlib.sha256(
                    whole[at:at + program["bytes"]]).digest() == digest)
            end = begin + program["bytes"]
            data = bytearray(whole)
            at = data.find(one, begin, end)
            if at < 0:
                continue
            while at > 0:
                data[at + 2] = 0xc0  # 1.5f
                at = data.find(one, at, end)
            where = data.index(digest)
            data[where:where + 32] = hashlib.sha256(data[begin:end]).digest()
            repair_root(data)
            path = self.folder / "tampered.kiln"
            path.write_bytes(data)
            self.run_kiln(DONE, "verify", path)
            done = kiln("verify", path, "--selftest", "--allow-unqualified")
            if done.returncode == REFUSED and "golden replay" in done.stderr:
                self.assertIn(" FAILED", done.stdout)
                caught += 1
        self.assertGreater(caught, 0)

    def test_a_bundle_frozen_without_its_device_says_that_nothing_is_tested(
            self):
        bundle = self.freeze("no_golden", "--no-golden")
        done = self.run_kiln(3, "verify", bundle, "--selftest",
                             "--allow-unqualified")
        self.assertEqual(done.stdout.count("skipped: no digest"), 2)
        self.assertIn("nothing was tested", done.stderr)
        self.run_kiln(DONE, "verify", bundle)

    # reproducible bytes

    def freeze(self, name, *arguments, cache=None, manifest=None, **how):
        bundle = self.folder / f"{name}.kiln"
        done = subprocess.run(
            [str(KILN), "--cache", str(cache or self.folder / "a.cache"),
             "freeze", str(manifest or self.folder / "a.json"), "--target",
             "cpu", "--max-candidates", "1", "--allow-unqualified", "-o",
             str(bundle), *arguments],
            capture_output=True, text=True, check=False, **how)
        self.assertEqual(done.returncode, 0, done.stderr)
        return bundle

    def test_frozen_bytes_do_not_depend_on_who_where_or_how(self):
        expected = self.bundle.read_bytes()
        for name, how in (
                ("umask", {"umask": 0o077}), ("wide", {"umask": 0}),
                ("env", {"env": {"HOME": "/nowhere", "USER": "someone",
                                 "TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8",
                                 "SOURCE_DATE_EPOCH": "1"}}),
                ("cwd", {"cwd": "/"})):
            self.assertEqual(self.freeze(name, **how).read_bytes(), expected,
                             name)
        # The cache and the manifest under other paths, with other times.
        other = self.folder / "other place" / "deeper"
        shutil.copytree(self.folder / "a.cache", other / "cache")
        manifest = other / "renamed manifest"
        shutil.copy(self.folder / "a.json", manifest)
        os.utime(manifest, (1, 1))
        self.assertEqual(
            self.freeze("moved", cache=other / "cache",
                        manifest=manifest).read_bytes(), expected)

    def place_of_another_user(self):
        """A folder with kiln, cache and manifest that is somebody else's, and
        what runs a program as them. As oneself where one is not root."""
        scratch = tempfile.mkdtemp(prefix="kiln_other_user.")
        self.addCleanup(shutil.rmtree, scratch, ignore_errors=True)
        place = pathlib.Path(scratch)
        shutil.copytree(self.folder / "a.cache", place / "cache")
        shutil.copy(self.folder / "a.json", place / "a.json")
        for program in ("kiln", "kiln-cc-cpu"):
            shutil.copy(KILN.parent / program, place / program)
        if os.geteuid() != 0:
            return place, {}
        for path in (place, *place.rglob("*")):
            os.chown(path, 65534, 65534)
        return place, {"user": 65534, "group": 65534, "extra_groups": [],
                       "env": {"HOME": scratch}}

    def test_frozen_bytes_do_not_depend_on_the_user(self):
        if os.geteuid() != 0:
            self.skipTest("only root can become another user")
        place, options = self.place_of_another_user()
        done = subprocess.run(
            [str(place / "kiln"), "--cache", str(place / "cache"), "freeze",
             str(place / "a.json"), "--target", "cpu", "--max-candidates", "1",
             "--allow-unqualified", "-o", str(place / "a.kiln")],
            capture_output=True, text=True, check=False, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((place / "a.kiln").read_bytes(),
                         self.bundle.read_bytes())

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
