"""A coordinator and islands on threads of this process, over real gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from scripted import ScriptedDecisions
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax.cluster.cluster import DILOCO
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    shared_fields,
)
from diloco_jax.config.placement import Deadlines
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.data.corpus import load_corpus
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.host import Host
from diloco_jax.island.joined import JoinedHost
from diloco_jax.island.main import TrainingHost
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.messages import FIRST_VERSION, Record
from diloco_jax.wire import bulk
from diloco_jax.wire.client import Client, ControlStream

PATIENCE_S = 60.0

Found = TypeVar("Found", bound=messages.FromCoordinator)


def make_config(text: Path, *, cycles: int = 3, **sync: Any) -> Config:
    """Two islands, `a` and `b`, on a tiny model; resolved."""
    sync = {
        "steps_per_cycle": 4,
        "fragments": 2,
        "overlap_steps": 1,
        "quorum": 2,
        **sync,
    }
    paths = (str(text),)
    run = RunConfig(
        model=MODEL,
        data=DataConfig(
            paths=paths, validation_fraction=0.2, digest=load_corpus(paths, 0.2).digest
        ),
        inner=InnerConfig(
            learning_rate=1e-2, schedule="constant", warmup_fraction=0, rewarm_steps=0
        ),
        outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
        sync=SyncConfig(**sync),
        sequence_length=SEQUENCE_LENGTH,
        total_tokens=(cycles + 1) * 4 * 6 * SEQUENCE_LENGTH,
    )
    islands = {"b": IslandConfig(batch_size=2), "a": IslandConfig(batch_size=4)}
    return Config(run=run, islands=islands).validate()


def placed(config: Config, **changes: Any) -> Config:
    """The config with another placement."""
    placement = dataclasses.replace(config.placement, **changes)
    return dataclasses.replace(config, placement=placement)


def with_run(config: Config, **changes: Any) -> Config:
    """The config of another run."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


@contextlib.contextmanager
def coordinator(
    config: Config, workdir: Path, *, init: bool = True, killed: bool = False
) -> Iterator[Coordinator]:
    """Serves until the block ends; the summary is written then. killed: it ends as by
    SIGKILL, and leaves what is durable."""
    service = Coordinator(config, workdir, init=init)
    service.start()
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.lead.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        if not killed:
            service.conclude()
        service.close()


def run_scripted(
    config: Config,
    workdir: Path,
    own: Mapping[str, Callable[[Host[Any], Config], Ending]] | None = None,
    like: Any = None,
) -> list[dict]:
    """The whole run with every island on the oracle's script; returns the tape. own:
    loops of islands that join, by name; like: their parameters, if they have another
    structure than the config's own model."""
    # A lease that runs out begins the schedule anew, which no script follows.
    config = placed(config, time_budget_s=PATIENCE_S)
    sync = config.run.sync
    with coordinator(config, workdir) as service:
        failures: list[str] = []
        # One after the other, so that all are there before the first tick.
        own = own or {}
        islands = [
            joined_host(config, name, service.address, like)
            if name in own
            else TrainingHost(config, name, service.address, workdir / name)
            for name in config.islands
        ]
        ready = threading.Barrier(len(islands))

        def live(name: str, island: Host[Any]) -> None:
            script = ScriptedDecisions(
                island.mailbox,
                steps_per_cycle=sync.steps_per_cycle,
                fragments=sync.fragments,
                overlap_steps=sync.overlap_steps,
                patience_s=PATIENCE_S,
            )
            try:
                island.start(script)
                ready.wait(PATIENCE_S)
                run = own.get(name)
                ending = run(island, config) if run else island.loop.run()
                if ending.exit_code:
                    failures.append(ending.text)
                island.stop(ending)
                island.close()
            except Exception as error:
                failures.append(repr(error))

        threads = [
            threading.Thread(target=live, args=pair)
            for pair in zip(config.islands, islands, strict=True)
        ]
        for name, thread in zip(config.islands, threads, strict=True):
            thread.start()
            # Data is leased in the order of hellos: two runs are to have the same.
            await_state(
                service, lambda s, name=name: bool(failures) or name in s.islands
            )
        for thread in threads:
            thread.join(3 * PATIENCE_S)
        assert not failures, failures
    return list(read_tape(workdir / "tape.jsonl"))


def joined_host(
    config: Config, name: str, address: str, like: Any = None
) -> JoinedHost:
    """An island whose steps are a test's, of the config's own model unless `like` is
    given."""
    if like is not None:
        return JoinedHost(config, name, address, like, None)
    model, trainer = build_trainer(config.run, config.islands[name])
    return JoinedHost(config, name, address, trainer.zeros(), model.axes)


# ---- an island that is nothing but its messages ----------------------------------


