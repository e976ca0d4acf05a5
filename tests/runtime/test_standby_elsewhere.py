"""A standby beside workers on other machines: they outlive the lead, and go on with
whoever takes over."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import support
import tape_checks
from elsewhere_support import WorkerProcess, snapshots_in, two_workers
from runtime_support import PATIENCE_S, placed
from standby_support import ALL, TIMEOUT_S, Site, keys_of, trained
from training_support import lasting

from diloco_jax import run_files
from diloco_jax.cluster.commands import free_port
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.errors import EXIT_DONE

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timing,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not rendezvous.HAS_SURVIVORS, reason="workers end with their lead here"
    ),
]

MERGES = 4
"""Merges before the first lead is struck, and of the next one before a worker is."""


class Ended(NamedTuple):
    """A run that the second node finished, with workers of the first one."""

    site: Site
    summary: dict[str, Any]
    tape: list[dict[str, Any]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of keys, each of one process alone."""
    return keys_of(tmp_path_factory.mktemp("keys"), "--workers", "2")


class Elsewhere(NamedTuple):
    """A site in step, and its two workers."""

    site: Site
    workers: list[WorkerProcess]
    config: Path
    folder: Path

    def pids(self) -> list[int]:
        """The processes that hold fragments."""
        return [one.worker() for one in self.workers]

    def machine_goes_down(self, index: int) -> None:
        """Kill a worker and its outpost; start the latter again, with its disk."""
        self.workers[index].kill_machine()
        there = self.folder / f"worker-{index}"
        self.workers[index] = WorkerProcess(self.config, index, there)

    def ended(self, *names: str) -> Ended:
        """Wait for these processes and the workers; all are done."""
        codes = {name: self.site.wait(name) for name in names}
        assert set(codes.values()) == {EXIT_DONE}, (codes, self.site.log("two"))
        codes_there = [one.process.wait(PATIENCE_S) for one in self.workers]
        assert codes_there == [EXIT_DONE] * 2
        return Ended(self.site, self.site.summary("two"), self.site.tape("two"))


@contextlib.contextmanager
def in_step(text: Path, folder: Path, keys: dict[str, Path]) -> Iterator[Elsewhere]:
    there = {
        "workers": 2,
        "worker_addresses": tuple(f"127.0.0.1:{free_port()}" for _ in range(2)),
        "restart_delay_s": 0.1,
    }
    path = folder / "workers.json"
    everyones = str(keys["one"].with_name(ALL))
    config = placed(lasting(text, 1.0), certificates=everyones, **there)
    write_config_json(config.validate(), path)
    with two_workers(path, folder) as workers:
        (folder / "site").mkdir()
        with trained(text, folder / "site", MERGES, keys, **there) as site:
            yield Elsewhere(site, workers, path, folder)


@pytest.fixture(scope="module")
def taken(
    text: Path, tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Path]
) -> Iterator[Ended]:
    """The primary is killed, and then, as its standby leads, the machine of a worker;
    the first node comes back as the standby."""
    with in_step(text, tmp_path_factory.mktemp("killed"), keys) as run:
        site, before = run.site, run.pids()
        # Fragments are at the workers alone.
        for name in ("one", "two"):
            assert snapshots_in(site.workdir(name)) == []
            assert not list((site.workdir(name) / run_files.PUBLISHES).rglob("*.*"))
        site.running["one"].kill()
        site.wait("one")
        status = site.await_status(
            "two", lambda s: "mandate" in s and s["mandate"]["reign"] == 2
        )
        assert run.pids() == before, "the next lead goes on with them"
        merges = status["merges"]
        site.start("one", "--standby-of", site.addresses["two"])
        site.await_status(
            "two",
            lambda s: (
                s["merges"] >= merges + MERGES and s["mandate"]["state"] == "in_step"
            ),
        )
        run.machine_goes_down(0)
        yield run.ended("two", "one", "a", "b")


def test_the_next_lead_goes_on_from_its_log_with_the_same_workers(taken: Ended) -> None:
    assert (taken.summary["phase"], taken.summary["term"]) == ("done", 1)
    (recovered,) = [r for r in taken.tape if r["kind"] == "recovered"]
    assert recovered["snapshot_versions"] == recovered["versions"], "they lived on"
    # No fragment was lost, and gathered from islands.
    assert "term_begun" not in {record["kind"] for record in taken.tape}
    assert [r["worker"] for r in taken.tape if r["kind"] == "worker_recovered"] == [0]
    # The result is whole where the run ended.
    fragments = range(len(support.fragment_sizes(taken.site.config)))
    assert snapshots_in(taken.site.workdir("two")) == list(fragments)


def test_the_books_are_exact_and_no_island_noticed(taken: Ended) -> None:
    assert_exact(taken)
    islands = taken.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 1, "b": 1}
    assert all(i["tokens_lost"] == {} for i in islands.values())


def test_the_tape_repeats_the_whole_run(taken: Ended) -> None:
    assert_repeats(taken)


def assert_exact(ended: Ended) -> None:
    sizes = support.fragment_sizes(ended.site.config)
    assert tape_checks.version_problems(ended.tape) == []
    assert tape_checks.ledger_problems(ended.summary, ended.tape, sizes) == []
    assert tape_checks.interval_problems(ended.tape) == []
    assert tape_checks.row_problems(ended.tape) == []


def assert_repeats(ended: Ended) -> None:
    workdir = ended.site.workdir("two")
    command = [*support.DILOCO, "replay", str(workdir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == ended.summary["merges"]


def test_a_lead_that_wakes_up_gets_no_worker_back(
    text: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """It was stopped for longer than its mandate."""
    with in_step(text, tmp_path, keys) as run:
        site, before = run.site, run.pids()
        site.running["one"].send_signal(signal.SIGSTOP)
        status = site.await_status(
            "two", lambda s: "mandate" in s and s["mandate"]["reign"] == 2
        )
        site.running["one"].send_signal(signal.SIGCONT)
        assert site.wait("one") != EXIT_DONE
        site.await_status("two", lambda s: s["merges"] >= status["merges"] + MERGES)
        assert run.pids() == before
        ended = run.ended("two", "a", "b")
    assert ended.summary["term"] == 1
    assert_exact(ended)
    assert_repeats(ended)


def test_a_standby_that_gathers_brings_the_workers_the_next_term(
    text: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """It was parted from its primary, so its log does not count; nor does what the
    workers have."""
    with in_step(text, tmp_path, keys) as run:
        site = run.site
        site.link.set(up=False, down=False)
        alone = site.await_status("one", lambda s: s["mandate"]["state"] == "alone")
        site.await_status("one", lambda s: s["merges"] >= alone["merges"] + 2)
        site.running["one"].kill()
        site.wait("one")
        ended = run.ended("two", "a", "b")
        assert "takes over, from gathering" in site.log("two")
    assert ended.summary["term"] == 2
    assert_exact(ended)
