"""New functions have a verb and an object; modules share a name only for a reason.

Docstrings avoid words that have several meanings. The rules are those of CONTRIBUTING.md, sections
"Names" and "Prose".
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shape import OTHER_FOLDERS, count_words, list_python_files, name_folder

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "src").exists(), reason="the folders of the packages are not here"
)

# A new verb is welcome if no verb of this list says the same.
_VERB_LIST = """
    abort accept accepts acknowledge add address adjust adopt advance advise allow announce annotate answer
    append apply archive assign audit average await bind bound build can cast change check choose
    claim classify clean close closes collect combine commit compact compare compute concat conclude
    condemn configure confirm conform connect convert copy count covers create cut decide declare
    decode decompress delete deploy derive describe detect diagnose diff digest divide download drain
    draw drive drop dump emit encode end ensure escape estimate evict expand expire explain export
    extend extract feed fetch fill finalize find flatten fold follow forget format forward fsync
    gather generate get grant group grow has hash have holds identify import index infer inherits
    insert install interpret is iter iterate join judge keep kill lacks land launch limit link list
    listen load locate lock log maintain make map mask match matches may measure merge move name narrow
    needs new normalize note on open opens order pair parse passes pick pin plan poll prepare
    print probe process propose provision publish put query quote rank read reap rebuild recompute
    record reduce refuse register reject release remove rename render replace replay report request
    require resolve respond restore rewrite roll round run runs sample saturate scan scrub seal select
    selects send serve set ship shorten show signal sketch skip slice slugify sort spawn split
    stage start stop store stream stringify strip submit subtract suggest sum summarize survey
    tabulate tail take takes terminate touch trace translate truncate try unwrap update use uses validate
    verify wait watch wrap write
"""
VERBS = frozenset(_VERB_LIST.split())
# Functions named after what they return: an SQL expression, an error, or the same value in another
# form. `build_` before each of them would say nothing.
NAMED_AFTER_RESULT = ("_sql", "_error", "_asset")
# Entry points of programs, which the tools that call them name.
ENTRY_POINTS = frozenset(
    {"main", "get_provider_info", "pytest_addoption", "pytest_collect_file", "tidegate_case"}
)
# Older than the rule. This list only gets shorter.
_OLDER_LIST = """
    bucket_upper_bound canonical_bytes console decide event_columns
    fence_text lines max_frontier sha256_of_bytes sha256_of_file values_differ
    _matches _names_who_must_act _record
    _removed_rows
"""
OLDER_NAMES = frozenset(_OLDER_LIST.split())
SHARED_NAMES = {
    "__init__.py": "marks a package",
    "__main__.py": "makes a package a program",
    "errors.py": "the error catalogue of its folder",
    "factory.py": "creates the folder's parts from a spec",
}


def list_functions() -> Iterator[tuple[str, str]]:
    """(file, name) of the product's functions at module level."""
    for file in list_product_files():
        for node in ast.parse((ROOT / file).read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node.name


def list_product_files() -> list[str]:
    """Every module that is shipped."""
    return [file for file in list_python_files(ROOT) if name_folder(file) not in OTHER_FOLDERS]


def has_good_name(name: str) -> bool:
    """Whether a function's name follows the rule."""
    if name in ENTRY_POINTS or (name.startswith("__") and name.endswith("__")):
        return True
    first = name.lstrip("_").partition("_")[0]
    converts = name.startswith("to_") or "_to_" in name or "_from_" in name
    return count_words(name) > 1 and (
        first in VERBS or converts or name.endswith(NAMED_AFTER_RESULT)
    )


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("read_manifest", True),
        ("_refuse_changed_objects", True),
        ("main", True),
        ("late_rows_sql", True),
        ("record_to_row", True),
        ("read", False),
        ("_refused", False),
        ("late_rows", False),
    ],
)
def test_the_rule_asks_for_a_verb_and_an_object(name: str, good: bool) -> None:
    """One word is not enough, and neither is a noun with an adjective."""
    assert has_good_name(name) is good


def test_functions_have_a_verb_and_an_object() -> None:
    """A new function at module level says what it does, and to what."""
    bad = [
        f"{file}: {name}"
        for file, name in list_functions()
        if not has_good_name(name) and name not in OLDER_NAMES
    ]
    assert bad == []


def test_the_list_of_older_names_only_gets_shorter() -> None:
    """A name that was improved, or is gone, does not stay excused."""
    names = {name for _, name in list_functions()}
    assert {name for name in OLDER_NAMES if name not in names or has_good_name(name)} == set()


def test_modules_share_a_name_only_for_a_reason() -> None:
    """Two modules of one name play the same role in two folders."""
    files = defaultdict(list)
    for file in list_product_files():
        files[Path(file).name].append(file)
    shared = {name: found for name, found in files.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(shared)


# "There is no" and "is no longer" are plain English; "is no file" reads like a mistake.
_UNCLEAR_WORDS = re.compile(
    r"\b(told|stands?|standing|nobody)\b|(?<!there )\bis no (?!longer\b|one\b)", re.IGNORECASE
)


def list_docstrings(file: str) -> Iterator[str]:
    """Every docstring of a module, with those under its fields and constants."""
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def find_unclear_folders() -> dict[str, list[str]]:
    """Folder -> its docstrings with such a word, as file and word."""
    found = defaultdict(list)
    for file in list_python_files(ROOT):
        for text in list_docstrings(file):
            if word := _UNCLEAR_WORDS.search(" ".join(text.split())):
                found[Path(file).parent.as_posix()].append(f"{file}: {word.group()}")
    return found


@pytest.mark.parametrize(
    ("text", "clear"),
    [
        ("There is no such file.", True),
        ("It is no longer there.", True),
        ("The lease is held by a driver that understands.", True),
        ("A job is no pipeline.", False),
        ("The row stands in the table.", False),
        ("Nobody is told.", False),
    ],
)
def test_the_rule_refuses_words_with_several_meanings(text: str, clear: bool) -> None:
    """The usual phrases with the same letters pass."""
    assert (_UNCLEAR_WORDS.search(text) is None) is clear


def test_docstrings_avoid_words_with_several_meanings() -> None:
    """A reader whose first language is another one has to guess which meaning is meant."""
    assert find_unclear_folders() == {}


def list_short_imports(file: str) -> Iterator[str]:
    """Imports of a file that name a folder of the repository instead of the package."""
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in _ROOMS)


_ROOMS = frozenset({"checkpoints", "expectations", "infra", "jobs", "operators"})


def test_imports_name_the_package() -> None:
    """The same file under two names would give two different classes.

    Ruff could hold this rule, but it takes the relative imports inside a room for short names.
    """
    found = [
        f"{file}: {name}" for file in list_python_files(ROOT) for name in list_short_imports(file)
    ]
    assert found == []
