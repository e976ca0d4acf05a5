"""The objects of the mandate: every store keeps the same promises."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bucket_support import bucket
from kubernetes_server import TOKEN, leases

from diloco_jax.coordinator.mandates.folder import KEPT, FolderStore
from diloco_jax.coordinator.mandates.kubernetes import KubernetesStore
from diloco_jax.coordinator.mandates.opening import open_store
from diloco_jax.coordinator.mandates.store import MandateStore, StoreError
from diloco_jax.errors import ConfigError
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate

pytestmark = pytest.mark.dist
__all__ = ["bucket"]

TIMEOUT_S = 20.0
OURS = Mandate(run_id="r", holder="a", reign=3, in_step="b")
THEIRS = msgspec.structs.replace(OURS, holder="b", in_step="", gathers=True)
numbers = itertools.count()


@pytest.fixture(params=["folder", "bucket", "kubernetes"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MandateStore]:
    match request.param:
        case "folder":
            yield open_store(str(tmp_path / "mandate"))
        case "bucket":
            found = request.getfixturevalue("bucket")
            for name, value in found.environment.items():
                monkeypatch.setenv(name, value)
            yield open_store(f"gs://bucket/mandates/{next(numbers)}")
        case "kubernetes":
            token = tmp_path / "token"
            token.write_text(f"{TOKEN}\n")
            with leases() as (url, _):
                yield KubernetesStore("kubernetes:team/run", url, token)


def test_an_object_is_made_once_and_read_as_it_was_written(store: MandateStore) -> None:
    assert store.read(TIMEOUT_S) == (NO_GENERATION, None)
    first = store.write(OURS, NO_GENERATION, TIMEOUT_S)
    assert first
    assert store.write(THEIRS, NO_GENERATION, TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (first, OURS)


def test_a_write_at_another_generation_changes_nothing(store: MandateStore) -> None:
    first = store.write(OURS, NO_GENERATION, TIMEOUT_S)
    assert first
    # The same contents, too, are another generation: a renewal.
    second = store.write(OURS, first, TIMEOUT_S)
    assert second
    assert second != first
    assert store.write(THEIRS, first, TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (second, OURS)
    third = store.write(THEIRS, second, TIMEOUT_S)
    assert store.read(TIMEOUT_S) == (third, THEIRS)


def test_of_many_that_write_at_once_one_succeeds(store: MandateStore) -> None:
    generation = store.write(OURS, NO_GENERATION, TIMEOUT_S) or ""
    for _ in range(3):
        written: list[tuple[str, str]] = []
        start = threading.Barrier(4)

        def attempt(name: str, at: str, into: list, start: threading.Barrier) -> None:
            start.wait(TIMEOUT_S)
            mandate = msgspec.structs.replace(OURS, holder=name)
            if done := store.write(mandate, at, TIMEOUT_S):
                into.append((name, done))

        threads = [
            threading.Thread(target=attempt, args=(n, generation, written, start))
            for n in "abcd"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        # The folder may say of a write that was done that it was not.
        assert len(written) <= 1
        generation, found = store.read(TIMEOUT_S)
        assert found is not None
        if written:
            assert written == [(found.holder, generation)]
        else:
            assert isinstance(store, FolderStore)


def test_old_files_of_a_folder_go_and_a_late_writer_is_refused(tmp_path: Path) -> None:
    store, generation = FolderStore(str(tmp_path)), NO_GENERATION
    for _ in range(KEPT + 20):
        generation = store.write(OURS, generation, TIMEOUT_S) or ""
        assert generation
    assert len(list(tmp_path.iterdir())) == KEPT
    assert store.write(THEIRS, "3", TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (generation, OURS)


def test_another_object_of_the_same_number_is_another_generation(
    tmp_path: Path,
) -> None:
    """A primary that was stopped while a person began anew replaced the new object."""
    folder = tmp_path / "mandate"
    store, generation = FolderStore(str(folder)), NO_GENERATION
    for _ in range(3):
        generation = store.write(OURS, generation, TIMEOUT_S) or ""
    shutil.rmtree(folder)
    other = NO_GENERATION
    for _ in range(3):
        other = store.write(THEIRS, other, TIMEOUT_S) or ""
    assert store.write(OURS, generation, TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (other, THEIRS)


def test_a_folder_that_is_removed_amid_a_write_has_no_two_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the higher number counted, beside that of the new object."""
    folder = tmp_path / "mandate"
    store, generation = FolderStore(str(folder)), NO_GENERATION
    for _ in range(5):
        generation = store.write(OURS, generation, TIMEOUT_S) or ""
    first: list[str | None] = []
    make = Path.mkdir

    def removed(self: Path, *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(Path, "mkdir", make)
        shutil.rmtree(folder)
        first.append(FolderStore(str(folder)).write(THEIRS, NO_GENERATION, TIMEOUT_S))

    monkeypatch.setattr(Path, "mkdir", removed)
    assert store.write(OURS, generation, TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (first[0], THEIRS)


def test_a_link_of_which_the_answer_was_lost_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS asks again then, and hears that the file exists."""
    link = os.link

    def lost(source: Path, path: Path) -> None:
        link(source, path)
        raise FileExistsError(path)

    store = FolderStore(str(tmp_path))
    first = store.write(OURS, NO_GENERATION, TIMEOUT_S)
    monkeypatch.setattr(os, "link", lost)
    written = store.write(THEIRS, first or "", TIMEOUT_S)
    assert written
    assert store.read(TIMEOUT_S) == (written, THEIRS)


def test_a_write_from_before_a_folder_was_removed_changes_nothing(
    tmp_path: Path,
) -> None:
    """A primary that was stopped meanwhile would count its number on, above those of
    the new object."""
    folder = tmp_path / "mandate"
    store, generation = FolderStore(str(folder)), NO_GENERATION
    for _ in range(5):
        generation = store.write(OURS, generation, TIMEOUT_S) or ""
    shutil.rmtree(folder)
    assert store.write(OURS, generation, TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (NO_GENERATION, None)
    first = store.write(THEIRS, NO_GENERATION, TIMEOUT_S)
    assert store.write(OURS, generation, TIMEOUT_S) is None
    assert store.read(TIMEOUT_S) == (first, THEIRS)


def test_what_is_no_mandate_is_named(tmp_path: Path) -> None:
    (tmp_path / "000000000001.json").write_text('{"holder": 1}')
    with pytest.raises(StoreError, match=r"000000000001\.json is not a mandate"):
        FolderStore(str(tmp_path)).read(TIMEOUT_S)


def kubernetes(url: str, tmp_path: Path, where: str = "kubernetes:team/run"):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    return KubernetesStore(where, url, token)


def test_a_lease_of_somebody_else_and_a_wrong_token_are_named(tmp_path: Path) -> None:
    with leases() as (url, held):
        store = kubernetes(url, tmp_path)
        generation = store.write(OURS, NO_GENERATION, TIMEOUT_S)
        lease = held.objects["run"]
        assert lease["spec"]["holderIdentity"] == "a"
        assert lease["spec"]["leaseTransitions"] == 2
        del lease["metadata"]["annotations"]["diloco-jax/mandate"]
        with pytest.raises(StoreError, match="a Lease of something else"):
            store.read(TIMEOUT_S)
        (tmp_path / "token").write_text("stolen")
        with pytest.raises(StoreError, match=r"answered 401.*must be allowed to get"):
            store.write(OURS, generation or "", TIMEOUT_S)
        elsewhere = kubernetes(url, tmp_path, "kubernetes:other/run")
        with pytest.raises(StoreError, match="no namespace other"):
            elsewhere.write(OURS, NO_GENERATION, TIMEOUT_S)


def test_the_server_of_these_tests_refuses_unknown_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., object] = urllib.request.Request

    def with_more(url: str, data: bytes | None, *rest: object, **named: object):
        more = data and data.replace(b'"spec": {', b'"spec": {"holder": "a", ')
        return real(url, more, *rest, **named)

    monkeypatch.setattr(urllib.request, "Request", with_more)
    with (
        leases() as (url, _),
        pytest.raises(StoreError, match=r"unknown field \['holder'\]"),
    ):
        kubernetes(url, tmp_path).write(OURS, NO_GENERATION, TIMEOUT_S)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("s3://b/o", "buckets are those of gs://"),
        ("gs://bucket", "names no object"),
        ("gs://bucket/folder/", "names no object"),
        ("kubernetes:team/run", "is no pod with a service account"),
    ],
)
def test_a_place_that_cannot_hold_a_mandate_is_named(where: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_store(where)


def test_a_lease_without_a_name_is_named() -> None:
    with pytest.raises(ConfigError, match="names no Lease"):
        KubernetesStore("kubernetes:team")
