"""Workers' files come to the standby ahead of the lead's records of them, and a worker
serves nothing that the standby may not have."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from door_support import ADMITTED, PLAN, RUN
from etils.epath import Path as Folder
from followed_support import ALIVE_S, Pair

from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import fragment_path, named
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.coordinator.workers import holder as workers_module
from diloco_jax.coordinator.workers.hearing import OnDisk
from diloco_jax.coordinator.workers.holder import WorkersHolder
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator.events import AnchorWaits, WorkerAway
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.holding import (
    AnchorKept,
    FromHolder,
    MergePrepared,
    MergesCompiled,
    RestoreFragments,
)
from diloco_jax.protocol.values import Prepared, Version
from diloco_jax.protocol.working import BeginWorker, FragmentSaved
from diloco_jax.wire.errors import Busy
from diloco_jax.wire.follow import CHUNK_BYTES

LATE_S = 30.0
ELSEWHERE = ("a:1", "b:1")
SNAPSHOTS = "checkpoints/coordinator"
CONFIG = policy_config(RUN, Placement(workers=2), "r", PLAN.sizes, ADMITTED)


class Worker:
    """Stands in for `Supervised`: a test says what its process says."""

    address, alerts = "", ()

    def __init__(
        self, begin: BeginWorker, config: Config, hear: Callable[[Heard], None], _: Any
    ) -> None:
        self.hear, self.lead = hear, begin.lead
        self.begun: list[RestoreFragments] = []

    def begin(self, asked: RestoreFragments) -> None:
        self.begun.append(asked)

    def send(self, message: Any) -> None:
        """It is away, or does not care."""


def held(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    on_disk: OnDisk,
    elsewhere: tuple[str, ...] = (),
    reign: int = 1,
) -> tuple[WorkersHolder, list[Worker]]:
    monkeypatch.setattr(workers_module, "Supervised", Worker)
    placement = Placement(
        workers=2, worker_addresses=elsewhere, mandate=str(folder / "mandate")
    )
    config = Config(islands={"a": IslandConfig()}, placement=placement)
    kept = cast(Any, None)
    made = WorkersHolder(
        config, folder, "r", CONFIG.fragment_sizes, kept, on_disk, reign
    )
    return made, cast(list[Worker], made._workers)


class Site(Pair):
    """The files of a primary whose lead writes a record of whatever workers prepare."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.decided: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        holder, self.workers = held(monkeypatch, self.here, self.out.heard)
        holder.answer(self._decide, cast(Any, None))
        # Another process has these: nothing here is told of what they write.
        self.theirs = Publishes(self.here / "publishes")
        self.saved: list[Path] = []
        self.fragments = FragmentSnapshots(
            Folder(self.snapshots), Placement(snapshots_kept=1), (0,), {}
        )
        self.fragments.written = lambda path: self.saved.append(Path(path))

    def _decide(self, message: FromHolder | Any) -> None:
        if isinstance(message, MergePrepared | AnchorKept):
            self.log.append({"fragment": message.fragment})
        self.decided.put(message)

    def decides(self, kind: type) -> None:
        """Wait until the lead has heard such a message."""
        while not isinstance(self.decided.get(timeout=LATE_S), kind):
            pass

    def merge(self, version: Version) -> None:
        prepared = self.theirs.write(0, version, b"p", final=False)
        self.say(MergePrepared(fragment=0, version=version, prepared=prepared))

    def save(self, version: Version) -> None:
        self.fragments.save(0, version, {})
        self.say(FragmentSaved(fragment=0, version=version))

    def gather(self, version: Version, nbytes: int = 0) -> None:
        """An anchor begins a term of the fragment, which the worker had lost."""
        self.fragments.save_first(0, version, {"theta": [np.ones(nbytes, np.uint8)]})
        kept = AnchorKept(
            fragment=0,
            island="a",
            incarnation=1,
            replaced=Version(1, version.number),
            version=version,
            digest="",
        )
        self.say(kept)

    def say(self, message: Heard) -> None:
        self.workers[0].hear(message)

    def following(self) -> None:
        self.begin()
        self.take()

    def there_is(self) -> list[str]:
        """The versions that the standby has of fragment 0, and of what kind."""
        found = [*self.there.rglob("*.publish"), *self.there.rglob("*-*.snapshot")]
        return sorted(f"{path.stem} {path.suffix[1:]}" for path in found)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path, monkeypatch)
    yield made
    made.close()


