"""``make site``: builds the documents as a site, which needs neither a network nor a server.

The pages are those of the repository, in the parts of `docs/site.toml`. A link to another
file leads to a copy of it; one to a folder without a page becomes its name.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = Path(__file__).with_name("site.toml")
"""The settings of Zensical; `nav` is the table of contents."""
_SEARCH = SETTINGS.with_name("search_without_server.js")
"""A copy of what Zensical's pages load from this address to search without a server."""
_SEARCH_ADDRESS = "https://unpkg.com/iframe-worker/shim"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def list_pages() -> list[Path]:
    """The pages of the site, in the repository."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    return pages + sorted((ROOT / "docs").rglob("*.md"))


def build_site(work: Path, take_pictures: Callable[[Path], None] = lambda _: None) -> Path:
    """Build the site below a folder, whose content is deleted; return the folder of the site.

    Args:
        work: the folder.
        take_pictures: puts new pictures into a folder that has those of the repository.

    Raises:
        CalledProcessError: a link of a page leads nowhere.
    """
    shutil.rmtree(work, ignore_errors=True)
    for page in list_pages():
        _copy_page(page, work / "pages")
    take_pictures(work / "pages/docs/images")
    shutil.copyfile(SETTINGS, work / "zensical.toml")
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict"], cwd=work, check=True)
    site = work / "site"
    shutil.copyfile(_SEARCH, site / "assets" / _SEARCH.name)
    for file in site.rglob("*.html"):
        top = "../" * (len(file.relative_to(site).parts) - 1)
        text = file.read_text("utf-8").replace(_SEARCH_ADDRESS, f"{top}assets/{_SEARCH.name}")
        file.write_text(text, "utf-8")
    return site


def _copy_page(page: Path, target: Path) -> None:
    copy = target / page.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = page.read_text("utf-8")
    copy.write_text(_LINK.sub(lambda link: _resolve_link(link, page, target), text), "utf-8")


def _resolve_link(link: re.Match[str], page: Path, target: Path) -> str:
    """Copy the file that a link leads to; return the link as it is on the site."""
    text, address, anchor = link.groups(default="")
    linked = (page.parent / address).resolve()
    if "://" in address or linked.suffix == ".md":
        return link[0]
    if linked.is_dir():
        has_page = (linked / "README.md").exists()
        return f"[{text}]({address.rstrip('/')}/README.md{anchor})" if has_page else text
    copy = target / linked.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(linked, copy)
    return link[0]


if __name__ == "__main__":
    from docs.screenshots import take_made_up_streams  # needs the packages of the tests

    pictures = take_made_up_streams if shutil.which("chromium") else lambda _: None
    sys.stdout.write(f"{build_site(ROOT / 'build/docs', pictures)}/index.html\n")
