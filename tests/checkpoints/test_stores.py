"""The contract of a store, held by every kind of store, and what is special about each."""

from __future__ import annotations

import errno
import io
import os
import shutil
import ssl
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber
from pydantic import SecretStr
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest
from urllib3.response import HTTPResponse

from tidegate.checkpoints.canonical_json import sha256_of_bytes, sha256_of_file
from tidegate.checkpoints.errors import KeyRefusedError
from tidegate.checkpoints.local_store import LocalStore, refuse_network_file_system
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.s3_store import S3Settings, S3Store, list_bucket_hazards
from tidegate.checkpoints.store import (
    CopyingStore,
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
    StoreDeniedError,
    StoreUnavailableError,
)
from tidegate.checkpoints.store_probe import (
    probe_store,
    require_honest_store,
    run_write_races,
)
from tidegate.errors import ConfigurationError


def test_create_fills_a_key_once(store: Store) -> None:
    """The second create of a key is refused and changes nothing."""
    etag = store.create("a/b.json", b"one")
    with pytest.raises(PreconditionFailedError):
        store.create("a/b.json", b"two")
    assert (store.get("a/b.json").data, store.get("a/b.json").etag) == (b"one", etag)


def test_swap_replaces_only_the_version_it_names(store: Store) -> None:
    """A swap needs the current ETag; a stale one and a missing key are refused."""
    old = store.create("k", b"one")
    new = store.compare_and_swap("k", b"two", old)
    for key, etag in (("k", old), ("none", new)):
        with pytest.raises(PreconditionFailedError):
            store.compare_and_swap(key, b"three", etag)
    assert store.get("k").data == b"two"
    assert store.stat("none") is None


def test_missing_objects_are_definite(store: Store) -> None:
    """A missing object is NotFoundError from get and download, None from head, and silence from
    delete.
    """
    with pytest.raises(NotFoundError):
        store.get("none")
    assert store.stat("none") is None
    store.delete("none")


def test_head_describes_what_get_reads(store: Store) -> None:
    """Size and ETag of head and get agree."""
    store.put("x/y", b"12345")
    entry = store.stat("x/y")
    assert entry is not None
    found = store.get("x/y")
    assert (entry.size, entry.etag) == (5, found.etag)
    assert found.age is None or 0 <= found.age < 60


def test_put_overwrites(store: Store) -> None:
    """The last put wins."""
    store.put("k", b"one")
    store.put("k", b"two")
    assert store.get("k").data == b"two"


def test_listing_is_in_key_order_and_can_start_and_stop_anywhere(store: Store) -> None:
    """Listings follow the order of whole keys, honour prefix, start and limit, and name folders."""
    keys = ["a-b/1", "a/1", "a/2", "a/b/3", "a.json", "ab", "b/1", "a/b-c"]
    for key in keys:
        store.put(key, b"x")
    everything = [e.key for e in store.list_objects("")]
    assert everything == sorted(keys)
    assert [e.key for e in store.list_objects("a/")] == sorted(
        k for k in keys if k.startswith("a/")
    )
    assert [e.key for e in store.list_objects("a")] == sorted(k for k in keys if k.startswith("a"))
    for start in [*keys, "a/b", "zzz", "a/1x"]:
        assert [e.key for e in store.list_objects("", start_after=start)] == sorted(
            k for k in keys if k > start
        )
    assert [e.key for e in store.list_objects("", limit=3)] == sorted(keys)[:3]
    assert list(store.list_objects("", limit=0)) == []
    assert store.list_folders("") == ["a", "a-b", "b"]
    assert store.list_folders("a/") == ["b"]
    assert store.list_folders("none/") == []


def test_files_go_up_and_come_down(store: Store, tmp_path: Path) -> None:
    """An uploaded file comes back byte for byte, with size and checksum reported."""
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(100_000))
    written = store.upload(source, "files/f")
    store.download("files/f", back)
    assert back.read_bytes() == source.read_bytes()
    assert (written.size, written.etag) == (100_000, store.get("files/f").etag)
    with pytest.raises(NotFoundError):
        store.download("none", tmp_path / "never")
    assert not list(tmp_path.glob("never*"))