def snapshot(version: Version) -> str:
    name = fragment_path(Folder(SNAPSHOTS), 0, version)
    assert named(name) == (0, version)
    return str(name)


def test_a_workers_publish_goes_ahead_of_the_record_that_commits_it(site: Site) -> None:
    site.following()
    for number in (1, 2):
        site.merge(Version(1, number))
    assert site.take(4) == [
        "publishes/00000/1-1.publish",
        "log/log-000000.bin",
        "publishes/00000/1-2.publish",
        "log/log-000000.bin",
    ]


def test_a_workers_snapshot_goes_last_and_replaces_what_it_holds(site: Site) -> None:
    site.following()
    site.merge(Version(1, 1))
    site.save(Version(1, 1))
    site.merge(Version(1, 2))
    assert site.saved == [site.here / snapshot(Version(1, 1))]
    assert site.take(5)[-1] == snapshot(Version(1, 1))
    assert site.there_is() == ["1-1 snapshot", "1-2 publish"]


def test_an_anchor_goes_ahead_of_its_record_and_replaces_nothing_before_it(
    site: Site,
) -> None:
    """A lost fragment is not lost at the standby: there the term before counts until
    the record says that the next one has begun."""
    site.following()
    site.merge(Version(1, 1))
    site.save(Version(1, 1))
    site.merge(Version(1, 2))
    site.take()
    before = ["1-1 snapshot", "1-2 publish"]
    site.gather(Version(2, 2))
    # Nobody is told twice of the same file.
    assert len(site.saved) == 1
    assert site.take(1) == [snapshot(Version(2, 2))]
    site.decides(AnchorKept)
    assert site.take(1) == ["log/log-000000.bin"]
    assert site.there_is() == [*before, "2-2 snapshot"]
    site.merge(Version(2, 3))
    site.save(Version(2, 3))
    site.take()
    assert site.there_is() == ["2-3 snapshot"]


def test_an_anchor_that_never_counted_goes_when_another_one_comes(site: Site) -> None:
    """The worker died before the record; another island's anchor is an older one, and
    the next merge has the number of the first."""
    site.following()
    site.gather(Version(2, 2))
    site.gather(Version(2, 1))
    site.take()
    site.decides(AnchorKept)
    site.decides(AnchorKept)
    assert site.there_is() == ["2-1 snapshot"]


def test_a_large_anchor_holds_up_no_record_but_its_own(site: Site) -> None:
    """All records waited for several GB: the standby was parted from its primary."""
    site.following()
    site.gather(Version(2, 2), 3 * CHUNK_BYTES)
    waits = site.decided.get(timeout=LATE_S)
    assert waits == AnchorWaits(fragment=0, island="a", incarnation=1)
    anchor = snapshot(Version(2, 2))
    assert site.take(2) == [anchor] * 2
    site.merge(Version(1, 3))
    site.decides(MergePrepared)
    assert site.take(2) == ["publishes/00000/1-3.publish", "log/log-000000.bin"]
    assert site.decided.empty()
    assert site.take(2) == [anchor] * 2
    site.decides(AnchorKept)
    assert site.take(1) == ["log/log-000000.bin"]
    assert "2-2 snapshot" in site.there_is()
    assert site.lost == []


def test_an_anchor_waits_for_a_file_of_the_copy_not_for_all_of_it(site: Site) -> None:
    site.merge(Version(1, 1))
    site.begin()
    site.gather(Version(2, 2))
    assert site.take(3) == ["", "publishes/00000/1-1.publish", snapshot(Version(2, 2))]
    site.decides(AnchorKept)
    assert site.take().count("") == 2, "the copy is whole, then nothing is left"
    assert site.there_is() == ["1-1 publish", "2-2 snapshot"]


def test_an_anchor_waits_for_no_standby_that_is_lost_or_too_slow(site: Site) -> None:
    site.following()
    site.gather(Version(2, 2))
    site.out.end(site.outgoing)
    site.decides(AnchorKept)
    site.gather(Version(2, 2))
    nobody_follows = site.decided.get(timeout=LATE_S)
    assert isinstance(nobody_follows, AnchorKept)
    assert site.lost == []
    site.outgoing.close()
    site.outgoing = site.out.prepare("r", {})
    site.begin()
    site.out._beside_s = ALIVE_S
    site.gather(Version(2, 3))
    site.decides(AnchorKept)
    (why,) = site.lost
    assert "has not gone to it within" in why
    assert isinstance(site.outgoing.error, Busy)


