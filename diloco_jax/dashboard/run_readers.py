"""Where the dashboard reads from: a run's workdir, or its coordinator's address.

Nothing here writes, and the coordinator is asked for its status alone. Lines of a
workdir are followed while their writer is at work, through all their files.
"""

from __future__ import annotations

import functools
import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.cluster.status import read_status, require_target
from diloco_jax.config import Config, ConfigError, Placement
from diloco_jax.config.loading import read_config_json
from diloco_jax.dashboard.timeline import Timeline
from diloco_jax.data.tokenizers import VOCAB_SIZE
from diloco_jax.models.flops import analytic_flops
from diloco_jax.observability.tape import NewLines, nbytes
from diloco_jax.workdir import holds_run, read_facts

Lines = Iterator[tuple[float, Callable[[Mapping[str, Any]], None], dict[str, Any]]]

BITS_PER_NAT = 1 / math.log(2)
OF_STATUS = (
    *("loss", "eval_loss", "median_step_seconds", "stalled_seconds"),
    *("bytes_up", "bytes_down"),
)
"""Fields that a status and a line of the metrics have in common."""
UNKNOWN: Mapping[str, Any] = {
    "run_id": "",
    "total_tokens": None,
    "expected": [],
    "whole": False,
    "bits_per_nat": None,
    "flops_per_token": None,
}
"""Facts of a run that a status does not tell."""


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

    def new(self, timeline: Timeline) -> Lines:
        """Yield (time, what takes the line, the line) of what is new, in order."""

        def strike(line: Mapping[str, Any]) -> None:
            missed = line.get("missed")
            gone = f"; not running: {', '.join(missed)}" if missed else ""
            text = f"diloco chaos strikes: {line.get('strike')}{gone}"
            timeline.event(line["time"], "strike", ",".join(line.get("who", ())), text)

        def of(lines: NewLines, take: Callable[[Mapping[str, Any]], None]) -> Lines:
            for line in lines:
                if isinstance(line.get("time"), (int, float)):
                    yield line["time"], take, line

        yield from heapq.merge(
            of(self._tape, timeline.tape),
            of(self._metrics, timeline.metrics),
            of(self._strikes, strike),
            key=lambda item: item[0],
        )

    def status(self) -> dict[str, Any]:
        """Return the coordinator's status, or the summary that it left; raise WireError
        or ConfigError without one."""
        return read_status(str(self._workdir), self._placement)

    def facts(self) -> dict[str, Any]:
        """Return what does not change: the run's name and islands, how its loss becomes
        bits per byte, and its tokens FLOPs."""
        run = self._config.run
        begun = read_facts(self._workdir) if holds_run(self._workdir) else None
        own = bool(run.data.tokenizer or run.data.factory)
        of_bytes = not own and run.model.vocab_size == VOCAB_SIZE
        # No formula is known of a model of the user's own, and of adapters.
        known = not (run.model.factory or run.model.lora_rank)
        flops = analytic_flops(run.model, run.sequence_length) if known else None
        return {
            "name": self._workdir.resolve().name,
            "run_id": begun.run_id if begun else "",
            "total_tokens": run.total_tokens,
            "expected": sorted(self._config.islands),
            "whole": True,
            "bits_per_nat": BITS_PER_NAT if of_bytes else None,
            "flops_per_token": flops / run.sequence_length if flops else None,
        }

    def read_share(self) -> float:
        """Return the share of the bytes of tape and metrics that were read."""
        both = (self._tape, self._metrics)
        there = sum(nbytes(lines.path) for lines in both)
        read = sum(lines.read_bytes for lines in both)
        return min(1.0, read / there) if there else 1.0


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
        return {**UNKNOWN, "name": self._address}

    def read_share(self) -> float:
        """Return 1: there is no history to read."""
        return 1.0

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


Telling = OfWorkdir | OfAddress


def opened(target: str, placement: Placement) -> Telling:
    """Return what reads a workdir or HOST:PORT; ConfigError if it is neither."""
    workdir = require_target(target)
    if workdir is None:
        return OfAddress(target, placement)
    return OfWorkdir(workdir, placement)
