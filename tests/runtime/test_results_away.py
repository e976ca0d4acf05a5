"""A worker is lost as the run ends: its part of the result is missed, nobody takes an
older one for it, and the next start of the coordinator has it written."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from pathlib import Path

import pytest
from runtime_support import PATIENCE_S, make_config, placed
from training_support import trained
from worker_support import (
    CHECKPOINTS,
    WorkerProcess,
    snapshots_in,
    two_workers,
    with_workers,
)

from diloco_jax import files, run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import main, snapshots
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.core.tiles import digest_all, digest_arrays
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.evaluation import load_params
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.messages import Version
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
    store = make_store(config, build_plan(config.run, build(config.run)))
    folder, found = workdir / CHECKPOINTS, []
    for fragment, version in enumerate(versions):
        assert snapshots.versions(folder, fragment)[-1] == version
        arrays = store.room(fragment)
        path = snapshots.fragment_path(folder, fragment, version)
        files.read_sealed(path, snapshots.flat(arrays))
        found.append(digest_arrays(arrays["theta"]))
    return digest_all(found)


def test_a_result_that_stays_away_is_missed_and_comes_with_the_next_start(
    text, tmp_path, monkeypatch, caplog
):
    config = make_config(text, quorum=1)
    # Of two islands one could be late for a run that is this short.
    config = dataclasses.replace(config, islands={"a": config.islands["a"]})
    config = placed(config, time_budget_s=10.0, snapshot_every_s=600.0)
    config = with_workers(config, tmp_path / "certificates")
    run, path = tmp_path / "run", tmp_path / "config.json"
    write_config_json(config, path)
    with contextlib.ExitStack() as opened:
        processes = opened.enter_context(two_workers(path, tmp_path))
        service = main.Coordinator(config, run, init=True)
        opened.callback(service.close)
        service.start()
        (lost,) = service.holder.of(LOST)
        save_all = service.holder.save_all

        def save_all_but_one(within_s: float | None) -> bool:
            processes[LOST].kill()
            return save_all(within_s)

        monkeypatch.setattr(service.holder, "save_all", save_all_but_one)
        first = Ending(service)
        with trained(config, service.address, tmp_path):
            assert first.code() == EXIT_FAILED
        assert f"the result lacks fragments of worker {LOST}" in caplog.text
        assert not read_summary(run), "`diloco run --resume` would take it for done"
        assert lost not in snapshots_in(run)
        without = re.escape(f"has no snapshot of fragments [{lost}]")
        with pytest.raises(ConfigError, match=without):
            load_params(run)
        other = processes[1 - LOST].process
        assert other.poll() is None, "it waits for the next coordinator"
        processes[LOST] = WorkerProcess(path, LOST, tmp_path / f"worker-{LOST}")
        service = main.Coordinator(config, run, init=False)
        opened.callback(service.close)
        service.start()
        assert Ending(service).code() == EXIT_DONE
        assert [one.process.wait(PATIENCE_S) for one in processes] == [0, 0]
    tape = read_tape(run / run_files.TAPE)
    last = {
        r["fragment"]: Version(*r["version"]) for r in tape if r["kind"] == "merged"
    }
    digest = digest_of(config, run, [last[fragment] for fragment in sorted(last)])
    assert digest == read_summary(run)["parameters_digest"]
    load_params(run)
