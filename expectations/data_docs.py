"""Writes the Data Docs into the bucket: Great Expectations' pages without CDNs, and an index.

    <pipeline>/quality/docs/index.html               all runs, newest first
    <pipeline>/quality/docs/<run>/index.html         one run: every check and what was seen
    <pipeline>/quality/docs/<run>/<suite>.<summary>.html   GX's own page
    <pipeline>/quality/results/<run>.json latest.json      the same for machines
    <pipeline>/quality/history.json                  the runs the index lists; a cache, the results
    are the truth

GX's pages load styles and scripts from eight foreign servers. They are replaced by one style sheet:
the pages must be readable behind a login, offline and in dark mode, and must not show to other
servers that they are read.
"""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import jinja2
import pandas as pd

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.json_types import JsonObject, JsonView

from .gx_runner import RunResult, format_number

_RUNS_KEPT = 100  # runs listed and kept, with results and Data Docs; about 0.3 MB each
_WRITER_THREADS = 8  # pages are written side by side: a PUT is mostly waiting
_ROWS_SHOWN = 50  # rows of a summary on the run's page

# Removed one after another from a page of GX.
_NOISE = (
    r"<script\b.*?</script>",
    r"<link\b[^>]*>",
    r"<style\b.*?</style>",
    # The navigation around the page, and its sidebar.
    r'<nav class="navbar.*?</nav>\s*</div>\s*</nav>|<footer>.*?</footer>',
    r'<div class="col-lg-2.*?(?=<div class="col-md-10)',
    # Buttons and code that select the rows in a notebook.
    r'<p class="m-0">\s*<a data-toggle="collapse".*?</a>\s*</p>|<code\s*>\s*df\.filter.*?</code>',
    r"Data asset: None<br>",
)
_SUITE_LINK = re.compile(r'<a href="[./]*expectations/[^"]*"\s*>(.*?)</a>', re.DOTALL)


def publish_data_docs(store: Store, result: JsonView, run: RunResult) -> str:
    """Write pages and results into the store, the newest pointers last.

    Results and pages of runs before the newest 100 are deleted. Return the key of the result.
    """
    quality = BucketLayout(result["pipeline"]).quality_prefix
    folder = f"{quality}docs/{result['id']}/"
    with ThreadPoolExecutor(_WRITER_THREADS) as pool:
        written = [
            pool.submit(store.put, f"{folder}{name}.html", page.encode())
            for name, page in _render_run_pages(result, run).items()
        ]
        for page in written:
            page.result()
    key = f"{quality}results/{result['id']}.json"
    data = canonical_bytes(dict(result))
    store.put(key, data)
    # After the result: history and index name only runs whose pages are there.
    runs = _add_run_to_history(store, quality, result, run)
    title = f"Quality of {result['pipeline']}"
    index = _render_template("index.html", title=title, pipeline=result["pipeline"], runs=runs)
    store.put(f"{quality}docs/index.html", index.encode())
    # Last, because programs that read the newest result begin here.
    store.put(f"{quality}results/latest.json", data)
    return key


def _render_run_pages(result: JsonView, run: RunResult) -> dict[str, str]:
    """File name (without .html) -> page of one run."""
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
    from great_expectations.render.view.view import DefaultJinjaPageView

    # Untyped; one for all pages, since it compiles its templates each time.
    view: Any = DefaultJinjaPageView()
    renderer = ValidationResultsPageRenderer(run_info_at_end=True)
    pages = {"index": _render_run_index(result, run)}
    for name, validation in run.validations.items():
        validation.meta["run_id"] = {"run_name": result["pipeline"], "run_time": result["at"]}
        pages[name] = _clean_gx_page(
            view.render(renderer.render(validation)), f"{result['pipeline']}: {name}", result["at"]
        )
    return pages


def _clean_gx_page(page: str, title: str, at: str) -> str:
    """GX's page without what needs the network, scripts, or GX's own site around it."""
    body = page[page.index("<body>") + len("<body>") : page.rindex("</body>")]
    for noise in _NOISE:
        body = re.sub(noise, "", body, flags=re.DOTALL)
    body = _SUITE_LINK.sub(r"\1", body)
    trail = f'<p class="trail"><a href="index.html">quality run of {at}</a></p>'
    return _render_template("page.html", title=title).replace(
        "<body>", f"<body>\n{trail}\n<h1>{title}</h1>\n{body}"
    )


def _render_run_index(result: JsonView, run: RunResult) -> str:
    title = f"Quality of {result['pipeline']}: {result['verdict']}"
    frames = {name: _select_shown_rows(frame) for name, frame in run.frames.items()}
    return _render_template(
        "run.html", title=title, result=result, titles=run.titles, frames=frames
    )


def _select_shown_rows(frame: pd.DataFrame) -> JsonObject:
    newest = frame.tail(_ROWS_SHOWN).iloc[::-1] if len(frame) > _ROWS_SHOWN else frame
    rows = [[_format_frame_cell(value) for value in row] for row in newest.itertuples(index=False)]
    return {"columns": list(frame.columns), "rows": rows, "more": len(frame) - len(rows)}


def _format_frame_cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else format_number(value)
    return str(value)


def _add_run_to_history(
    store: Store, quality: str, result: JsonView, run: RunResult
) -> list[JsonObject]:
    """Add the run to the history and drop the pages of what falls out of it.

    Of two runs at once one may be missing there.
    """
    key = f"{quality}history.json"
    try:
        before = parse_json(store.get(key).data)["runs"]
    except (NotFoundError, ValueError, KeyError, TypeError):
        # The history is a cache, so a damaged one starts again without runs.
        before = []
    entry = {k: result.get(k) for k in ("id", "at", "verdict", "checkpoint", "recent_since")}
    failed = result["failed"]
    critical = [c for c in run.failed_checks if c.severity == "critical" and c.epochs]
    entry |= {
        "failed": [check["id"] for check in failed],
        "critical": [{"check": c.id, "epochs": c.epochs} for c in critical],
        "values": {c.id: c.value for c in run.checks if c.value is not None},
    }
    runs = [entry, *before]
    for old in runs[_RUNS_KEPT:]:
        for page in list(store.list_objects(f"{quality}docs/{old['id']}/")):
            store.delete(page.key)
        store.delete(f"{quality}results/{old['id']}.json")
    runs = runs[:_RUNS_KEPT]
    store.put(key, canonical_bytes({"format_version": 1, "runs": runs}))
    return runs


def _render_template(template: str, **values: Any) -> str:
    css = resources.files(__package__).joinpath("docs.css").read_text("utf-8")
    loader = jinja2.PackageLoader(__package__)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    return environment.get_template(template).render(css=css, **values)
