"""Measure the shape of the repository: `python -m tests.shape [ROOT]`, or `make shape`.

Reads the Python files that git tracks and prints one line per folder and one for the product, which
is everything but `tests`, `docs` and `.ci`. The last lines judge seven goals; the command exits
with 1 while one of them is missed.

Tokens count code without regard to line width: neither comments, docstrings' length nor line breaks
change them. The figures about names leave out `__dunder__` and `test_*` functions, and a leading
underscore is not a word. A share of comments counts lines that have a comment; `noqa`,
`type:` and `fmt:` are instructions to tools and do not count.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

OTHER_FOLDERS = frozenset({"tests", "docs", ".ci"})
MOST_PARAMETERS = 6

_LAYOUT_TOKENS = frozenset(
    {
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.COMMENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
)
_TOOL_COMMENTS = ("noqa", "type:", "fmt:")
_COLUMNS = (
    f"{'folder':18} {'mods':>4} {'lines':>7} {'tokens':>8}  med/max    fn med/p90/max 1w-free  1w-all"
    " 1w-loc comment    doc public   >6par"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Shape:
    """Counts over some modules, and the lengths of the modules and of their functions in lines."""

    counts: Counter[str] = field(default_factory=Counter)
    module_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)

    def add_shape(self, other: Shape) -> None:
        """Include another measurement in this one."""
        self.counts.update(other.counts)
        self.module_lines += other.module_lines
        self.function_lines += other.function_lines

    def compute_share(self, part: str, whole: str) -> float:
        """How many percent of `whole` are `part`; 0 if there is nothing to count."""
        return 100 * self.counts[part] / max(1, self.counts[whole])

    @property
    def function_p90(self) -> int:
        """Nine of ten functions have at most so many lines."""
        lengths = sorted(self.function_lines)
        return lengths[min(len(lengths) - 1, int(0.9 * len(lengths)))] if lengths else 0


class Goal(NamedTuple):
    """One figure of the product and the bound that it has to keep."""

    name: str
    read_figure: Callable[[Shape], float]
    bound: float
    at_least: bool = False
    unit: str = ""

    def is_met(self, shape: Shape) -> bool:
        """Whether the figure keeps its bound."""
        figure = self.read_figure(shape)
        return figure >= self.bound if self.at_least else figure <= self.bound

    def describe_figure(self, shape: Shape) -> str:
        """One line for people."""
        digits = 1 if self.unit else 0
        word = "at least" if self.at_least else "at most"
        state = "ok    " if self.is_met(shape) else "missed"
        figure = f"{self.read_figure(shape):,.{digits}f}{self.unit}"
        return f"{state} {self.name}: {figure} ({word} {self.bound:,.0f}{self.unit})"


GOALS = (
    Goal(
        "one-word functions outside classes",
        lambda shape: shape.compute_share("free_one_word", "free"),
        15,
        unit=" %",
    ),
    Goal(
        "one-word functions",
        lambda shape: shape.compute_share("one_word", "functions"),
        40,
        unit=" %",
    ),
    Goal("modules", lambda shape: len(shape.module_lines), 240),
    Goal("tokens", lambda shape: shape.counts["tokens"], 285_000),
    Goal("lines of a function, 90th percentile", lambda shape: shape.function_p90, 24),
    Goal(
        "public docstrings",
        lambda shape: shape.compute_share("public_doc", "public"),
        97,
        at_least=True,
        unit=" %",
    ),
    Goal(
        "lines with a comment",
        lambda shape: shape.compute_share("comments", "lines"),
        3,
        at_least=True,
        unit=" %",
    ),
)


def name_folder(path: str) -> str:
    """The folder that a file is counted in: the top folder, below `jobs` the second."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "jobs" and len(parts) > 2 else parts[0]


def count_words(name: str) -> int:
    """How many words a name in snake case has."""
    return sum(1 for word in name.split("_") if word)


def measure_text(text: str) -> Shape:
    """Measure one module.

    Raises:
        SyntaxError: if the text is not Python.
    """
    tree = ast.parse(text)
    lines = text.count("\n")
    shape = Shape(Counter(lines=lines), [lines])
    _count_tokens(text, shape.counts)
    methods = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _count_docstring(node, shape.counts)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            shape.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            _count_function(node, is_method=id(node) in methods, counts=shape.counts)
    return shape