def test_a_copy_is_of_exactly_one_version(store: Store) -> None:
    """The store makes it, of any key; another version and no object are different errors."""
    if not isinstance(store, CopyingStore):
        pytest.skip("a local folder is never copied from by its store")
    etag = store.put("from/a b#c?.delta", b"first")
    copy = store.copy_from(store, "from/a b#c?.delta", etag, "to/1")
    assert (store.get("to/1").data, store.get("to/1").etag) == (b"first", copy)
    store.put("from/a b#c?.delta", b"second")
    with pytest.raises(PreconditionFailedError):
        store.copy_from(store, "from/a b#c?.delta", etag, "to/2")
    with pytest.raises(NotFoundError):
        store.copy_from(store, "from/none", etag, "to/2")
    assert store.stat("to/2") is None


def test_a_folder_is_deleted_with_its_markers(store: Store) -> None:
    """Hadoop's S3A leaves an empty object per folder; neighbours of a similar name stay."""
    if not isinstance(store, CopyingStore):
        pytest.skip("no other client writes into a local folder")
    for key in ("a/b/1", "a/b/c/2", "a/bc/3", "a/4"):
        store.put(key, b"x")
    if isinstance(store, S3Store):
        where = {"Bucket": store.settings.bucket, "Key": store._full_key("a/b/c/")}
        store._get_client().put_object(**where, Body=b"")
    store.delete_folder("a/b/")
    assert [entry.key for entry in store.list_objects("a/")] == ["a/4", "a/bc/3"]
    assert store.list_folders("a/") == ["bc"]
    store.delete_folder("a/b/")


def test_a_refusal_to_delete_one_key_is_an_error() -> None:
    """DeleteObjects answers 200, and names the keys that it has left."""
    store = _unconnected_s3()
    listed = {"Contents": [{"Key": "a/1"}], "IsTruncated": False}
    refused = {"Errors": [{"Key": "a/1", "Code": "AccessDenied", "Message": "no"}]}
    with Stubber(store._get_client()) as answers:
        answers.add_response("list_objects_v2", listed)
        answers.add_response("delete_objects", refused)
        with pytest.raises(StoreDeniedError, match="AccessDenied"):
            store.delete_folder("a/")


@pytest.mark.parametrize("swap", [False, True])
def test_of_many_racers_exactly_one_wins(store: Store, swap: bool) -> None:
    """Ten threads create, or swap, one key: one wins, and its bytes lie there."""
    etag = store.put("k", b"start") if swap else ""
    outcomes: list[str] = []
    gate = threading.Barrier(10)

    def race(number: int) -> None:
        gate.wait()
        data = f"racer {number}".encode()
        try:
            _ = store.compare_and_swap("k", data, etag) if swap else store.create("k", data)
            outcomes.append(data.decode())
        except PreconditionFailedError:
            outcomes.append("lost")

    threads = [threading.Thread(target=race, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(outcomes)["lost"] == 9
    assert store.get("k").data.decode() in outcomes


def test_every_store_of_ours_is_honest(store: Store) -> None:
    """The probe finds all promises kept and leaves nothing behind."""
    require_honest_store(store)
    assert probe_store(store) == []
    assert run_write_races([store]) == []
    assert list(store.list_objects("")) == []


def test_a_store_that_ignores_conditions_is_refused() -> None:
    """A store that overwrites in spite of a condition is found out and named."""

    class Liar(MemoryStore):
        def create(self, key: str, data: bytes) -> str:
            return self.put(key, data)

        def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
            return self.put(key, data)

    assert probe_store(Liar()) == [
        "refuses_second_create",
        "refuses_stale_swap",
        "refuses_swap_of_missing",
    ]
    with pytest.raises(ConfigurationError, match="refuses_stale_swap"):
        require_honest_store(Liar())


def test_a_probe_whose_request_was_repeated_on_its_way_comes_again() -> None:
    """A proxy that repeats a swap answers 412 to a swap that happened; the store is honest."""

    class Repeated(MemoryStore):
        swaps = 0

        def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
            self.swaps += 1
            found = super().compare_and_swap(key, data, etag)
            return super().compare_and_swap(key, data, etag) if self.swaps == 1 else found

    repeated = Repeated()
    require_honest_store(repeated)
    assert repeated.swaps > 3  # of the second probe


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/./b", "a/..", "a\\b"])
def test_keys_cannot_leave_the_store(store: Store, key: str) -> None:
    """Keys with empty or climbing parts are refused before any request."""
    with pytest.raises(KeyRefusedError, match="not a key"):
        store.put(key, b"")


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_network_file_systems_are_refused(kind: str) -> None:
    """The type of the longest mount point above the folder decides."""
    mounts = (
        f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / /data rw shared:1 - {kind} server:/x rw\n"
    )
    refuse_network_file_system(Path("/database"), mounts)
    with pytest.raises(ConfigurationError, match="network file system"):
        refuse_network_file_system(Path("/data/store"), mounts)


def test_a_folder_that_cannot_be_used_is_the_users_business(tmp_path: Path) -> None:
    """A file where the folder should be is a configuration error with advice."""
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigurationError, StoreUnavailableError), match="file"):
        LocalStore(tmp_path / "file" / "store")


