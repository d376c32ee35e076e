"""Which code of the user goes with a spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.user_code import (
    collect_code,
    collect_module_code,
    find_code_folder,
    find_script,
    link_other_files,
    write_code,
)

JOB = "apiVersion: tidegate/v1\nkind: job\nname: j\napp: apps/count.py\n"
PIPELINE = """\
apiVersion: tidegate/v1
name: p
sources: {a: {path: in, schema: {t: timestamp, v: double}, event_time: t, lag: 1s}}
streams: {out: {schema: {v: double}}}
reducers: {r: {from: events, to: out, function: "folds.sums:fold"}}
"""


def make_files(folder: Path, texts: dict[str, str]) -> None:
    """Files of Python."""
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_job_brings_its_script_and_what_it_imports(tmp_path: Path) -> None:
    """From the folder of the script; installed packages and other files stay where they are."""
    (tmp_path / "j.yaml").write_text(JOB)
    files = {"count.py": "import json, helper\n", "helper.py": "import deep.one\n"}
    more = {"deep/__init__.py": "", "deep/one.py": "x = 1\n", "unused.py": "y = 1\n"}
    make_files(tmp_path / "apps", files | more)
    spec = load_any_spec(tmp_path / "j.yaml")
    code = collect_code(spec, tmp_path / "j.yaml")
    assert sorted(code) == ["count.py", "deep/__init__.py", "deep/one.py", "helper.py"]
    assert find_script(spec, tmp_path / "j.yaml") == tmp_path / "apps/count.py"  # type: ignore[arg-type]
    write_code(code, tmp_path / "copy")
    assert (tmp_path / "copy/deep/one.py").read_text() == "x = 1\n"


def test_code_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """The script is there with its mistake, which its start reports; or it is not there at all."""
    (tmp_path / "j.yaml").write_text(JOB)
    spec = load_any_spec(tmp_path / "j.yaml")
    assert collect_code(spec, tmp_path / "j.yaml") == {}
    make_files(tmp_path / "apps", {"count.py": "import helper\nif\n", "helper.py": ""})
    assert collect_code(spec, tmp_path / "j.yaml") == {"count.py": "import helper\nif\n"}


def test_a_pipeline_brings_the_modules_of_its_reducers(tmp_path: Path) -> None:
    """Those beside the spec."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    spec = load_any_spec(tmp_path / "p.yaml")
    assert collect_code(spec, tmp_path / "p.yaml") == {}
    files = {"__init__.py": "", "sums.py": "from .base import x\n", "base.py": "x=1"}
    make_files(tmp_path / "folds", files)
    found = collect_code(spec, tmp_path / "p.yaml")
    assert sorted(found) == ["folds/__init__.py", "folds/base.py", "folds/sums.py"]
    assert find_code_folder(spec, tmp_path / "p.yaml") == tmp_path


def test_the_code_of_a_module_is_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another encoding. Modules that the standard library hides, and packages, are not."""
    (tmp_path / "shop_sums.py").write_bytes(
        "# -*- coding: latin-1 -*-\nimport json\nimport shop_rates\nNAME = 'é'\n".encode("latin-1")
    )
    (tmp_path / "shop_rates.py").write_text("import pytest\n")
    (tmp_path / "json.py").write_text("raise ImportError('hidden by the library')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    files, folders = collect_module_code(["shop_sums", "itertools", "pytest"])
    assert files.keys() == {"shop_sums.py", "shop_rates.py"}
    assert folders == [tmp_path]
    (tmp_path / "shop-1.0.dist-info").mkdir()
    assert collect_module_code(["shop_sums"]) == ({}, [])


def test_other_files_are_linked_once_and_hide_no_module(tmp_path: Path) -> None:
    """Two modules of one folder, links that lead nowhere or in a circle, and a folder that went."""
    checkout, copy = tmp_path / "checkout", tmp_path / "copy"
    make_files(checkout, {"data/rates.csv": "EUR,1", "calendar.py": "", "pandas/__init__.py": ""})
    make_files(checkout, {"shop/sums.py": "", "shop/rates.csv": "", "shop/more.py": ""})
    make_files(copy, {"shop/sums.py": ""})
    (checkout / "lost").symlink_to("nowhere")
    (checkout / "data/loop").symlink_to("..")
    for _ in range(2):
        link_other_files(checkout, copy, with_modules=False)
    link_other_files(tmp_path / "gone", copy, with_modules=False)
    assert (copy / "data/rates.csv").read_text() == "EUR,1"
    assert {file.name for file in copy.iterdir()} == {"data", "lost", "shop"}
    assert {file.name for file in (copy / "shop").iterdir()} == {"sums.py", "rates.csv", "more.py"}
    link_other_files(checkout, copy, with_modules=True)
    assert (copy / "calendar.py").is_symlink()