@contextlib.contextmanager
def client(address: str, **options: Any) -> Iterator[Client]:
    """Closed when the block ends."""
    fields = {"tls": None, "bulk_channels": 1, "deadlines": Deadlines(PATIENCE_S)}
    made = Client(address, **(fields | options))
    try:
        yield made
    finally:
        made.close()


def hello(config: Config, island: str = "a", **changes: Any) -> messages.Hello:
    """Return the first message of an island of this config."""
    run, own = config.run, config.islands[island]
    fields: dict[str, Any] = {
        "run_id": "",
        "fingerprint": run.fingerprint(),
        "run": shared_fields(run),
        "plan": build_plan(run, build(run)).digest(),
        "island": island,
        "island_config": dataclasses.asdict(own),
        "incarnation": 1,
        "session": f"session of {island}",
        "environment": {},
        "tokens_per_step": own.batch_size * run.sequence_length,
        "sequences_per_step": own.batch_size,
        "phase": "joining",
        "steps": 0,
        "step_seconds": 0.0,
    }
    return messages.Hello(**(fields | changes))


def report(steps: int, *records: Record) -> messages.Report:
    """A sign of life of an island that trains."""
    return messages.Report(
        phase="training", steps=steps, step_seconds=0.01, records=records
    )


def took(take: messages.TakeRequest, *, seq: int, steps: int) -> Record:
    """The record of a take of all steps so far, against the first version."""
    return Record(
        seq=seq,
        kind="took",
        step=steps,
        fragment=take.fragment,
        tick=take.tick,
        version=FIRST_VERSION,
    )


def upload_start(
    who: messages.Hello, run_id: str, take: messages.TakeRequest, total: int
) -> bulk.UploadStart:
    """Announces the whole delta of a take."""
    return bulk.UploadStart(
        run_id=run_id,
        island=who.island,
        incarnation=who.incarnation,
        session=who.session,
        fragment=take.fragment,
        tick=take.tick,
        offset=0,
        length=total,
        total=total,
    )


def answer(
    service: Coordinator,
    island: Client,
    who: messages.Hello,
    stream: ControlStream,
    take: messages.TakeRequest,
    *,
    seq: int,
    steps: int,
) -> None:
    """Takes all steps so far, and sends a delta of zeros."""
    stream.send(report(steps, took(take, seq=seq, steps=steps)))
    size = service.holder.store.layouts_up[take.fragment].total_bytes
    start = upload_start(who, stream.welcome.run_id, take, size)
    island.transfers.upload(start, bytes(size))


def await_that(
    happened: Callable[[], object],
    patience_s: float = PATIENCE_S,
    said: Callable[[], object] = lambda: "it does not happen",
) -> None:
    """Returns once it has happened. said: what is told if it does not in time."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


def await_state(
    service: Coordinator,
    happened: Callable[[State], bool],
    patience_s: float = PATIENCE_S,
) -> None:
    """Returns once the policy's state is so."""
    lead = service.lead
    await_that(lambda: happened(lead.state), patience_s, lambda: lead.state)


def await_message(stream: ControlStream, kind: type[Found]) -> Found:
    """The next message of that kind; what comes before it is passed over."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        message = stream.receive(deadline - time.monotonic())
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__} within {PATIENCE_S} s")


# ---- real processes --------------------------------------------------------------


class Stall:
    """Within its block, the longest time by which a thread of this process overslept.

    A machine that stands still (a virtual one, whose host is busy) lengthens a step of
    any process on it. That is no wait for another process: a bound on the times of
    steps is to be `longest_s` longer.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_S)

    def _record(self) -> None:
        pause_s, began = 0.01, time.monotonic()
        while not self._ended.wait(pause_s):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - began - pause_s)
            began = now


def await_gone(pids: Iterable[int]) -> None:
    """Until none of these processes is left, which were killed."""
    here = [Path(f"/proc/{pid}") for pid in pids]
    await_that(lambda: not any(path.exists() for path in here), said=lambda: here)


@contextlib.contextmanager
def started(
    command: Iterable[object], log: Path, cwd: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, killed when the block ends if it has not ended by itself."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=cwd,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


COMMAND_S = 240.0
"""Seconds for a command that ends by itself."""


def diloco(
    *arguments: object, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command's process that has ended, with this code."""
    done = subprocess.run(
        [*DILOCO, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def replayed(workdir: Path) -> dict[str, Any]:
    """What replay tells of a run all of whose merges it repeats bit for bit."""
    outcome: dict[str, Any] = json.loads(diloco("replay", workdir, "--json").stdout)
    assert outcome["identical"]
    assert outcome["merges"] == outcome["merges_on_tape"]
    return outcome
