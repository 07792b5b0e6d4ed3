#!/usr/bin/env python3
"""tools/features.py on small trees: what it writes, and each fault of a table."""

import contextlib
import importlib.util
import io
import json
import pathlib
import shutil
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


features = load(ROOT / "tools" / "features.py")

FILES = {
    "tests/a_test.cc": """\
TEST(SmallTest, Adds) {}
TEST_F(SmallTest,
       IsLong) {}
TEST_P(OtherTest, Adds) {}
// TEST(SmallTest, IsAComment) {}
TEST(SmallTest, DISABLED_Sleeps) {}
""",
    "tests/b_test.py": """\
class SmallTest:
    def test_adds(self):
        pass

    def helper(self):
        pass

def test_alone():
    pass
""",
    "tests/CMakeLists.txt": """\
function(mutants_test name)
  add_test(NAME ${name} COMMAND mutants)
endfunction()
add_test(NAME harness COMMAND harness)
mutants_test(sample 60)
""",
    "tools/c_test.cc": "TEST(SmallTest, Adds) {}\n",
}
IDS = ([f"F1.{n:02}" for n in range(1, 31)] +
       [f"F2.{n:02}" for n in range(1, 28)] +
       [f"F3.{n:02}" for n in range(1, 25)] +
       [f"F4.{n:02}" for n in range(1, 16)] +
       [f"F5.{n:02}" for n in range(1, 5)] +
       [f"F6.{n:02}" for n in range(1, 21)])
ADDS = {"tests/a_test.cc": ["SmallTest.Adds"]}


def rows():
    """A row for each id; the first ones are of all kinds."""
    out = [{"id": id_, "capability": f"feature {id_}",
            "missing": "there is no kernel."} for id_ in IDS]
    out[0] = {"id": "F1.01", "capability": "adds", "tests": {
        "tests/a_test.cc": ["SmallTest.Adds", "SmallTest.IsLong",
                            "OtherTest.Adds"],
        "tests/b_test.py": ["SmallTest.test_adds"],
        "tests/CMakeLists.txt": ["harness", "sample"]}}
    out[1] |= {"tests": ADDS}
    out[2] = {"id": "F1.03", "capability": "serves",
              "does_not_apply": "Kiln has no serving engine."}
    return out


class FeaturesTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.mkdtemp(prefix="kiln_features_test.")
        self.addCleanup(shutil.rmtree, scratch, ignore_errors=True)
        self.root = pathlib.Path(scratch)
        for name, text in FILES.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.table = self.root / "tests/qualification/features.json"
        self.markdown = self.root / "tests/qualification/features.md"
        self.table.parent.mkdir()
        self.write(rows())

    def write(self, table):
        self.table.write_text(json.dumps(table))

    def run_tool(self, *options):
        """Exit code, stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = features.main([*options, str(self.root)])
        return code, out.getvalue(), err.getvalue()

    def refused(self, *texts):
        """Nothing is written, and both ways of the tool tell the fault."""
        for options in ([], ["--check"]):
            code, out, err = self.run_tool(*options)
            self.assertEqual((code, out), (1, ""), err)
            for text in texts:
                self.assertIn(text, err)
        self.assertFalse(self.markdown.exists())
        return err

    def changed(self, index, **fields):
        """The table with fields of a row replaced, or left out if None."""
        table = rows()
        table[index] |= fields
        table[index] = {k: v for k, v in table[index].items() if v is not None}
        self.write(table)

    def test_writes_what_the_table_says(self):
        code, out, err = self.run_tool()
        self.assertEqual((code, err), (0, ""))
        counts = ("Of 120 rows: shown by tests 1, in part 1, not yet 117, does "
                  "not apply 1.")
        self.assertEqual(out, counts + "\n")
        lines = self.markdown.read_text().splitlines()
        self.assertEqual(lines[2], counts)
        table = [line for line in lines if line.startswith("| F")]
        self.assertEqual([line.split()[1] for line in table], IDS)
        self.assertEqual(table[:4], [
            "| F1.01 | adds | `tests/a_test.cc`: `SmallTest.Adds`, "
            "`SmallTest.IsLong`, `OtherTest.Adds`. `tests/b_test.py`: "
            "`SmallTest.test_adds`. `tests/CMakeLists.txt`: `harness`, "
            "`sample`. |",
            "| F1.02 | feature F1.02 | *in part*: there is no kernel. "
            "`tests/a_test.cc`: `SmallTest.Adds`. |",
            "| F1.03 | serves | *does not apply*: Kiln has no serving engine. |",
            "| F1.04 | feature F1.04 | *not yet*: there is no kernel. |"])
        self.assertEqual(sum(line.startswith("## F") for line in lines), 6)

    def test_check_accepts_what_was_written_and_writes_nothing(self):
        self.run_tool()
        before = self.markdown.stat().st_mtime_ns
        code, out, err = self.run_tool("--check")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("Of 120 rows", out)
        self.assertEqual(self.markdown.stat().st_mtime_ns, before)

    def test_stale_markdown_is_refused(self):
        self.run_tool()
        before = self.markdown.read_text()
        self.changed(3, missing="there is no kernel yet.")
        code, out, err = self.run_tool("--check")
        self.assertEqual((code, out), (1, ""))
        self.assertIn("features.md: is not what tests/qualification/features."
                      "json says: run tools/features.py", err)
        self.assertEqual(self.markdown.read_text(), before)
        self.run_tool()
        self.assertEqual(self.run_tool("--check")[0], 0)
        self.markdown.write_text(self.markdown.read_text() + "\n")
        self.assertEqual(self.run_tool("--check")[0], 1)

    def test_missing_markdown_is_refused(self):
        code, _, err = self.run_tool("--check")
        self.assertEqual(code, 1)
        self.assertIn("run tools/features.py", err)

    def test_a_missing_id_is_named(self):
        for index in (0, 56, 119):
            table = rows()
            del table[index]
            self.write(table)
            err = self.refused(f"{IDS[index]} is missing: add its row")
            self.assertEqual(err.count("\n"), 1, err)

    def test_an_id_that_is_there_twice_is_named(self):
        table = rows()
        self.write([*table[:5], *table[4:]])
        self.refused("F1.05 is there 2 times: leave one")

    def test_an_id_that_the_specification_lacks_is_named(self):
        for id_ in ("F1.31", "F7.01", "F1.1", None):
            self.changed(4, id=id_)
            self.refused(f"{id_} is no row of the specification's table, which "
                         "has F1.01 to F6.20", "F1.05 is missing")

    def test_rows_out_of_order_are_named(self):
        table = rows()
        table[29], table[30] = table[30], table[29]
        self.write(table)
        self.refused("F2.01 stands before F1.30: put the rows in order")

    def test_a_test_that_its_file_lacks_is_named(self):
        for file, name in (
                ("tests/a_test.cc", "SmallTest.Subtracts"),
                ("tests/a_test.cc", "OtherTest.IsLong"),
                ("tests/a_test.cc", "Adds"),
                ("tests/a_test.cc", "SmallTest.IsAComment"),
                ("tests/a_test.cc", "SmallTest.DISABLED_Sleeps"),
                ("tests/b_test.py", "SmallTest.helper"),
                ("tests/b_test.py", "test_adds"),
                ("tests/b_test.py", "test_alone"),
                ("tests/CMakeLists.txt", "mutants"),
                ("tests/none_test.cc", "SmallTest.Adds"),
                ("tests", "SmallTest.Adds"),
                ("tools/c_test.cc", "SmallTest.Adds")):
            with self.subTest(f"{file} {name}"):
                self.changed(1, tests={file: [name]})
                self.refused(f"F1.02: {file}: there is no test {name};")

    def test_a_test_that_is_named_twice_is_refused(self):
        self.changed(1, tests={"tests/a_test.cc": ["SmallTest.Adds"] * 2})
        self.refused("F1.02: tests/a_test.cc: SmallTest.Adds is named 2 times")

    def test_a_file_that_is_named_twice_is_refused(self):
        file = '"tests/a_test.cc": ["SmallTest.Adds"]'
        text = json.dumps(rows())
        self.table.write_text(text.replace(file, f"{file}, {file}", 1))
        self.assertEqual(text.count(file), 1)
        self.refused('an object has the key "tests/a_test.cc" twice')

    def test_no_tests_are_no_proof(self):
        self.changed(0, tests={})
        self.refused("F1.01: has no tests: name some or say what is missing")
        self.changed(0, tests={"tests/a_test.cc": []})
        self.refused("F1.01: tests/a_test.cc has no tests here")

    def test_a_row_of_no_kind_is_refused(self):
        for fields in ({"missing": None},
                       {"does_not_apply": "Kiln has no engine."},
                       {"missing": None, "tests": ADDS,
                        "does_not_apply": "Kiln has no engine."},
                       {"note": "a word."}):
            with self.subTest(fields):
                self.changed(3, **fields)
                self.refused("F1.04: has the fields ", "must have one of")

    def test_a_row_without_a_capability_is_refused(self):
        for capability in ("", None):
            self.changed(3, capability=capability)
            self.refused("F1.04: has no capability")

    def test_reasons_are_sentences_of_one_line(self):
        for text in ("", "no kernel", "there is\nno kernel.", "a | b."):
            self.changed(3, missing=text)
            self.refused(f'F1.04: missing is "{text}", must be a sentence')

    def test_every_fault_is_told(self):
        table = rows()
        table[1]["tests"] = {"tests/a_test.cc": ["SmallTest.Subtracts"]}
        table[5]["missing"] = ""
        del table[7]
        self.write(table)
        self.assertEqual(self.refused("F1.02", "F1.06", "F1.08").count("\n"), 3)

    def test_a_table_that_is_none_is_refused(self):
        self.table.write_text("[")
        self.refused("features.json: ")
        self.table.unlink()
        self.refused("No such file")


if __name__ == "__main__":
    unittest.main()