def test_local_files_are_made_durable_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content is fsynced before link, and every folder that changed is fsynced after it."""
    store = LocalStore(tmp_path / "store")
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def noted_fsync(handle: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append(
            "folder " + str(target.relative_to(store.root)) if target.is_dir() else "content"
        )
        fsync(handle)

    def noted_link(source: Path, target: Path) -> None:
        events.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    store.create("a/b/c", b"x")
    assert events == ["content", "link", "folder a/b", "folder a", "folder ."]


def test_an_error_after_naming_is_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the folder cannot be made durable, no one may say whether the write happened."""
    store = LocalStore(tmp_path / "store")
    store.put("a/x", b"")
    fsync = os.fsync

    def broken_for_folders(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
            raise OSError(5, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", broken_for_folders)
    with pytest.raises(OutcomeUnknownError):
        store.create("a/k", b"x")
    assert store.get("a/k").data == b"x"


def test_a_local_download_that_fails_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would stay full."""
    store = LocalStore(tmp_path / "store")
    store.put("a", b"123")

    def fill_disk(source: Path, target: Path) -> None:
        target.write_bytes(b"1")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shutil, "copyfile", fill_disk)
    with pytest.raises(StoreUnavailableError):
        store.download("a", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_local_upload_of_a_file_in_place_copies_nothing(tmp_path: Path) -> None:
    """A file written straight to its local path keeps its inode."""
    store = LocalStore(tmp_path)
    path = store.local_path("t/f")
    assert path is not None
    path.parent.mkdir()
    path.write_bytes(b"rows")
    before = path.stat().st_ino
    assert store.upload(path, "t/f").size == 4
    assert path.stat().st_ino == before
    assert store.uri("t/f") == str(path)


@pytest.mark.parametrize(
    ("fault", "lies_there", "delivered"),
    [
        (Fault.NO_EFFECT, False, None),
        (Fault.LOST_ANSWER, True, None),
        (Fault.LATE, False, True),
        (Fault.TWICE, True, False),
    ],
)
def test_faults_do_what_they_say(fault: Fault, lies_there: bool, delivered: bool | None) -> None:
    """Each fault of a write leaves the bucket as its name promises, now and when held requests
    arrive.
    """
    bucket = MemoryBucket()
    store = MemoryStore(bucket, hook=lambda request: fault if request.is_write else None)
    if fault is Fault.TWICE:
        store.create("k", b"x")
    else:
        with pytest.raises(OutcomeUnknownError):
            store.create("k", b"x")
    assert ("k" in bucket.objects) is lies_there
    if delivered is not None:
        assert bucket.deliver_held() is delivered
        assert bucket.objects["k"] == b"x"


def test_a_refused_request_is_known_to_have_no_effect() -> None:
    """Reads and writes that never reached the store say so."""

    def hook(request: StoreRequest) -> Fault | None:
        return Fault.REFUSED

    store = MemoryStore(hook=hook)
    for ask in (
        lambda: store.put("k", b""),
        lambda: store.get("k"),
        lambda: store.list_objects(""),
    ):
        with pytest.raises(StoreUnavailableError):
            ask()
    assert store.bucket.objects == {}


def test_addresses_open_the_right_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain paths, file and s3 addresses open; anything else is refused with advice."""
    monkeypatch.setenv("TIDEGATE_S3_ENDPOINT", "http://127.0.0.1:1")
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    s3 = open_store("s3://bucket/some/prefix")
    assert isinstance(s3, S3Store)
    assert (s3.url, s3.uri("k"), s3.settings.endpoint) == (
        "s3://bucket/some/prefix",
        "s3://bucket/some/prefix/k",
        "http://127.0.0.1:1",
    )
    for bad in ("http://x", "s3://", "file://host/x", "gs://b/p", "memory://m"):
        with pytest.raises(ConfigurationError, match="not the address"):
            open_store(bad)


def test_secrets_stay_out_of_the_settings_text() -> None:
    """Printing the settings does not print the secret."""
    settings = S3Settings(bucket="b", access_key="a", secret_key=SecretStr("hush-hush"))
    assert "hush-hush" not in repr(settings)


def test_an_absent_server_is_transient_and_nothing_was_sent() -> None:
    """A refused connection is unavailable, not unknown, also for conditional writes."""
    settings = S3Settings(
        bucket="b",
        endpoint="http://127.0.0.1:1",
        access_key="a",
        secret_key=SecretStr("s"),
        budget=0.2,
    )
    store = S3Store(settings)
    with pytest.raises(StoreUnavailableError, match="cannot connect"):
        store.create("k", b"")
    with pytest.raises(StoreUnavailableError):
        store.get("k")


def _unconnected_s3(budget: float = 15.0) -> S3Store:
    return S3Store(
        S3Settings(
            bucket="b",
            endpoint="http://127.0.0.1:1",
            budget=budget,
            access_key="a",
            secret_key=SecretStr("s"),
        )
    )


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ExpiredToken", 400, "store.keys_expired"),
        ("RequestTimeTooSkewed", 403, "store.clock_skewed"),
        ("AccessDenied", 403, "store.denied"),
        ("InvalidAccessKeyId", 403, "store.denied"),
    ],
)
def test_a_refusal_names_what_a_person_has_to_do(code: str, status: int, expected: str) -> None:
    """Expired keys, a wrong clock and missing rights have one class and different advice."""
    store = _unconnected_s3()
    with Stubber(store._get_client()) as answers:
        answers.add_client_error("get_object", code, "said the store", http_status_code=status)
        with pytest.raises(StoreDeniedError, match=f"{code}: said the store") as refused:
            store.get("k")
    assert refused.value.code == expected


