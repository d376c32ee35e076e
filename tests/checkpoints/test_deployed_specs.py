"""The deployed spec: sealed copies, and which of them the next driver runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.checkpoints.deployed_specs import (
    MOST_ATTEMPTS,
    Deploy,
    SpecCopy,
    compare_with_copy,
    confirm_deploy,
    count_attempt,
    fill_secrets,
    list_deploy_warnings,
    make_copy,
    note_failed_deploy,
    note_file,
    read_copy,
    read_deployed,
    start_deploy,
    write_copy,
)
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.spec.loader import parse_spec

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  b: {path: in/b, schema: {t: timestamp, v: double}, event_time: t, lag: 1s}
  a: {path: in/a, schema: {t: timestamp, v: double}, event_time: t, lag: 1s}
spark: {conf: {spark.sql.x: "1"}}
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def copy_of(text: str = SPEC, **code: str) -> SpecCopy:
    """The copy of a spec, with files of code."""
    return make_copy(parse_spec(text), {f"{name}.py": body for name, body in code.items()})


def deploy_of(copy: SpecCopy) -> Deploy:
    """A deploy of a copy, by a person."""
    return Deploy(digest=copy.digest, who="olga", at=1)


def test_a_copy_is_read_as_it_was_sealed(store: LocalStore) -> None:
    """Also the order of its sources, which decides something; writing it again is harmless."""
    copy = copy_of(fold="x = 1\n")
    write_copy(store, "p", copy)
    write_copy(store, "p", copy)
    found = read_copy(store, "p", copy.digest)
    assert (found, found.parse_spec()) == (copy, parse_spec(SPEC))
    assert [*found.parse_spec().sources] == ["b", "a"]  # type: ignore[union-attr]
    assert found.parse_spec().digest() == parse_spec(SPEC).digest()  # type: ignore[call-arg]
    with pytest.raises(PoisonError, match="it is not there"):
        read_copy(store, "p", "0" * 64)


def test_secrets_come_from_the_file(store: LocalStore) -> None:
    """The copy has no secret; the file fills in what it holds in the same place, also a new one."""
    sink = "sinks: {s: {kind: postgres, url: 'postgresql://u:%s@h/d'}}\n"
    spec = parse_spec(SPEC + sink % "s3cret")
    copy = make_copy(spec, {})
    assert "s3cret" not in copy.spec
    assert fill_secrets(copy, spec) == spec
    changed = parse_spec(SPEC + sink % "n3w")
    assert fill_secrets(copy, changed) == changed
    assert compare_with_copy(copy, changed, {}) == []
    assert "***" in fill_secrets(copy, None).model_dump_json()
    elsewhere = parse_spec(SPEC + sink.replace("@h/", "@other/") % "s3cret")
    assert "s3cret" not in fill_secrets(copy, elsewhere).model_dump_json()


def test_differences_are_fields_and_lines() -> None:
    """No hashes; names with dots, an order, and code by its lines."""
    copy = copy_of(gone="x\n", fold="a\nb\n")
    lines = SPEC.splitlines(keepends=True)
    text = "".join([*lines[:3], lines[4], lines[3], lines[5]])
    text = text.replace("1s}\n", "2s}\n", 1).replace('"1"', '"2"')
    code = {"fold.py": "a\nc\nd\n", "more.py": "y\n"}
    found = [str(one) for one in compare_with_copy(copy, parse_spec(text), code)]
    assert found == [
        'sources.a.lag: "1s" -> "2s"',
        'spark.conf.spark.sql.x: "1" -> "2"',
        "order of sources: b, a -> a, b",
        "code fold.py: 2 lines added, 1 removed",
        "code gone.py: removed",
        "code more.py: added",
    ]
    assert compare_with_copy(copy, parse_spec(SPEC), {"gone.py": "x\n", "fold.py": "a\nb\n"}) == []


def test_a_deploy_counts_after_its_first_round(store: LocalStore) -> None:
    """Until then the copy before it stays the one to go back to."""
    first, second = copy_of(), copy_of(SPEC + "description: new\n")
    assert read_deployed(store, "p").wanted is None
    confirm_deploy(store, "p", deploy_of(first))
    start_deploy(store, "p", second, who="olga", why="faster")
    wanted = read_deployed(store, "p")
    assert wanted.wanted is not None
    assert wanted.current is not None
    assert (wanted.wanted.digest, wanted.current.digest) == (second.digest, first.digest)
    assert count_attempt(store, "p", second.digest).attempts == 1
    assert count_attempt(store, "p", first.digest).attempts == 1
    done = confirm_deploy(store, "p", wanted.wanted)
    assert (done.current, done.trying) == (wanted.wanted, None)
    assert confirm_deploy(store, "p", wanted.wanted) == done
    # A driver with an older copy does not take the newer one back; a person's run does.
    assert confirm_deploy(store, "p", deploy_of(first)) == done
    taken = confirm_deploy(store, "p", deploy_of(first), replaces=True)
    assert taken.current == deploy_of(first)


def test_a_deploy_that_fails_goes_back(store: LocalStore) -> None:
    """By an error, or after three drivers that ended without a word; a new deploy clears it."""
    first, second = copy_of(), copy_of(SPEC + "description: new\n")
    confirm_deploy(store, "p", deploy_of(first))
    start_deploy(store, "p", second, who="olga")
    error = ConfigurationError("does not fit", code="spec.does_not_fit")
    assert note_failed_deploy(store, "p", first.digest, error).failed is None
    failed = note_failed_deploy(store, "p", second.digest, error)
    assert (failed.trying, failed.current) == (None, deploy_of(first))
    assert failed.failed is not None
    assert (failed.failed.code, failed.failed.deploy.who) == ("spec.does_not_fit", "olga")
    assert start_deploy(store, "p", second, who="olga").failed is None
    counts = [count_attempt(store, "p", second.digest) for _ in range(MOST_ATTEMPTS + 1)]
    assert [one.attempts for one in counts] == [1, 2, 3, 0]
    assert counts[-1].failed is not None
    assert counts[-1].failed.code == "deploy.no_word"
    assert counts[-1].wanted == deploy_of(first)


def test_deploying_the_current_copy_takes_a_deploy_back(store: LocalStore) -> None:
    """Nothing is tried then."""
    first, second = copy_of(), copy_of(SPEC + "description: new\n")
    confirm_deploy(store, "p", deploy_of(first))
    start_deploy(store, "p", second, who="olga")
    back = start_deploy(store, "p", first, who="olga")
    assert (back.trying, back.current) == (None, deploy_of(first))


def test_what_a_file_differs_in_is_known_where_there_is_no_file(store: LocalStore) -> None:
    """As long as that copy is the deployed one; a file that is as deployed waits for nothing."""
    note_file(store, "p", parse_spec(SPEC), {})  # nothing is deployed
    copy, later = copy_of(), SPEC.replace("lag: 1s", "lag: 5s")
    write_copy(store, "p", copy)
    confirm_deploy(store, "p", deploy_of(copy))
    assert list_deploy_warnings(store, "p", None, {}) == []
    note_file(store, "p", parse_spec(later), {})
    (says,) = list_deploy_warnings(store, "p", None, {})
    assert says == list_deploy_warnings(store, "p", parse_spec(later), {})[0]
    assert "sources.b.lag" in says
    note_file(store, "p", parse_spec(SPEC), {})
    assert list_deploy_warnings(store, "p", None, {}) == []
    note_file(store, "p", parse_spec(later), {})
    deployed = copy_of(later)
    write_copy(store, "p", deployed)
    start_deploy(store, "p", deployed, who="olga")
    confirm_deploy(store, "p", deploy_of(deployed))
    assert list_deploy_warnings(store, "p", None, {}) == []


def test_the_note_of_a_file_is_written_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sweep compares; a note that a person has spoiled is written again."""
    copy, later = copy_of(), parse_spec(SPEC.replace("lag: 1s", "lag: 5s"))
    write_copy(store, "p", copy)
    confirm_deploy(store, "p", deploy_of(copy))
    written: list[str] = []
    put = LocalStore.put

    def put_counted(self: LocalStore, key: str, data: bytes) -> str:
        written.append(key)
        return put(self, key, data)

    monkeypatch.setattr(LocalStore, "put", put_counted)
    for _ in range(2):
        note_file(store, "p", later, {})
    assert written == ["p/index/file.json"]
    put(store, "p/index/file.json", b"{")
    assert list_deploy_warnings(store, "p", None, {}) == []
    note_file(store, "p", later, {})
    assert len(list_deploy_warnings(store, "p", None, {})) == 1
