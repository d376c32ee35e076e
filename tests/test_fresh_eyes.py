"""The draw for the exercise with a reader who has not seen the code."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.fresh_eyes import draw_docstrings, format_docstrings, list_docstrings

MODULE = '''"""Module."""

class Lease:
    """A lease."""

    def renew(self, now):
        """Renew it.

        Raises:
            Fenced: if another process holds it.
        """
        secret_code(now)

    def _hide(self):
        """Private."""

def read_rows(path, *, limit):
    """Read rows."""

def no_docstring(): ...
'''


def make_checkout(root: Path) -> None:
    """A checkout with one module of the product and one of the tests."""
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for folder in ("jobs", "tests"):
        (root / folder).mkdir()
        (root / folder / "lease.py").write_text(MODULE)
    subprocess.run(["git", "add", "."], cwd=root, check=True)


def test_the_reader_sees_names_and_docstrings_but_no_code(tmp_path: Path) -> None:
    """Public functions, methods and classes of the product; neither bodies nor places."""
    make_checkout(tmp_path)
    found = list_docstrings(tmp_path)
    assert [docstring.name for docstring in found] == [
        "class Lease",
        "Lease.renew(now)",
        "read_rows(path, limit)",
    ]
    text = format_docstrings(found, answers=False)
    assert "Fenced: if another process holds it." in text
    assert "secret_code" not in text
    assert "lease.py" not in text
    assert "lease.py:6)" in format_docstrings(found, answers=True)


def test_a_seed_draws_the_same_docstrings(tmp_path: Path) -> None:
    """So the answers can be compared with the code later."""
    make_checkout(tmp_path)
    drawn = [draw_docstrings(tmp_path, seed=seed, count=2) for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 2
    assert len({tuple(one) for one in drawn}) > 1