@pytest.mark.parametrize(
    "code", ["BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "KMS.ThrottlingException"]
)
def test_a_damaged_or_throttled_request_is_sent_again(code: str) -> None:
    """400 says nothing about the credentials then: a read is repeated, and the outcome of a
    conditional write is read back by its caller.
    """
    store = _unconnected_s3()
    with Stubber(store._get_client()) as answers:
        answers.add_client_error("put_object", code, http_status_code=400)
        with pytest.raises(OutcomeUnknownError, match=code):
            store.create("k", b"")
        answers.add_client_error("list_objects_v2", code, http_status_code=400)
        answers.add_response("list_objects_v2", {"IsTruncated": False})
        assert not list(store.list_objects(""))


def test_a_marker_of_a_folder_is_no_object() -> None:
    """Arrow puts an object `folder/` into a bucket after a delete, and no store can name it: a sweep
    that listed it ended there.
    """
    store = _unconnected_s3()
    with Stubber(store._get_client()) as answers:
        same = {"ETag": '"e"', "Size": 0, "LastModified": datetime(2026, 3, 1, tzinfo=UTC)}
        found = [{"Key": key, **same} for key in ("p/a/", "p/a/1", "p/b/", "p/c")]
        answers.add_response("list_objects_v2", {"IsTruncated": False, "Contents": found})
        assert [entry.key for entry in store.list_objects("p/", limit=2)] == ["p/a/1", "p/c"]


EXPIRE = {"Status": "Enabled", "Expiration": {"Days": 30}, "ID": "old"}


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ({**EXPIRE, "Filter": {"Prefix": "shop/"}}, True),
        ({**EXPIRE, "Filter": {}}, True),
        ({**EXPIRE, "Filter": {"And": {"Prefix": "shop/p/timelines/", "Tags": []}}}, True),
        ({**EXPIRE, "Filter": {"Prefix": "shop/inbox/"}}, False),
        ({**EXPIRE, "Filter": {}, "Status": "Disabled"}, False),
        ({"Status": "Enabled", "Filter": {}, "Transitions": [{"Days": 1}]}, True),
        (
            {
                "Status": "Enabled",
                "Filter": {},
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
            },
            False,
        ),
    ],
)
def test_lifecycle_rules_that_touch_the_pipeline_are_found(
    rule: dict[str, object], *, found: bool
) -> None:
    """An expired slot would let a late writer fill it again."""
    store = S3Store(_unconnected_s3().settings.model_copy(update={"prefix": "shop"}))
    with Stubber(store._get_client()) as answers:
        answers.add_client_error(
            "get_bucket_replication", "ReplicationConfigurationNotFoundError", http_status_code=404
        )
        answers.add_response("get_bucket_lifecycle_configuration", {"Rules": [rule]})
        hazards = list_bucket_hazards(store, "p/")
    assert bool(hazards) is found
    assert all("take these keys out of it" in hazard for hazard in hazards)