def test_merges_are_compiled_once_each_worker_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once one of them has said so twice, which died in between."""
    holder, (first, second) = held(monkeypatch, tmp_path, lambda _, then, waits: then())
    told: list[Any] = []
    holder.answer(told.append, cast(Any, None))
    for _ in range(2):
        first.hear(MergesCompiled())
    assert told == []
    second.hear(MergesCompiled())
    assert told == [MergesCompiled()]
    first.hear(MergesCompiled())
    assert told == [MergesCompiled()] * 2, "each one that comes back"


def test_the_anchor_of_a_worker_that_has_died_since_is_not_told(site: Site) -> None:
    site.following()
    site.gather(Version(2, 2))
    site.say(WorkerAway(worker=0))
    site.take()
    for thread in threading.enumerate():
        if thread.name == "diloco-beside":
            thread.join(LATE_S)
            assert not thread.is_alive()
    assert isinstance(site.decided.get(timeout=LATE_S), AnchorWaits)
    assert isinstance(site.decided.get(timeout=LATE_S), WorkerAway)
    assert site.decided.empty()


def test_no_record_goes_without_a_publish_that_is_gone(site: Site) -> None:
    site.following()
    gone = MergePrepared(
        fragment=0,
        version=Version(1, 1),
        prepared=Prepared(digest="", payload_bytes=1),
    )
    site.say(gone)
    assert site.lost == ["a file cannot be read"]
    assert list(site.messages) == []


def test_files_of_workers_on_other_machines_stay_there(tmp_path: Path) -> None:
    """The record counts at the standby all the same: who takes over has the worker."""
    pair = Pair(tmp_path, Placement(workers=2, worker_addresses=ELSEWHERE))
    pair.begin()
    pair.take()
    version, told = Version(1, 1), []
    prepared = Prepared(digest="", payload_bytes=1)
    for message in (
        MergePrepared(fragment=0, version=version, prepared=prepared),
        FragmentSaved(fragment=0, version=version),
        AnchorKept(
            fragment=0,
            island="a",
            incarnation=1,
            replaced=version,
            version=Version(2, 1),
            digest="",
        ),
    ):
        pair.out.heard(message, lambda m=message: told.append(m), pytest.fail)
    assert [type(m) for m in told] == [MergePrepared, FragmentSaved, AnchorKept]
    assert pair.lost == []
    pair.log.append({"fragment": 0})
    assert pair.take() == ["log/log-000000.bin", ""]
    pair.close()


def test_of_two_nodes_the_mandate_says_which_one_workers_obey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the second one is far behind, and its disk has no number."""
    numbers = []
    for reign, clock in ((1, 2e9), (2, 1e9)):
        folder = tmp_path / str(reign)
        folder.mkdir()
        monkeypatch.setattr(workers_module.time, "time", lambda clock=clock: clock)
        _, workers = held(monkeypatch, folder, Unseated().heard, ELSEWHERE, reign)
        numbers.append(workers[0].lead)
    assert numbers[1] > numbers[0]


class Seat(Unseated):
    """Lets be seen what a test says."""

    number, visible = 1, True

    @property
    def written(self) -> int:
        return self.number

    def may_show(self, number: int) -> bool:
        return self.visible


def test_a_worker_is_not_back_before_what_is_decided_may_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, (worker, _) = held(monkeypatch, tmp_path, Unseated().heard)
    seat, tape = Seat(), Tape(tmp_path / "tape.jsonl")
    lead = Lead(
        CONFIG,
        initial(CONFIG),
        holder=holder,
        log=cast(Any, SimpleNamespace(append=lambda line: None)),
        tape=tape,
        metrics=cast(Metrics, None),
        sessions=Sessions(),
        faults=Faults(()),
        slow_s=1.0,
        housekeeping=lambda lead: None,
        seat=seat,
    )
    seat.visible = False
    lead.hear(WorkerAway(worker=0))
    lead._turn()
    lead._turn()
    assert worker.begun == []
    seat.visible = True
    lead.nudge()
    lead._turn()
    (asked,) = worker.begun
    assert [c.fragment for c in asked.fragments] == list(holder.of(0))
    tape.close()
