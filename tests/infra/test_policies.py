"""Which role may write and delete each kind of key of the bucket."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.infra.policies import Role, build_policy

_P = BucketLayout("p")
_ATTEMPT = CheckpointId(0, 3, "abcdef012345")
_RULED = {role: build_policy(role, "b", "p", inputs=["inbox/"]) for role in Role}
# Key -> who may write it, and who may delete it, by the first letters of the roles.
_EXPECTED = {
    _P.identity_key: ("d", ""),
    _P.lease_key: ("do", ""),
    _P.desired_key: ("do", ""),
    _P.deployed_key: ("do", ""),
    _P.spec_copy_key("ab"): ("do", ""),
    _P.roots_key: ("do", ""),
    _P.status_key: ("d", ""),
    _P.announced_key: ("d", ""),
    _P.alerts_key: ("d", ""),
    _P.slot_key(0, 3): ("do", ""),
    _P.slot_key(12345, 3): ("do", ""),
    _P.state_prefix(_ATTEMPT) + "frontiers.parquet": ("de", "d"),
    _P.table_prefix("events", _ATTEMPT) + "0.parquet": ("de", "d"),
    _P.table_prefix("slots", _ATTEMPT) + "0.parquet": ("de", "d"),
    _P.table_prefix("state", _ATTEMPT) + "0.parquet": ("de", "d"),
    _P.request_key("r"): ("do", "d"),
    _P.ack_key("r"): ("d", "d"),
    _P.splice_request_key("s"): ("do", ""),
    _P.splice_request_prefix("s") + "rows.parquet": ("do", ""),
    _P.splice_approval_key("s"): ("d", ""),
    _P.restore_audit_key("r"): ("d", ""),
    _P.index_page_key("i"): ("do", "do"),
    _P.attempt_logs_prefix("a") + "000000.log": ("d", "d"),
    _P.spec_key("ab"): ("d", ""),
    _P.sink_position_key("s"): ("d", ""),
    _P.published_cut_key: ("d", "d"),
    _P.arrivals_prefix("s", "0") + "1.json": ("d", ""),
    _P.backfill_report_key("n"): ("d", ""),
    f"{_P.quality_prefix}history.json": ("d", "d"),
    f"{_P.staging_prefix}d/0.parquet": ("de", "de"),
    f"{_P.launches_prefix}l/q/0": ("d", "d"),
    "tidegate-probe/x": ("d", "d"),
    "p__bf_0123abcd/lease.json": ("d", "d"),
    "p__bf_0123abcd/timelines/0/slots/9999999996.json": ("d", "d"),
    "inbox/0.parquet": ("l", ""),
    "inbox/_landing/claim.json": ("l", ""),
    # Those of other pipelines.
    "pq/lease.json": ("", ""),
    "other/p/lease.json": ("", ""),
    "lease.json": ("", ""),
}


def _is_allowed(role: Role, action: str, key: str) -> bool:
    """As S3 decides: a star means any text, slashes too."""
    return any(
        action in statement["Action"] and fnmatchcase(f"arn:aws:s3:::b/{key}", pattern)
        for statement in _RULED[role]["Statement"]
        for pattern in statement["Resource"]
    )


@pytest.mark.parametrize("key", _EXPECTED)
def test_each_role_writes_and_deletes_only_what_its_tasks_do(key: str) -> None:
    """A new kind of key belongs into the table, and to no role that does not need it."""
    found = tuple(
        "".join(role.value[0] for role in Role if _is_allowed(role, action, key))
        for action in ("s3:PutObject", "s3:DeleteObject")
    )
    assert found == _EXPECTED[key]


def test_every_kind_of_key_is_in_the_table() -> None:
    """Found by the names of the folders below a pipeline."""
    listed = {key.split("/")[1] for key in _EXPECTED if key.startswith("p/")}
    named = {
        text.partition("/")[2].partition("/")[0]
        for name in dir(BucketLayout)
        if name.endswith(("_prefix", "_key", "_folder"))
        and isinstance(text := getattr(_P, name), str)
    }
    assert named - {""} <= listed
