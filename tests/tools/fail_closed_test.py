#!/usr/bin/env python3
"""Every row of the fail-closed tables of the format specifications has a test
of its name, where templates/formats/README.md says.

    fail_closed_test.py [ROOT]
"""

import pathlib
import re
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else HERE.parents[1]
ROWS, RULES = 41, 15
# TEST(Suite, Row07Refuses...), {"Row16ZeroBits", ...}, def test_row35_and_36_...
NAMES = re.compile(r"""(?:TEST(?:_[FP])?\(\w+,\s*|\{"|def\ test_)
                       (?:[Rr]ow_?)(\d+)(?:_?[Aa]nd_?(\d+))?""", re.VERBOSE)


def rows_of(path):
    return {int(n) for pair in NAMES.findall(path.read_text())
            for n in pair if n}


def span(text):
    """The numbers of "1 to 10, 20, 31"."""
    numbers = set()
    for part in text.split(","):
        first, _, last = part.strip().partition(" to ")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


class FailClosedTest(unittest.TestCase):

    def setUp(self):
        self.tests = {}
        for path in sorted((ROOT / "tests").rglob("*_test.*")):
            if path.suffix in (".cc", ".py") and path != pathlib.Path(__file__):
                self.tests[path.stem] = path
        section = (ROOT / "templates/formats/README.md").read_text().split(
            "## Where each rule is tested")[1].split("\n## ")[0]
        self.table = [[cell.strip() for cell in line.split("|")[1:-1]]
                      for line in section.splitlines()
                      if re.match(r"\| \d", line)]

    def test_names_are_found_in_every_spelling(self):
        self.assertEqual(
            NAMES.findall('TEST_F(A, Row21And38Is) {"Row16Zero" '
                          "def test_row35_and_36_is  TEST(A, Rows3) "
                          "TEST(B,\n     Row07Is)"),
            [("21", "38"), ("16", ""), ("35", "36"), ("07", "")])
        self.assertEqual(span("1 to 3, 7"), {1, 2, 3, 7})

    def test_every_row_has_a_named_test_where_the_table_says(self):
        told = set()
        for rows, _, tests in self.table:
            names = re.findall(r"`(\w+)`", tests)
            self.assertTrue(names, rows)
            found = set()
            for name in names:
                self.assertIn(name, self.tests, rows)
                there = rows_of(self.tests[name])
                self.assertTrue(there & span(rows), f"{name} tests none of "
                                f"the rows {rows}")
                found |= there
            self.assertLessEqual(span(rows), found, f"rows {rows} in {names}")
            told |= span(rows)
        self.assertEqual(told, set(range(1, ROWS + 1)))

    def test_the_table_names_every_file_that_tests_a_row(self):
        for name, path in self.tests.items():
            for row in rows_of(path):
                told = "".join(tests for rows, _, tests in self.table
                               if row in span(rows))
                self.assertIn(f"`{name}`", told, f"row {row}")

    def test_every_rule_of_a_sidecar_has_a_named_test(self):
        found = {int(n) for n in re.findall(
            r"TEST\(NpkRulesTest,\s*V(\d+)Refuses",
            self.tests["npk_test"].read_text())}
        # V11 and V12 compare with what the caller pinned.
        found |= {int(n) for n in re.findall(
            r"TEST\(NpkRulesTest,\s*V(\d+)Holds",
            self.tests["npk_test"].read_text())}
        self.assertEqual(found, set(range(1, RULES + 1)))


if __name__ == "__main__":
    unittest.main()
