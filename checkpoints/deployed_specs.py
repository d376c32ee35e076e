"""The deployed spec of a pipeline or job: sealed copies, and which of them its drivers run.

A copy holds the spec, without its secrets, and the user's code. Its name is its SHA-256, so it
never changes. `deployed.json` says which copy counts:

    a deploy is asked for   `trying` names the new copy
    a driver starts         it runs `trying`, which costs an attempt; else `current`
    its first round ends    `current` names the copy that was tried
    it fails before that    `trying` goes, `failed` says why; `current` stays

Until a driver has had its first round there is no current copy, and drivers run the file.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import Field, ValidationError

from tidegate.errors import PoisonError, TidegateError
from tidegate.jobs.spec.event_time_options import OmittedIfEmpty, OmittedIfNone
from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_differences import FieldDifference, list_differences
from tidegate.jobs.spec.spec_masks import fill_masks, mask_secrets
from tidegate.json_types import JsonObject

from .bucket_layout import BucketLayout
from .canonical_json import canonical_bytes, parse_json, sha256_of_bytes
from .errors import COPY_UNREADABLE
from .host_clock import SYSTEM_CLOCK
from .record_models import BucketRecord
from .shared_documents import SharedDocument, change_document, read_document
from .store import NotFoundError, PreconditionFailedError, Store

MOST_ATTEMPTS = 3
"""Drivers that may end without a word, such as by a kill, before a deploy counts as failed."""


_FILE_WAITS = "the file waits for tidegate deploy; it differs in"
_MOST_CHANGES = 10  # that a text lists
_MOST_PAST = 20  # deploys that are remembered


class SpecCopy(BucketRecord):
    """A spec and its code, as they were deployed.

    Attributes:
        spec: JSON of the spec, its secrets masked. A text, because the order of names counts.
        code: path in the folder of the code, and text.
    """

    format_version: int = 1
    spec: str
    code: dict[str, str] = Field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The name of the copy."""
        return sha256_of_bytes(self.to_bytes())

    def parse_spec(self) -> SupervisedSpec:
        """Return the spec.

        Raises:
            ValueError: this version cannot read it.
        """
        fields = json.loads(self.spec)
        model = JobSpec if fields.get("kind") == "job" else PipelineSpec
        return model.model_validate(fields)


class Deploy(BucketRecord):
    """A copy that someone deployed.

    Attributes:
        commit: of git, as `find_commit` returns it.
    """

    digest: str
    who: str
    why: str = ""
    at: int
    commit: OmittedIfNone[str] = None


class FailedDeploy(BucketRecord):
    """A copy with which no driver could begin, and the error."""

    deploy: Deploy
    at: int
    code: str
    message: str


class DeployedDocument(SharedDocument):
    """The content of `deployed.json`.

    Attributes:
        current: the copy that drivers run; None before a driver has had its first round.
        trying: a newer copy, with which no driver has had its first round yet.
        attempts: how many drivers have begun with it.
        failed: the newest deploy, if it failed.
        past: what drivers ran before, newest first.
    """

    current: OmittedIfNone[Deploy] = None
    trying: OmittedIfNone[Deploy] = None
    attempts: int = 0
    failed: OmittedIfNone[FailedDeploy] = None
    past: OmittedIfEmpty[tuple[Deploy, ...]] = ()

    @property
    def wanted(self) -> Deploy | None:
        """What the next driver runs; None: the file."""
        return self.trying or self.current


def make_copy(spec: SupervisedSpec, code: dict[str, str]) -> SpecCopy:
    """Return the copy of a spec and its code."""
    fields = mask_secrets(spec).model_dump(mode="json", by_alias=True)
    return SpecCopy(spec=json.dumps(fields, separators=(",", ":")), code=code)


def write_copy(store: Store, pipeline: str, copy: SpecCopy) -> None:
    """Store a copy, unless it is stored already."""
    with suppress(PreconditionFailedError):
        store.create(BucketLayout(pipeline).spec_copy_key(copy.digest), copy.to_bytes())


