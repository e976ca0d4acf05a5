"""Where the dashboard reads from: a run's workdir, or its coordinator's address.

Nothing here writes, and the coordinator is asked for its status alone. Lines of a
workdir are followed while their writer is at work, through all their files.
"""

from __future__ import annotations

import functools
import heapq
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from diloco_jax import run_files
from diloco_jax.cluster.status import read_status
from diloco_jax.config import Config, ConfigError, Placement, RunConfig
from diloco_jax.config.loading import read_config_json
from diloco_jax.dashboard.timeline import Timeline
from diloco_jax.data.tokenizers import VOCAB_SIZE
from diloco_jax.files import expand
from diloco_jax.models.flops import analytic_flops
from diloco_jax.observability.tape import closed_segments, nbytes
from diloco_jax.wire.errors import WireError
from diloco_jax.workdir import holds_run, read_facts

BLOCK_BYTES = 1 << 20


class NewLines:
    """The lines of a file that were not yielded before. Use from one thread.

    `bad_lines` counts complete lines that were no JSON objects and were left out.
    """

    def __init__(self, path: Path) -> None:
        """path: the newest file, which need not exist yet."""
        self.bad_lines = 0
        self.read_bytes = 0
        self.path = path
        self._file: BinaryIO | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines up to the end; a line without its end comes later."""
        while self._open():
            assert self._file is not None
            rest = b""
            while block := self._file.read(BLOCK_BYTES):
                self.read_bytes += len(block)
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    if (found := self._decode(line)) is not None:
                        yield found
            read = self._file.tell()
            # An unfinished line is read again: its writer's next life cuts it off.
            self.read_bytes -= len(rest)
            self._file.seek(read - len(rest))
            if not self._go_on(read):
                return

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = None
        if isinstance(found, dict) and isinstance(found.get("time"), (int, float)):
            return found
        self.bad_lines += 1
        return None

    def _open(self) -> bool:
        if self._file is None:
            before = closed_segments(self.path) if self.path.parent.is_dir() else []
            try:
                self._file = (before[0] if before else self.path).open("rb")
            except FileNotFoundError:
                return False
        return True

    def _go_on(self, read: int) -> bool:
        """Open the file after this one, of which `read` bytes were read; return False
        at the end of the newest."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        closed = closed_segments(self.path)
        for number, file in enumerate(closed):
            if os.path.samestat(file.stat(), mine):
                after = closed[number + 1] if number + 1 < len(closed) else self.path
                break
        else:
            return False
        if mine.st_size > read:
            return True  # Its last lines came after the last read.
        try:
            following = after.open("rb")
        except FileNotFoundError:
            return False
        self._file.close()
        self._file = following
        return True


Lines = Iterator[tuple[float, Callable[[Mapping[str, Any]], None], dict[str, Any]]]

BITS_PER_NAT = 1 / math.log(2)
OF_STATUS = (
    *("loss", "eval_loss", "median_step_seconds", "stalled_seconds"),
    *("bytes_up", "bytes_down"),
)
"""Fields that a status and a line of the metrics have in common."""


class Telling(Protocol):
    """Tells a timeline what is new."""

    def new(self, timeline: Timeline) -> Lines:
        """Yield (time, what takes the line, the line) of what is new, in order."""

    def status(self) -> dict[str, Any]:
        """Return the status of the run; raise WireError or ConfigError without one."""

    def facts(self) -> dict[str, Any]:
        """Return what does not change: where from, and what the run was told."""

    def read_share(self) -> float:
        """Return how much of what is recorded has been read, in [0, 1]."""

    def close(self) -> None:
        """Close what is open."""


class OfWorkdir:
    """Reads tape, metrics, strikes of chaos, status and summary of a workdir."""

    def __init__(self, workdir: Path, placement: Placement) -> None:
        """Raise ConfigError if the folder holds no run of this format, and none is
        being started there."""
        if holds_run(workdir):
            read_facts(workdir)
        elif not (workdir / run_files.CONFIG).exists():
            raise ConfigError(
                f"{workdir} holds no run (there is no {run_files.FACTS}); give the "
                f"workdir of a run, or HOST:PORT of its coordinator"
            )
        self._workdir, self._placement = workdir, placement
        self._config: Config = read_config_json(workdir / run_files.CONFIG)
        self._tape = NewLines(workdir / run_files.TAPE)
        self._metrics = NewLines(workdir / run_files.METRICS)
        self._strikes = NewLines(workdir / run_files.CHAOS)
        self._looked = 0.0

    def new(self, timeline: Timeline) -> Lines:
        """Yield what is new in the files."""

        def strike(line: Mapping[str, Any]) -> None:
            missed = line.get("missed")
            gone = f"; not running: {', '.join(missed)}" if missed else ""
            text = f"diloco chaos strikes: {line.get('strike')}{gone}"
            timeline.event(line["time"], "strike", ",".join(line.get("who", ())), text)

        def of(lines: NewLines, take: Callable[[Mapping[str, Any]], None]) -> Lines:
            return ((line["time"], take, line) for line in lines)

        yield from heapq.merge(
            of(self._tape, timeline.tape),
            of(self._metrics, timeline.metrics),
            of(self._strikes, strike),
            key=lambda item: item[0],
        )

    def status(self) -> dict[str, Any]:
        """Return the coordinator's status, or the summary that it left."""
        return read_status(str(self._workdir), self._placement)

    def facts(self) -> dict[str, Any]:
        """Return the run's name and islands, how its loss becomes bits per byte, and
        its tokens FLOPs."""
        run = self._config.run
        begun = read_facts(self._workdir) if holds_run(self._workdir) else None
        return {
            "name": self._workdir.resolve().name,
            "run_id": begun.run_id if begun else "",
            "total_tokens": run.total_tokens,
            "expected": sorted(self._config.islands),
            "whole": True,
            "bits_per_nat": BITS_PER_NAT if _of_bytes(run) else None,
            "flops_per_token": _flops_per_token(run),
        }

    def read_share(self) -> float:
        """Return the share of the bytes of tape and metrics that were read."""
        both = (self._tape, self._metrics)
        there = sum(nbytes(lines.path) for lines in both)
        read = sum(lines.read_bytes for lines in both)
        return min(1.0, read / there) if there else 1.0

    def close(self) -> None:
        """Close the files."""
        for lines in (self._tape, self._metrics, self._strikes):
            lines.close()


