"""A primary's seat and a standby over real gRPC and real files, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.settings import server_of
from diloco_jax.coordinator.standby.node import StandbyNode, StandbyOutcome
from diloco_jax.coordinator.standby.seat import Seat, taken
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.coordinator.standby.waiting import Waiting
from diloco_jax.errors import ConfigError
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Busy, Refused
from diloco_jax.workdir import RunFacts

BUDGET_S, WITHIN_S = 1.5, 30.0


def seated(
    config: Config,
    workdir: Path,
    run_id: str = "r",
    opened: contextlib.ExitStack | None = None,
) -> Unseated:
    facts = RunFacts(run_id=run_id, begun_unix=0.0)
    return taken(config, workdir, facts, "", opened or contextlib.ExitStack())


def placed(folder: Path, bind: str) -> Config:
    placement = Placement(
        mandate=str(folder / "mandate"), bind=bind, time_budget_s=BUDGET_S
    )
    return Config(islands={"a": IslandConfig()}, placement=placement)


class Lead:
    """A primary that writes records and lets them be seen: its thread alone."""

    def __init__(self, folder: Path) -> None:
        self.workdir = folder / "one"
        (self.workdir / "log").mkdir(parents=True)
        RunFacts(run_id="r", begun_unix=0.0).write(self.workdir)
        self.address = f"127.0.0.1:{free_port()}"
        config = placed(folder, self.address)
        seat = seated(config, self.workdir)
        assert isinstance(seat, Seat)
        self.seat = seat
        seat.serve(lambda: None)
        self.log = RecordLog(self.workdir / "log")
        self.log.appended = lambda path, data: seat.outflow.appended(
            path, data, sync=True
        )
        self.server = server_of(config, Waiting(dict), None)
        self.server.primary = seat.followable
        self.server.start()
        self.alerts: list[str] = []
        self.ended: list[str] = []
        self.shown = 0
        self.failure: Exception | None = None
        self._ends, self._paused = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._ends.is_set():
            time.sleep(0.01)
            if self._paused.is_set():
                continue
            try:
                self.seat.turn(self.alerts.append, self.ended.append)
            except Refused as failure:
                self.failure = failure
                return
            self.log.append({"n": (number := number + 1)})
            while self.shown < number and self.seat.may_show(self.shown + 1):
                self.shown += 1

    def die(self) -> None:
        """Leave what is on the disk."""
        self._ends.set()
        self._thread.join(WITHIN_S)
        self.seat.close()
        self.server.stop(0.0)
        self.log.close()

    def stop(self) -> None:
        """Do nothing until the end, neither renew nor write, and remember all."""
        self._paused.set()
        self.seat._machine._closed = True

    def wake(self) -> None:
        self.seat._machine._closed = False
        machine = self.seat._machine
        threading.Thread(target=machine._run, daemon=True).start()
        self._paused.clear()


class Standby:
    """A standby on a thread of its own."""

    def __init__(self, folder: Path, primary: str, name: str = "two") -> None:
        self.workdir = folder / name
        self.workdir.mkdir(exist_ok=True)
        self.address = f"127.0.0.1:{free_port()}"
        config = placed(folder, self.address)
        self.follower = StandbyNode(config, self.workdir, primary, None)
        self.outcome: StandbyOutcome | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.follower.run()
        except BaseException as failure:
            self.failure = failure

    def join(self) -> None:
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()

    def end(self) -> None:
        self.follower._interrupted = True
        self.join()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Lead]:
    made = Lead(tmp_path)
    yield made
    made.die()


def in_step(lead: Lead) -> bool:
    return lead.seat.shown()["mandate"]["state"] == "in_step"


def numbers(workdir: Path) -> list[int]:
    return [line["n"] for line in durable.read(workdir / "log", -1)]


@pytest.mark.timing
def test_a_standby_in_step_has_all_that_was_shown_and_takes_over(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead) and lead.shown > 50)
    client = Client(
        standby.address,
        tls=None,
        deadlines=placed(tmp_path, "h:1").placement.deadlines,
        bulk_channels=1,
    )
    with pytest.raises(Busy, match=r"this is standby .*: following, in step"):
        client.status(WITHIN_S)
    client.close()
    lead.die()
    died = time.monotonic()
    standby.join()
    assert time.monotonic() - died < 2 * BUDGET_S + 2
    assert standby.outcome == StandbyOutcome("log", "r")
    ours = numbers(standby.workdir)
    assert ours == list(range(1, len(ours) + 1))
    assert lead.shown <= len(ours) <= len(numbers(lead.workdir))
    # The primary of before comes up again, and is told.
    with pytest.raises(Refused, match="holds the mandate in reign 2"):
        seated(placed(tmp_path, lead.address), lead.workdir)


def test_a_standby_that_is_lost_is_told_of_and_comes_back(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    standby.end()
    assert standby.outcome == StandbyOutcome("")
    until(lambda: bool(lead.alerts))
    assert "is not in step any more" in lead.alerts[0]
    shown = lead.shown
    until(lambda: lead.shown > shown + 20)
    again = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    again.end()


def test_a_standby_that_was_not_in_step_gathers_with_nothing_on_its_disk(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    standby.end()
    until(lambda: not in_step(lead) and bool(lead.alerts))
    until(lambda: lead.seat.shown()["mandate"]["state"] == "alone")
    lead.die()
    again = Standby(tmp_path, lead.address)
    again.join()
    assert again.outcome == StandbyOutcome("gathering", "r")
    assert not (again.workdir / "run.json").exists()
    assert not (again.workdir / "log").exists()
    # A start in between gathers too, and another one without --standby-of says so.
    with pytest.raises(ConfigError, match="start it with --standby-of"):
        seated(placed(tmp_path, lead.address), again.workdir)


def test_a_primary_that_dies_before_it_serves_leaves_its_standby_in_step(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    lead.die()
    with contextlib.ExitStack() as opened:
        again = seated(placed(tmp_path, lead.address), lead.workdir, opened=opened)
        shown = again.shown()["mandate"]
        assert (shown["state"], shown["standby"]) == ("loading", ""), "nobody follows"
    standby.join()
    assert standby.outcome == StandbyOutcome("log", "r")


def test_a_primary_with_a_damaged_disk_leaves_the_run_to_its_standby(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    lead.die()
    again = seated(placed(tmp_path, lead.address), lead.workdir)
    again.judge(durable.DurableError("its log is damaged"))
    with pytest.raises(Refused, match="has a broken disk, and has ceded"):
        again.turn(list[str]().append, list[str]().append)
    again.close()
    standby.join()
    assert standby.outcome == StandbyOutcome("log", "r")
    with pytest.raises(Refused):
        seated(placed(tmp_path, lead.address), lead.workdir)


def test_a_primary_whose_disk_breaks_leaves_the_run_to_its_standby(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead) and lead.shown > 10)
    for passing in (OSError(errno.EMFILE, "too many open files"), MemoryError()):
        lead.seat.judge(passing)
        assert in_step(lead)
        assert not lead.seat._machine.state.cedes
    lead.seat.judge(OSError(errno.EROFS, "read-only file system"))
    standby.join()
    assert standby.outcome == StandbyOutcome("log", "r")
    until(lambda: lead.failure is not None)
    assert "has a broken disk, and has ceded" in str(lead.failure)
    assert lead.shown <= len(numbers(standby.workdir))


def test_a_holder_whose_disk_is_lost_does_not_lead_from_it(
    tmp_path: Path, lead: Lead
) -> None:
    """The file with its name is all that is left, and the mandate is valid."""
    lead.die()
    (lead.workdir / "run.json").unlink()
    shutil.rmtree(lead.workdir / "log")
    began = time.monotonic()
    again = Standby(tmp_path, lead.address, lead.workdir.name)
    again.join()
    assert again.outcome == StandbyOutcome("gathering", "r")
    assert time.monotonic() - began > BUDGET_S


def test_a_standby_with_a_full_disk_is_not_in_step_until_there_is_room(
    tmp_path: Path, lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    with monkeypatch.context() as patch:
        for write in ("append", "chunk"):
            patch.setattr(standby.follower._mirror, write, full)
        until(lambda: bool(lead.alerts))
        assert "is not in step any more" in lead.alerts[0]
        shown = lead.shown
        until(lambda: lead.shown > shown + 20)
        assert not in_step(lead)
    until(lambda: in_step(lead))
    standby.end()


def test_a_run_is_not_over_before_the_mandate_says_so(
    lead: Lead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*arguments: object) -> None:
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr(lead.seat._store, "read", away)
        patch.setattr(lead.seat._store, "write", away)
        lead.seat.ended()
        assert not lead.seat.finish(lambda: BUDGET_S / 3)
        assert caplog.text.count("the mandate has not said so") == 1
        # As when a person asks the process to end while it waits.
        patience = iter((WITHIN_S, WITHIN_S, 0.0))
        assert not lead.seat.finish(lambda: next(patience))
        assert next(patience, None) is None
    assert lead.seat.finish(lambda: WITHIN_S)


def test_a_primary_that_wakes_up_shows_nothing_and_ends(
    tmp_path: Path, lead: Lead
) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    lead.stop()
    standby.join()
    assert standby.outcome == StandbyOutcome("log", "r")
    shown = lead.shown
    assert shown <= len(numbers(standby.workdir))
    lead.wake()
    until(lambda: lead.failure is not None)
    assert lead.shown == shown
    assert "holds the mandate" in str(lead.failure)


def test_islands_are_sent_elsewhere_once_the_object_is_away(
    tmp_path: Path, lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: object) -> None:
        raise OSError("away")

    until(lambda: lead.shown > 10)
    with monkeypatch.context() as patch:
        patch.setattr(lead.seat._store, "read", away)
        patch.setattr(lead.seat._store, "write", away)
        until(lambda: bool(lead.ended))
        shown = lead.shown
        time.sleep(0.1)
        assert lead.shown == shown
    until(lambda: lead.shown > shown)
    assert ["the mandate ran out" in text for text in lead.ended] == [True]


def test_the_end_of_the_run_ends_the_standby(tmp_path: Path, lead: Lead) -> None:
    standby = Standby(tmp_path, lead.address)
    until(lambda: in_step(lead))
    lead.seat.ended()
    assert lead.seat.finish(lambda: WITHIN_S)
    standby.join()
    assert standby.outcome == StandbyOutcome("")


def test_a_standby_of_another_config_or_workdir_is_refused(
    tmp_path: Path, lead: Lead
) -> None:
    other = Standby(tmp_path, lead.address)
    other.follower._fingerprint = "another"
    other.join()
    assert isinstance(other.failure, Refused)
    assert "start it with the run's config.json" in str(other.failure)
    RunFacts(run_id="else", begun_unix=0.0).write(other.workdir)
    again = Standby(tmp_path, lead.address)
    again.join()
    assert isinstance(again.failure, ConfigError)
    assert "holds run else" in str(again.failure)


def test_a_coordinator_needs_a_run_for_its_mandate(tmp_path: Path) -> None:
    config = placed(tmp_path, "127.0.0.1:0")
    with pytest.raises(ConfigError, match="start this coordinator with --standby-of"):
        seated(config, tmp_path / "new", "")
    without = dataclasses.replace(config, placement=Placement())
    assert type(seated(without, tmp_path / "new", "")) is Unseated
