"""Draw random public docstrings for a reader who has not seen the code: `make fresh-eyes SEED=1`.

Prints the name and the docstring of public functions, methods and classes of the product, without
their code. The reader writes down in one sentence each what the thing does; the answers are then
compared with the code, whose place `--answers` prints. The same seed over the same tree draws the
same docstrings.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.shape import OTHER_FOLDERS, list_python_files, name_folder


class PublicDocstring(NamedTuple):
    """One docstring, and where it is."""

    place: str
    name: str
    text: str


def list_docstrings(root: Path) -> list[PublicDocstring]:
    """Every public docstring of the product below `root`, modules left out."""
    return [
        found
        for file in list_python_files(root)
        if name_folder(file) not in OTHER_FOLDERS
        for found in _read_docstrings(file, ast.parse((root / file).read_text("utf-8")), "")
    ]


def _read_docstrings(
    file: str, owner: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[PublicDocstring]:
    for node in owner.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield PublicDocstring(f"{file}:{node.lineno}", prefix + _name_header(node), text)
        if isinstance(node, ast.ClassDef):
            yield from _read_docstrings(file, node, f"{node.name}.")


def _name_header(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return f"{node.name}({', '.join(a.arg for a in arguments if a.arg not in ('self', 'cls'))})"


def draw_docstrings(root: Path, *, seed: int, count: int) -> list[PublicDocstring]:
    """Draw `count` docstrings, or all if there are fewer."""
    found = list_docstrings(root)
    return random.Random(seed).sample(found, min(count, len(found)))


def format_docstrings(drawn: Sequence[PublicDocstring], *, answers: bool) -> str:
    """The text for the reader; with `answers` also where each docstring is."""
    blocks = []
    for number, docstring in enumerate(drawn, 1):
        place = f"   ({docstring.place})" if answers else ""
        text = textwrap.indent(docstring.text, "    ")
        blocks.append(f"{number}. {docstring.name}{place}\n{text}\n")
    return "\n".join(blocks)


def main(arguments: Sequence[str]) -> int:
    """Print the drawn docstrings."""
    parser = argparse.ArgumentParser(prog="fresh_eyes", description="draw public docstrings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--answers", action="store_true", help="also print file and line")
    options = parser.parse_args(arguments)
    drawn = draw_docstrings(Path.cwd(), seed=options.seed, count=options.count)
    sys.stdout.write(format_docstrings(drawn, answers=options.answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