class OfAddress:
    """Reads the status of a coordinator, of which it makes the run's lines.

    A status has no tape: history begins when the dashboard does, without merges.
    """

    def __init__(self, address: str, placement: Placement) -> None:
        self._address, self._placement = address, placement
        self._newest: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._incarnations: dict[str, int] = {}

    def status(self) -> dict[str, Any]:
        """Ask the coordinator."""
        self._newest = {**read_status(self._address, self._placement)}
        self._newest["time"] = time.time()
        return self._newest

    def facts(self) -> dict[str, Any]:
        """Return where the status comes from."""
        return {
            "name": self._address,
            "run_id": "",
            "total_tokens": None,
            "expected": [],
            "whole": False,
            "bits_per_nat": None,
            "flops_per_token": None,
        }

    def read_share(self) -> float:
        """Return 1: there is no history to read."""
        return 1.0

    def close(self) -> None:
        """Do nothing: each status has a connection of its own."""

    def new(self, timeline: Timeline) -> Lines:
        """Yield lines as a workdir would have them, out of the newest status."""
        status, before = self._newest, self._told
        if not status or status is before:
            return
        self._told, now = status, status["time"]
        if not before:
            begun = {"kind": "begun", "run_id": status.get("run_id", "")}
            begun |= {"total_tokens": status.get("total_tokens", 0), "time": now}
            yield now, timeline.tape, begun
        for name, island in status.get("islands", {}).items():
            yield now, functools.partial(self._tell, timeline, name, now), island
        for text in status.get("alerts", ()):
            if text not in before.get("alerts", ()):
                yield now, timeline.tape, {"kind": "alert", "text": text, "time": now}
        machine = status.get("machine") or {}
        if "memory_bytes" in machine:
            yield now, timeline.metrics, {"kind": "machine", "time": now, **machine}
        model = status.get("merged_model")
        if model and model != before.get("merged_model"):
            yield now, timeline.metrics, {**model, "kind": "merged_model", "time": now}

    def _tell(
        self, timeline: Timeline, name: str, now: float, island: Mapping[str, Any]
    ) -> None:
        """Tell what the status of one island has that is new."""
        common = {"island": name, "incarnation": island["incarnation"], "time": now}
        state, median = island["state"], island["median_step_seconds"]
        if self._incarnations.get(name) != island["incarnation"]:
            self._incarnations[name] = island["incarnation"]
            timeline.seen(now, name, island)
        lane = timeline.lanes[name]
        if state in ("absent", "gone"):
            if lane.state not in ("absent", ""):
                timeline.tape({"kind": "absent", "why": state, **common})
            return
        if lane.state == "absent":
            timeline.tape({"kind": "resumed", "steps": island["steps"], **common})
        lane.tokens_per_step = round(island["tokens_per_second"] * median)
        line = {field: island[field] for field in OF_STATUS}
        line |= {"kind": "island", "phase": state, "step": island["steps"], **common}
        timeline.metrics(line)


def opened(target: str, placement: Placement) -> Telling:
    """Return what reads a workdir or HOST:PORT; ConfigError if it is neither."""
    workdir = expand(target)
    if workdir.is_dir():
        return OfWorkdir(workdir, placement)
    if ":" not in target:
        raise ConfigError(
            f"{target!r} is neither a folder nor HOST:PORT; give a run's workdir, or "
            f"its coordinator's address"
        )
    return OfAddress(target, placement)


def status_or_why(source: Telling) -> dict[str, Any]:
    """Return the status, or `{"unreachable": reason}`."""
    try:
        return source.status()
    except (WireError, ConfigError, OSError) as error:
        return {"unreachable": str(error)}


def _of_bytes(run: RunConfig) -> bool:
    """Return True if each token is a byte of text."""
    data = run.data
    own = bool(data.tokenizer or data.factory)
    return not own and run.model.vocab_size == VOCAB_SIZE


def _flops_per_token(run: RunConfig) -> float | None:
    """Return the FLOPs of a trained token; None where no formula is known: of a model
    of the user's own, and of adapters."""
    if run.model.factory or run.model.lora_rank:
        return None
    return analytic_flops(run.model, run.sequence_length) / run.sequence_length