def _count_tokens(text: str, counts: Counter[str]) -> None:
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    counts["tokens"] = sum(token.type not in _LAYOUT_TOKENS for token in tokens)
    counts["comments"] = len(
        {
            token.start[0]
            for token in tokens
            if token.type == tokenize.COMMENT
            and not any(word in token.string for word in _TOOL_COMMENTS)
        }
    )


def _count_docstring(node: ast.Module | ast.ClassDef | Function, counts: Counter[str]) -> None:
    has_docstring = ast.get_docstring(node) is not None
    if has_docstring:
        counts["doc"] += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    if not isinstance(node, ast.Module) and not node.name.startswith("_"):
        counts["public"] += 1
        counts["public_doc"] += has_docstring


def _count_function(node: Function, *, is_method: bool, counts: Counter[str]) -> None:
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [parameter for parameter in parameters if parameter.arg not in ("self", "cls")]
    counts["many_parameters"] += len(named) > MOST_PARAMETERS
    if not node.name.startswith(("__", "test_")):
        is_short = count_words(node.name) <= 1
        counts["functions"] += 1
        counts["one_word"] += is_short
        if not is_method:
            counts["free"] += 1
            counts["free_one_word"] += is_short
    stored = {
        name.id
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and len(name.id) > 1
    }
    counts["locals"] += len(stored)
    counts["one_word_locals"] += sum(count_words(name) <= 1 for name in stored)


def list_python_files(root: Path) -> list[str]:
    """Paths of the Python files that git tracks and that exist, links left out.

    Raises:
        subprocess.CalledProcessError: if `root` is not in a git checkout.
    """
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    return [name for name in listed if (root / name).is_file() and not (root / name).is_symlink()]


def measure_files(root: Path, names: Iterable[str]) -> dict[str, Shape]:
    """Measure files, by folder."""
    folders: dict[str, Shape] = defaultdict(Shape)
    for name in names:
        folders[name_folder(name)].add_shape(measure_text((root / name).read_text("utf-8")))
    return dict(folders)


def select_product(folders: dict[str, Shape]) -> Shape:
    """One shape for everything that is shipped."""
    product = Shape()
    for name, shape in folders.items():
        if name not in OTHER_FOLDERS:
            product.add_shape(shape)
    return product


def format_row(name: str, shape: Shape) -> str:
    """One line of the table."""
    counts, functions = shape.counts, shape.function_lines or [0]
    return (
        f"{name:18} {len(shape.module_lines):4} {counts['lines']:7,} {counts['tokens']:8,}"
        f"  {int(statistics.median(shape.module_lines)):4}/{max(shape.module_lines):<5}"
        f" {int(statistics.median(functions)):3}/{shape.function_p90}/{max(functions):<5}"
        f" {shape.compute_share('free_one_word', 'free'):4.0f} %"
        f" {shape.compute_share('one_word', 'functions'):4.0f} %"
        f"  {shape.compute_share('one_word_locals', 'locals'):4.0f} %"
        f" {shape.compute_share('comments', 'lines'):5.1f} %"
        f" {shape.compute_share('doc', 'lines'):4.0f} %"
        f" {shape.compute_share('public_doc', 'public'):4.0f} %"
        f" {counts['many_parameters']:5}"
    )


def judge_goals(product: Shape) -> tuple[list[str], bool]:
    """The lines about the goals, the summary last, and whether all goals are met."""
    met = sum(goal.is_met(product) for goal in GOALS)
    lines = [goal.describe_figure(product) for goal in GOALS]
    return [*lines, f"shape: {met} of {len(GOALS)} goals"], met == len(GOALS)


def main(arguments: Sequence[str]) -> int:
    """Print the table and the goals; 1 if a goal is missed."""
    root = Path(arguments[0] if arguments else ".").resolve()
    folders = measure_files(root, list_python_files(root))
    product = select_product(folders)
    lines, all_met = judge_goals(product)
    table = [format_row(name, folders[name]) for name in sorted(folders)]
    sys.stdout.write(
        "\n".join([_COLUMNS, *table, format_row("PRODUCT", product), "", *lines]) + "\n"
    )
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
