"""Holders of a run's fragments that a test speaks to: in this process, or workers,
which have workdirs and keys of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax import checkpoint
from diloco_jax.cluster.cluster import DILOCO, free_port
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.fragment_snapshots import KeptCycles, make_store
from diloco_jax.coordinator.holding.holder import StoreHolder, make_holder
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.workers import WorkersHolder
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.holding import (
    Commit,
    DeltaArrived,
    Merge,
    MergeDigested,
    MergePrepared,
    RestoreFragments,
)
from diloco_jax.protocol.messages import Contribution, Version
from diloco_jax.wire.bulk import UploadStart
from diloco_jax.wire.certificates import make_certificates

RUN_ID = "r"
PATIENCE_S = 60.0
FIRST, SECOND = Version(1, 0), Version(1, 1)


def in_process(config: Config, workdir: Path) -> tuple[Store, StoreHolder]:
    """All fragments of a new run, which are on the disk of its workdir then."""
    plan = build_plan(config.run, build(config.run))
    whose = checkpoint.whose(config.run, RUN_ID, plan)
    store = make_store(config, plan)
    kept = KeptCycles(workdir, 2, whose, plan.sizes)
    fragments = range(len(plan.fragments))
    holder = make_holder(config, store, kept, workdir, whose, fragments)
    holder.restore(RestoreFragments(fragments=(), first=True))
    return store, holder


def of_workers(config: Config, workdir: Path, term: int = 1) -> WorkersHolder:
    """The holder of a lead whose workers have not begun yet."""
    plan = build_plan(config.run, build(config.run))
    whose = checkpoint.whose(config.run, RUN_ID, plan)
    kept = KeptCycles(workdir, 2, whose, plan.sizes)
    return WorkersHolder(config, workdir, RUN_ID, plan, kept, term)


def delta_of(store: Store, fragment: int) -> tuple[UploadStart, np.ndarray]:
    """The first delta of island a, and how it is sent whole."""
    size = store.layouts_up[fragment].total_bytes
    # int8 in blocks: any bytes whose scales are finite make a delta.
    payload = np.random.default_rng(0).integers(0, 63, size, np.uint8)
    start = UploadStart(
        run_id=RUN_ID,
        island="a",
        incarnation=1,
        session="s",
        fragment=fragment,
        tick=1,
        offset=0,
        length=len(payload),
        total=len(payload),
    )
    return start, payload


def send_here(holder: StoreHolder, payload: np.ndarray) -> Callable[..., None]:
    """A function that gives a holder in this process a delta."""

    def send(start: UploadStart) -> None:
        place = holder.upload_begin(start)
        place[:] = payload.data
        holder.upload_end(start, place)

    return send


def merge_of(fragment: int) -> Merge:
    """The order of a merge of that delta alone."""
    contribution = Contribution(
        island="a", incarnation=1, tick=1, start=0, end=2, tokens=128, base=FIRST
    )
    return Merge(
        fragment=fragment,
        version=SECOND,
        contributions=(contribution,),
        share=1.0,
        final=False,
    )


class Ask:
    """Says things to a holder, and waits for its answers."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        holder.answer(self._heard.put, self._heard.put)

    def await_(self, kind: type) -> Any:
        """The next answer, or error, of that kind; others are passed over."""
        while not isinstance(heard := self._heard.get(timeout=PATIENCE_S), kind):
            assert not isinstance(heard, BaseException), heard
        return heard

    def heard(self, kind: type) -> list[Any]:
        """All answers of that kind so far that nobody waited for."""
        found = [self._heard.get() for _ in range(self._heard.qsize())]
        return [message for message in found if isinstance(message, kind)]

    def merge(self, send: Callable[[UploadStart], object], start: UploadStart) -> str:
        """Send a delta and have it merged; the digest of the publish."""
        send(start)
        assert self.await_(DeltaArrived).refusal == ""
        return self.prepare(start.fragment)

    def prepare(self, fragment: int) -> str:
        """Have a delta merged that has arrived; the digest of the publish."""
        self._holder.hold(merge_of(fragment))
        return self.await_(MergePrepared).prepared.digest

    def commit(self, fragment: int) -> str:
        """Commit the merge; the digest of Theta."""
        self._holder.hold(Commit(fragment=fragment, version=SECOND))
        return self.await_(MergeDigested).digest


CHECKPOINTS = Path("checkpoints") / "coordinator"
"""In a workdir, the folder of snapshots."""


def with_workers(config: Config, folder: Path, **changes) -> Config:
    """The config with two workers at addresses of their own, and its certificates."""
    make_certificates(folder, [], 1, islands=list(config.islands), workers=2)
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    placement = dataclasses.replace(
        config.placement,
        workers=2,
        worker_addresses=addresses,
        certificates=str(folder),
        **changes,
    )
    return dataclasses.replace(config, placement=placement).validate()


class WorkerProcess:
    """`diloco worker`, as on a machine of its own."""

    def __init__(self, config: Path, index: int, workdir: Path) -> None:
        words = [*DILOCO, "worker", str(config), "--index", str(index)]
        words += ["--workdir", str(workdir)]
        self.log = workdir.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it, however it is."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


@contextlib.contextmanager
def two_workers(config_path: Path, folder: Path):
    """Two `diloco worker`, with workdirs of their own."""
    made = [
        WorkerProcess(config_path, index, folder / f"worker-{index}")
        for index in range(2)
    ]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def snapshots_in(workdir: Path) -> list[int]:
    """The fragments of which a workdir has a snapshot."""
    folder = workdir / CHECKPOINTS
    return sorted({int(path.parent.name) for path in folder.glob("*/*.snapshot")})
