"""The site of the documents: its parts, and that it needs no network."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.site import ROOT, SETTINGS, build_site, list_pages

_LOADED = re.compile(r"""<(?:script|link|img)[^>]*\s(?:src|href)="?(https?:[^"\s>]*)""")


def _list_contents(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
        return
    for one in part.values() if isinstance(part, dict) else part:
        yield from _list_contents(one)


def test_each_page_is_in_one_part_of_the_site() -> None:
    """A page that no part has is found by search alone. Decisions are listed on a page of theirs."""
    pages = [str(page.relative_to(ROOT)) for page in list_pages()]
    parts = tomllib.loads(SETTINGS.read_text("utf-8"))["project"]["nav"]
    own = [page for page in pages if not re.match(r"docs/decisions/\d", page)]
    assert sorted(_list_contents(parts)) == sorted(own)


@pytest.mark.e2e
def test_the_site_needs_no_network(tmp_path: Path) -> None:
    """Every link leads somewhere, nothing is loaded from elsewhere, and search knows the pages."""
    site = build_site(tmp_path / "docs")
    pages = [*site.rglob("*.html")]
    assert len(pages) > len(list_pages())
    assert [link for page in pages for link in _LOADED.findall(page.read_text("utf-8"))] == []
    found = json.loads((site / "search.json").read_text("utf-8"))["items"]
    assert any(item["location"].startswith("docs/how-to/last-window.html") for item in found)
    assert 'data-md-color-scheme="slate"' in (site / "index.html").read_text("utf-8")