def test_replication_of_the_bucket_is_found_and_a_refusal_is_not_an_error() -> None:
    """Two sides that replicate to each other each accept the same slot."""
    rule = {"Status": "Enabled", "Priority": 1, "Destination": {"Bucket": "arn:aws:s3:::other"}}
    store = _unconnected_s3()
    with Stubber(store._get_client()) as answers:
        configuration = {"Role": "r", "Rules": [rule]}
        answers.add_response("get_bucket_replication", {"ReplicationConfiguration": configuration})
        answers.add_client_error(
            "get_bucket_lifecycle_configuration", "AccessDenied", http_status_code=403
        )
        (hazard,) = list_bucket_hazards(store, "p/")
    assert "is replicated to arn:aws:s3:::other: run drivers on one side only" in hazard
    assert list_bucket_hazards(MemoryStore(), "p/") == []


def test_a_broken_tls_connection_inside_a_body_is_transient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """botocore hands on urllib3's own error for it, which would end the lease's thread."""

    class Alert(io.RawIOBase):
        """A body that a TLS alert cuts off."""

        def read(self, size: int | None = -1) -> bytes:
            raise ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] bad record mac")

    body = StreamingBody(HTTPResponse(Alert(), preload_content=False), content_length=9)
    store = _unconnected_s3(budget=0.0)
    client = SimpleNamespace(get_object=lambda **_: {"Body": body, "ETag": "e"})
    monkeypatch.setattr(store, "_get_client", lambda: client)
    with pytest.raises(StoreUnavailableError, match="SSLError"):
        store.get("k")


@pytest.mark.minio
def test_wrong_names_and_keys_are_the_users_business(minio: S3Settings) -> None:
    """A missing bucket and wrong credentials are configuration errors, never 'not found'."""
    wrong_bucket = S3Store(minio.model_copy(update={"bucket": "missing"}))
    wrong_secret = S3Store(S3Settings(**(minio.model_dump() | {"secret_key": SecretStr("wrong")})))
    for bad in (wrong_bucket, wrong_secret):
        with pytest.raises(StoreDeniedError, match="TIDEGATE_S3"):
            bad.get("k")
        with pytest.raises(StoreDeniedError, match="TIDEGATE_S3"):
            bad.create("k", b"")
        with pytest.raises(StoreDeniedError, match="TIDEGATE_S3"):
            list(bad.list_objects(""))


@pytest.mark.minio
def test_listing_across_pages(s3: S3Store) -> None:
    """Exactly one full page, and a little more, are listed completely."""
    for number in range(1000):
        s3.put(f"n/{number:04d}", b"")
    assert len(list(s3.list_objects("n/"))) == 1000
    s3.put("n/1000", b"")
    assert [e.key for e in s3.list_objects("n/")] == [f"n/{n:04d}" for n in range(1001)]
    assert len(list(s3.list_objects("n/", limit=1000))) == 1000


def test_a_local_file_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ETag of an old file is remembered; a write that keeps size and time gives a new one."""
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return sha256_of_file(path)

    monkeypatch.setattr("tidegate.checkpoints.local_store.sha256_of_file", digest)
    store = LocalStore(tmp_path)
    store.put("old", b"one")
    young = [store.stat("old"), store.stat("old")]
    assert len(read) == 2, "a young file may be written again without a trace in its times"
    monkeypatch.setattr("tidegate.checkpoints.local_store._SETTLED_SECONDS", -1.0)
    assert [store.stat("old"), store.stat("old")] == young
    assert len(read) == 3
    before = (tmp_path / "old").stat()
    # The kernel's clock for files is coarse: write until it has gone on.
    while (tmp_path / "old").stat().st_ctime_ns == before.st_ctime_ns:
        (tmp_path / "old").write_bytes(b"two")
        os.utime(tmp_path / "old", ns=(before.st_atime_ns, before.st_mtime_ns))
    found = store.stat("old")
    assert found is not None
    assert found.etag == sha256_of_bytes(b"two")


@pytest.mark.parametrize("step", ["folder", "file"])
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EIO, StoreUnavailableError),
        (errno.ESTALE, StoreUnavailableError),
        (errno.EMFILE, StoreUnavailableError),
        (errno.EACCES, ConfigurationError),
    ],
)
def test_a_folder_that_cannot_be_listed_is_no_defect(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    number: int,
    expected: type[Exception],
) -> None:
    """A driver waits for the disk, or names the folder; it does not end as after a bug."""
    store = LocalStore(tmp_path / "store")
    store.put("a/b.json", b"x")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if step == "folder":
            patch.setattr(os, "scandir", fail)
        else:
            patch.setattr(Path, "stat", fail)
        with pytest.raises(expected):
            list(store.list_objects("a/"))
