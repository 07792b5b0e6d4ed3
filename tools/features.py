#!/usr/bin/env python3
"""Which tests show which feature: writes tests/qualification/features.md from
the table tests/qualification/features.json. Change the table, then run

    tools/features.py [--check] [ROOT]

The table has a row for each feature of the specification, F1.01 to F6.20 in
order, with its `id`, its `capability` and one of these:

  tests              they would fail if the feature broke
  tests, missing     they show a part; what they leave open
  missing            not yet: what there must be first
  does_not_apply     why Kiln has no such feature

`tests` holds names by file: Suite.Name of a TEST, TEST_F or TEST_P, Class.test_x
of a Python test, or what add_test of a CMakeLists.txt calls a program that is
one test. A name that is not in its file is an error, and so is a disabled test.

--check writes nothing and compares with the markdown that is there. Exit code
1: the table is wrong, each fault is told; or the markdown is stale.
"""

import argparse
import ast
import collections
import json
import pathlib
import re
import sys

TABLE = pathlib.PurePath("tests/qualification/features.json")
MARKDOWN = TABLE.with_suffix(".md")

# Rows of each section of the specification's table.
SECTIONS = {
    "F1": ("Streams, formats, validation", 30),
    "F2": ("Arms and kernels", 27),
    "F3": ("Preparation and tuning", 24),
    "F4": ("Binding, memory, launch, graphs", 15),
    "F5": ("Attachable runtime", 4),
    "F6": ("Measurement protocols and receipts", 20),
}
IDS = [f"{section}.{n:02}" for section, (_, rows) in SECTIONS.items()
       for n in range(1, rows + 1)]

# The fields of a row beside id and capability say its kind.
KINDS = {
    frozenset({"tests"}): "shown by tests",
    frozenset({"tests", "missing"}): "in part",
    frozenset({"missing"}): "not yet",
    frozenset({"does_not_apply"}): "does not apply",
}

HEAD = """\
# Features, and the tests that show them

{counts}

Made by `tools/features.py` from `features.json`; a test compares the two and looks for every test
that is named. Ids are those of the feature table in the specification of TrellisMX and of
preparation; its rows F7 are about components that Kiln does not have. Where a row names tests
alone, they would fail if the feature broke; *in part* says what they leave open, *not yet* what
there must be first.

Tests in `tests/gpu`, `runtime_gpu_test` and `remote_racer_gpu_test` need a GPU and skip without
one. A name of a `CMakeLists.txt` is that of a program that is one test.
"""


def without_repeats(pairs):
    """An object of JSON; ValueError for a key that it has twice."""
    for key, count in collections.Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f'an object has the key "{key}" twice')
    return dict(pairs)


def tests_in(path):
    """Names of the tests of a file, as the table writes them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return {f"{suite.name}.{test.name}" for suite in ast.parse(text).body
                if isinstance(suite, ast.ClassDef) for test in suite.body
                if isinstance(test, ast.FunctionDef)
                and test.name.startswith("test_")}
    if path.name == "CMakeLists.txt":
        return set(re.findall(r"^\s*(?:add|mutants)_test\((?:NAME )?(\w+)",
                              text, re.MULTILINE))
    return {f"{suite}.{name}" for suite, name in re.findall(
        r"^TEST(?:_F|_P)?\(\s*((?!DISABLED_)\w+),\s*((?!DISABLED_)\w+)\)", text,
        re.MULTILINE)}


class Table:
    """The rows of features.json and what is wrong with them."""

    def __init__(self, root):
        self.root = root
        self.faults = []
        self.known = {}  # tests of each file that was read
        self.rows = []
        try:
            self.rows = json.loads((root / TABLE).read_text(encoding="utf-8"),
                                   object_pairs_hook=without_repeats)
        except (OSError, ValueError) as error:
            self.faults.append(str(error))
            return
        for row in self.rows:
            self.check_row(row)
        self.check_ids([row.get("id") for row in self.rows])

    def check_ids(self, ids):
        for id_, count in collections.Counter(ids).items():
            if id_ not in IDS:
                self.faults.append(f"{id_} is no row of the specification's "
                                   f"table, which has {IDS[0]} to {IDS[-1]}")
            elif count > 1:
                self.faults.append(f"{id_} is there {count} times: leave one")
        self.faults += [f"{id_} is missing: add its row"
                        for id_ in IDS if id_ not in ids]
        for before, after in zip(ids, ids[1:]):
            if before in IDS and after in IDS and before > after:
                self.faults.append(f"{before} stands before {after}: put the "
                                   "rows in order")

    def check_row(self, row):
        def fault(text):
            self.faults.append(f'{row.get("id")}: {text}')

        fields = frozenset(row) - {"id", "capability"}
        if fields not in KINDS:
            fault(f"has the fields {sorted(fields)}, must have one of "
                  f"{[sorted(kind) for kind in KINDS]}")
        if not row.get("capability"):
            fault("has no capability: say in a few words what the feature is")
        for field in fields & {"missing", "does_not_apply"}:
            if not re.fullmatch(r"[^\n|]+\.", row[field]):
                fault(f'{field} is "{row[field]}", must be a sentence of one '
                      "line that ends with a full stop")
        if "tests" in row and not row["tests"]:
            fault("has no tests: name some or say what is missing")
        for file, names in row.get("tests", {}).items():
            if not names:
                fault(f"{file} has no tests here: name some")
            for name, count in collections.Counter(names).items():
                if count > 1:
                    fault(f"{file}: {name} is named {count} times")
                if name not in self.tests_of(file):
                    fault(f"{file}: there is no test {name}; correct the name, "
                          "or say what is missing")

    def tests_of(self, file):
        """Names of the tests of a file of tests/, none if there is no file."""
        if file not in self.known:
            path = self.root / file
            in_tests = pathlib.PurePath(file).parts[:1] == ("tests",)
            self.known[file] = (tests_in(path)
                                if in_tests and path.is_file() else set())
        return self.known[file]

    def markdown(self):
        """The table for readers; only of a table without faults."""
        kinds = collections.Counter(map(kind_of, self.rows))
        counts = ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS.values())
        parts = [HEAD.format(counts=f"Of {len(self.rows)} rows: {counts}.")]
        for section, (title, _) in SECTIONS.items():
            parts.append(f"\n## {section}: {title}\n\n"
                         "| id | capability | shown by |\n|---|---|---|\n")
            parts += [f'| {row["id"]} | {row["capability"]} | {cell_of(row)} '
                      "|\n" for row in self.rows
                      if row["id"].startswith(section)]
        return "".join(parts)


def kind_of(row):
    return KINDS[frozenset(row) - {"id", "capability"}]


def cell_of(row):
    kind = kind_of(row)
    words = [] if kind == "shown by tests" else [
        f'*{kind}*: {row.get("missing") or row.get("does_not_apply")}']
    words += [f"`{file}`: " + ", ".join(f"`{name}`" for name in names) + "."
              for file, names in row.get("tests", {}).items()]
    return " ".join(words)


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true",
                        help="write nothing, compare with what is there")
    parser.add_argument("root", nargs="?", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[1])
    options = parser.parse_args(arguments)
    table = Table(options.root)
    if table.faults:
        for fault in table.faults:
            print(f"{TABLE}: {fault}", file=sys.stderr)
        return 1
    text = table.markdown()
    path = options.root / MARKDOWN
    if not options.check:
        path.write_text(text, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{MARKDOWN}: is not what {TABLE} says: run tools/features.py",
              file=sys.stderr)
        return 1
    print(text.splitlines()[2])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
