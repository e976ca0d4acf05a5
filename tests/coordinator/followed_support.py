"""A primary's files and those of its standby, with the stream between them."""

from __future__ import annotations

import itertools
from pathlib import Path

from diloco_jax.config import Placement
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.standby.mirror import Mirror
from diloco_jax.coordinator.standby.outflow import Outflow
from diloco_jax.observability.tape import Tape
from diloco_jax.wire import follow
from diloco_jax.workdir import RunFacts

ALIVE_S = 0.01


class Pair:
    """A primary's files, and the standby's."""

    def __init__(self, folder: Path, placement: Placement | None = None) -> None:
        self.here, self.there = folder / "primary", folder / "standby"
        self.here.mkdir()
        self.there.mkdir()
        RunFacts(run_id="r", begun_unix=0.0).write(self.here)
        (self.here / "config.json").write_text("{}")
        self.lost: list[str] = []
        self.out = Outflow(
            self.here, placement or Placement(), ALIVE_S, self.lost.append
        )
        self.log = RecordLog(self.here / "log")
        self.tape = Tape(self.here / "tape.jsonl", segment_bytes=200)
        self.publishes = Publishes(self.here / "publishes")
        self.snapshots = self.here / "checkpoints" / "coordinator"
        self.snapshots.mkdir(parents=True)
        self.log.appended = lambda path, data: self.out.appended(path, data, sync=True)
        self.tape.appended = lambda path, data: self.out.appended(
            path, data, sync=False
        )
        self.tape.put_aside = self.out.put_aside
        self.publishes.written = self.out.published
        self.mirror = Mirror(self.there, Placement(snapshots_kept=1))
        self.outgoing = self.out.prepare("r", {})
        self.arrived = self.out.number

    def write(self, count: int) -> None:
        for _ in range(count):
            number = self.out.number
            self.log.append({"n": number})
            self.tape.append({"kind": "x", "n": number})

    def snapshot(self, name: str, content: bytes = b"s") -> Path:
        path = self.snapshots / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self.out.snapshot(path)
        return path

    def begin(self) -> None:
        self.out.begin(self.outgoing)
        self.messages = self.outgoing.messages()

    def take(self, most: int = 1000) -> list[str]:
        """Give the standby what is there for it, up to so many messages. Returns the
        paths that they name."""
        named = []
        for raw in itertools.islice(self.messages, most):
            message = follow.from_primary(raw)
            named.append(getattr(message, "path", ""))
            match message:
                case follow.CopyBegins(keep=keep):
                    self.mirror.clear("r", keep)
                case follow.CopyWhole(number=number):
                    self.mirror.whole()
                    self.arrived = number
                case follow.FileChunk(path=p, first=first, last=last, data=data):
                    self.mirror.chunk(p, data, first=first, last=last)
                case follow.AppendedTo(number=n, path=p, sync=sync, data=data):
                    self.mirror.append(p, data, sync=sync)
                    self.arrived = n
                case follow.PutAside(number=n, path=p):
                    self.mirror.put_aside(p)
                    self.arrived = n
                case follow.PrimaryAlive():
                    break
        return named

    def close(self) -> None:
        self.out.end(self.outgoing)
        self.outgoing.close()
        for file in (self.log, self.tape, self.mirror):
            file.close()

    def files(self, folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