def read_copy(store: Store, pipeline: str, digest: str) -> SpecCopy:
    """Return the copy with this name.

    Raises:
        PoisonError: it is not there, is damaged, or this version cannot read it.
    """
    key = BucketLayout(pipeline).spec_copy_key(digest)
    copy, _ = read_document(store, key, SpecCopy)
    if copy is None or copy.digest != digest:
        raise COPY_UNREADABLE(pipeline=pipeline, uri=store.uri(key), reason="it is not there")
    try:
        copy.parse_spec()
    except ValidationError as error:
        reason = "this version does not accept its spec"
        raise COPY_UNREADABLE(pipeline=pipeline, uri=store.uri(key), reason=reason) from error
    return copy


def read_deployed(store: Store, pipeline: str) -> DeployedDocument:
    """Return what is deployed; empty before the first driver."""
    found, _ = read_document(store, BucketLayout(pipeline).deployed_key, DeployedDocument)
    return found or DeployedDocument()


def start_deploy(
    store: Store,
    pipeline: str,
    copy: SpecCopy,
    *,
    who: str,
    why: str = "",
    commit: str | None = None,
) -> DeployedDocument:
    """Have the next driver try a copy, and return the document.

    The current copy takes an earlier deploy back.
    """
    write_copy(store, pipeline, copy)
    now = SYSTEM_CLOCK.wall_ticks()
    deploy = Deploy(digest=copy.digest, who=who, why=why, at=now, commit=commit)

    def apply_deploy(before: DeployedDocument) -> DeployedDocument:
        is_current = before.current is not None and before.current.digest == copy.digest
        change = {"trying": None if is_current else deploy, "attempts": 0, "failed": None}
        return before.model_copy(update=change)

    return _change_deployed(store, pipeline, apply_deploy)


def count_attempt(store: Store, pipeline: str, digest: str) -> DeployedDocument:
    """Note that a driver begins with a copy, and return the document.

    A copy with which `MOST_ATTEMPTS` drivers have ended without a word counts as failed.
    """

    def apply_attempt(before: DeployedDocument) -> DeployedDocument:
        if before.trying is None or before.trying.digest != digest:
            return before
        if before.attempts < MOST_ATTEMPTS:
            return before.model_copy(update={"attempts": before.attempts + 1})
        message = f"{MOST_ATTEMPTS} drivers ended without a word before their first round"
        return _note_failure(before, "deploy.no_word", message)

    return _change_deployed(store, pipeline, apply_attempt)


def confirm_deploy(
    store: Store, pipeline: str, deploy: Deploy, *, replaces: bool = False
) -> DeployedDocument:
    """Note that a driver has had its first round with a copy, which drivers run from now on.

    Args:
        store: the bucket.
        pipeline: its name.
        deploy: the copy, and who deployed it.
        replaces: it counts although another copy is deployed; otherwise nothing changes then.
    """

    def apply_confirmation(before: DeployedDocument) -> DeployedDocument:
        wanted = before.wanted
        is_wanted = wanted is not None and wanted.digest == deploy.digest
        if wanted is not None and not is_wanted and not replaces:
            return before
        if is_wanted and wanted == before.current:
            return before
        change = {"current": deploy, "trying": None, "attempts": 0, "failed": None}
        earlier = (before.current,) if before.current is not None else ()
        past = (*earlier, *before.past)[:_MOST_PAST]
        return before.model_copy(update={**change, "past": past})

    return _change_deployed(store, pipeline, apply_confirmation)


def note_failed_deploy(
    store: Store, pipeline: str, digest: str, error: TidegateError
) -> DeployedDocument:
    """Note that no driver can begin with a copy; the current one counts again."""

    def apply_failure(before: DeployedDocument) -> DeployedDocument:
        if before.trying is None or before.trying.digest != digest:
            return before
        return _note_failure(before, error.code, error.message)

    return _change_deployed(store, pipeline, apply_failure)


def compare_with_copy(
    copy: SpecCopy, spec: SupervisedSpec, code: dict[str, str]
) -> list[FieldDifference]:
    """Return in which fields and files of code a spec differs from a copy."""
    return list_differences(copy.parse_spec(), spec, copy.code, code)


def may_have_run(
    store: Store,
    pipeline: str,
    spec: SupervisedSpec,
    code: dict[str, str],
    *,
    counts_unreadable: bool = True,
) -> bool:
    """Return whether a copy has this spec and code, whatever digest its version gave it.

    Args:
        store: the bucket.
        pipeline: its name.
        spec: of a file.
        code: beside it.
        counts_unreadable: a copy that this version cannot read may be it.
    """
    for found in store.list_objects(BucketLayout(pipeline).spec_copies_prefix):
        digest = BucketLayout(pipeline).parse_spec_copy_key(found.key)
        try:
            if not compare_with_copy(read_copy(store, pipeline, digest), spec, code):
                return True
        except PoisonError:
            if counts_unreadable:
                return True
    return False


