#!/usr/bin/env python3
"""Writes text files into a C++ source as one table, sorted by name.

The generated file defines, in namespace kiln,
    const std::vector<std::pair<std::string, std::string>>& FUNCTION();
with the name relative to --root and the contents. Names use '/' and contain
no path of the machine, so the table is the same wherever it is built.
"""

import argparse
import os


def literal(text: str) -> str:
    # Raw strings are limited in length by some compilers; 8 KiB pieces are
    # concatenated by the language.
    pieces = [text[i:i + 8192] for i in range(0, len(text), 8192)] or [""]
    return "\n".join(f'R"KILN({piece})KILN"' for piece in pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--function", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()

    rows = []
    for path in arguments.files:
        with open(path, encoding="utf-8") as handle:
            text = handle.read()
        if ")KILN\"" in text:
            raise SystemExit(f"{path}: contains the raw-string delimiter")
        name = os.path.relpath(path, arguments.root).replace(os.sep, "/")
        rows.append((name, text))
    rows.sort()
    with open(arguments.output, "w", encoding="utf-8") as out:
        out.write("#include <string>\n#include <utility>\n"
                  "#include <vector>\n\nnamespace kiln {\n\n"
                  "const std::vector<std::pair<std::string, std::string>>& "
                  f"{arguments.function}();\n\n"
                  "const std::vector<std::pair<std::string, std::string>>& "
                  f"{arguments.function}() {{\n"
                  "  static const auto* const files =\n"
                  "      new std::vector<std::pair<std::string, "
                  "std::string>>{\n")
        for name, text in rows:
            out.write(f'          {{"{name}",\n{literal(text)}}},\n')
        out.write("      };\n  return *files;\n}\n\n}  // namespace kiln\n")


if __name__ == "__main__":
    main()
