"""A worker is lost as the run ends: its part of the result is missed, nobody takes an
older one for it, and the next start of the coordinator has it written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from elsewhere_support import (
    CHECKPOINTS,
    WorkerProcess,
    snapshots_in,
    two_workers,
    with_workers_elsewhere,
)
from runtime_support import PATIENCE_S, make_config, placed
from training_support import trained

from diloco_jax import run_files, storage
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import main, snapshots
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.core.fragments import digest_all, digest_arrays
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.evaluation import load_params
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.values import Version
from diloco_jax.workdir import read_summary

pytestmark = pytest.mark.dist
LOST = 0
"""Number of the worker."""


class Ending:
    """A coordinator that serves on a thread until the run is over."""

    def __init__(self, service: main.Coordinator) -> None:
        self._codes: list[int] = []
        self._service = service
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def code(self) -> int:
        """Its exit code."""
        self._thread.join(2 * PATIENCE_S)
        (code,) = self._codes
        return code

    def _run(self) -> None:
        try:
            self._codes.append(self._service.run() or self._service.conclude())
        finally:
            self._service.close()


def digest_of(config: Config, workdir: Path, versions: list[Version]) -> str:
    """Digest of the newest parameters in a workdir, which are of these versions."""
    store = make_store(config, build_plan(config.run, build(config.run)), None)
    folder, found = workdir / CHECKPOINTS, []
    for fragment, version in enumerate(versions):
        assert snapshots.versions(folder, fragment)[-1] == version
        arrays = snapshots.empty(store.like(fragment))
        path = snapshots.fragment_path(folder, fragment, version)
        storage.read_sealed(path, snapshots.flat(arrays))
        found.append(digest_arrays(arrays["theta"]))
    return digest_all(found)


class Here:
    """The two workers of a coordinator on its own machine."""

    def __init__(self, service: main.Coordinator) -> None:
        self._service = service

    def go_down(self) -> None:
        os.kill(self._service.holder.processes()[LOST].pid, signal.SIGKILL)

    def come_back(self) -> None:
        """The next coordinator starts it."""

    def assert_over(self) -> None:
        """They end with their coordinator."""


class Elsewhere:
    """Two workers on machines of their own."""

    def __init__(self, folder: Path, processes: list[WorkerProcess]) -> None:
        self._folder, self._processes = folder, processes

    def go_down(self) -> None:
        self._processes[LOST].kill()

    def come_back(self) -> None:
        other = self._processes[1 - LOST].process
        assert other.poll() is None, "it waits for the next coordinator"
        workdir = self._folder / f"worker-{LOST}"
        self._processes[LOST] = WorkerProcess(
            self._folder / "config.json", LOST, workdir
        )

    def assert_over(self) -> None:
        assert [one.process.wait(PATIENCE_S) for one in self._processes] == [0, 0]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_result_that_stays_away_is_missed_and_comes_with_the_next_start(
    text, tmp_path, monkeypatch, caplog, where
):
    config = make_config(text, quorum=1)
    # Of two islands one could be late for a run that is this short.
    config = dataclasses.replace(config, islands={"a": config.islands["a"]})
    config = placed(config, workers=2, time_budget_s=10.0, snapshot_every_s=600.0)
    run = tmp_path / "run"
    with contextlib.ExitStack() as opened:
        if where == "elsewhere":
            config = with_workers_elsewhere(config, tmp_path / "certificates")
            write_config_json(config, tmp_path / "config.json")
            started = two_workers(tmp_path / "config.json", tmp_path)
            processes = opened.enter_context(started)
        service = main.Coordinator(config, run, init=True)
        opened.callback(service.close)
        service.start()
        (lost,) = service.holder.of(LOST)
        workers = Here(service) if where == "here" else Elsewhere(tmp_path, processes)
        save_all = service.holder.save_all

        def save_all_but_one(within_s: float | None) -> bool:
            workers.go_down()
            return save_all(within_s)

        monkeypatch.setattr(service.holder, "save_all", save_all_but_one)
        first = Ending(service)
        with trained(config, service.address, tmp_path):
            assert first.code() == EXIT_FAILED
        assert f"the result lacks fragments of worker {LOST}" in caplog.text
        assert not read_summary(run), "`diloco run --resume` would take it for done"
        has_first = lost in snapshots_in(run)
        assert has_first == (where == "here")
        lacks = f"has version (1, 0) of fragment {lost}, and the run ended with (1, "
        without = f"has no snapshot of fragments [{lost}]"
        with pytest.raises(
            ConfigError, match=re.escape(lacks if has_first else without)
        ):
            load_params(run)
        workers.come_back()
        service = main.Coordinator(config, run, init=False)
        opened.callback(service.close)
        service.start()
        assert Ending(service).code() == EXIT_DONE
        workers.assert_over()
    tape = read_tape(run / run_files.TAPE)
    last = {
        r["fragment"]: Version(*r["version"]) for r in tape if r["kind"] == "merged"
    }
    digest = digest_of(config, run, [last[fragment] for fragment in sorted(last)])
    assert digest == read_summary(run)["parameters_digest"]
    load_params(run)