def note_file(store: Store, pipeline: str, file: SupervisedSpec, code: dict[str, str]) -> None:
    """Keep in what a file differs from what is deployed, for those who have no file.

    Nothing is written if that is known already, or if nothing is deployed.

    Raises:
        PoisonError: what is deployed is damaged.
        TransientError: the store does not answer.
    """
    wanted = read_deployed(store, pipeline).wanted
    if wanted is None:
        return
    changes = compare_with_copy(read_copy(store, pipeline, wanted.digest), file, code)
    note = {"deployed": wanted.digest, "differs": list_changes(changes)}
    if note != _read_file_note(store, pipeline):
        store.put(_locate_file_note(pipeline), canonical_bytes(note))


def _read_file_note(store: Store, pipeline: str) -> JsonObject:
    """What `note_file` has written last; empty if there is nothing."""
    try:
        note: JsonObject = parse_json(store.get(_locate_file_note(pipeline)).data)
    except (NotFoundError, ValueError):  # the folder is a cache, which a person may delete
        return {}
    return note


def _locate_file_note(pipeline: str) -> str:
    return BucketLayout(pipeline).index_page_key("file")


def list_deploy_warnings(
    store: Store, pipeline: str, file: SupervisedSpec | None, code: dict[str, str]
) -> list[str]:
    """Return what people should know of deploys, a sentence each.

    A deploy that waits or has failed, and the fields in which a file differs from what is deployed.
    Without a file that is what `note_file` has written last.
    """
    deployed = read_deployed(store, pipeline)
    found = []
    if deployed.trying is not None:
        who = deployed.trying.who
        found.append(f"a deploy by {who} waits for the first round of a driver with it")
    if deployed.failed is not None:
        who, message = deployed.failed.deploy.who, deployed.failed.message
        found.append(f"the deploy by {who} failed, and drivers run the spec before: {message}")
    if file is None and deployed.wanted is not None:
        note = _read_file_note(store, pipeline)
        if note.get("deployed") == deployed.wanted.digest and note["differs"]:
            found.append(f"{_FILE_WAITS} {note['differs']}")
    if file is not None and deployed.wanted is not None:
        try:
            copy = read_copy(store, pipeline, deployed.wanted.digest)
        except PoisonError as error:
            return [*found, error.message]
        changes = compare_with_copy(copy, file, code)
        if changes:
            differs = list_changes(changes)
            found.append(f"{_FILE_WAITS} {differs}")
    return found


def list_changes(changes: Sequence[FieldDifference]) -> str:
    """Return a text of at most ten differences."""
    more = len(changes) - _MOST_CHANGES
    listed = [str(one) for one in changes[:_MOST_CHANGES]]
    return "; ".join([*listed, *([f"{more} more"] if more > 0 else [])])


def describe_deploy_change(store: Store, pipeline: str, before: Deploy, after: Deploy) -> str:
    """Return in what a deploy differs from the one before it; empty if a copy cannot be read."""
    try:
        old, new = (read_copy(store, pipeline, one.digest) for one in (before, after))
    except PoisonError:
        return ""
    return list_changes(compare_with_copy(old, new.parse_spec(), new.code))


def fill_secrets(copy: SpecCopy, file: SupervisedSpec | None) -> SupervisedSpec:
    """Return the spec of a copy with the secrets that the file holds in the same places."""
    spec = copy.parse_spec()
    if file is None or type(file) is not type(spec):
        return spec
    return fill_masks(spec, file)


def _note_failure(before: DeployedDocument, code: str, message: str) -> DeployedDocument:
    now = SYSTEM_CLOCK.wall_ticks()
    assert before.trying is not None  # noqa: S101 - the callers have looked
    failed = FailedDeploy(deploy=before.trying, at=now, code=code, message=message)
    return before.model_copy(update={"trying": None, "attempts": 0, "failed": failed})


def _change_deployed(
    store: Store, pipeline: str, step: Callable[[DeployedDocument], DeployedDocument]
) -> DeployedDocument:
    return change_document(store, BucketLayout(pipeline).deployed_key, DeployedDocument(), step)
