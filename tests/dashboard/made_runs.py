"""Tapes and metrics of runs that never were, for tests of the dashboard.

Every line is made of the coordinator's own records, so that it has their form.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diloco_jax import run_files
from diloco_jax.config.loading import read_config, write_config_json
from diloco_jax.coordinator import journal
from diloco_jax.files import write_json
from diloco_jax.protocol import records
from diloco_jax.protocol.messages import Contribution, Record, Version
from diloco_jax.workdir import RunFacts

T = TypeVar("T")

BEGIN = 1_790_000_000.0
FRAGMENTS = 24
TOKENS_PER_STEP = 4096
COMPILE_S = 20
LOOK_S = 5
"""Seconds between two looks at the coordinator's machine."""
KINDS = {"v5p": "TPU v5", "v6e": "TPU v6 lite"}
"""JAX's names of an island's devices, by the first letters of the island's name."""

Line = tuple[str, dict[str, Any]]
"""("tape" or "metrics", the line)"""


BLANKS = {int: 0, str: "", dict: {}, tuple: (), bool: False, float: 0.0}


def made(kind: type[T], **given: Any) -> T:
    """Return a struct with these fields, and nothing in others that it must have."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in given:
            of = typing.get_origin(field.type) or field.type
            if of is typing.Annotated:
                of = typing.get_args(field.type)[0]
            given[field.name] = BLANKS[of]
    return kind(**given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outage:
    """An island that dies and comes again."""

    island: int
    at_s: int
    seconds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeRun:
    """A run of islands that make a step a second."""

    islands: int
    seconds: int
    outages: tuple[Outage, ...] = ()
    every_s: int = 1
    """Seconds between two lines of metrics of an island."""
    tick_s: int = 2
    coordinator_away: tuple[int, int] = (0, 0)
    """From when and until when, in seconds."""
    fragment_parameters: tuple[int, ...] = ()
    lost_by_fragment: tuple[int, ...] = (2 * TOKENS_PER_STEP,) * FRAGMENTS
    """Tokens that each outage costs."""

    @functools.cached_property
    def names(self) -> list[str]:
        return [f"v{'5p' if n % 3 else '6e'}-{n:02}" for n in range(self.islands)]

    def lines(self) -> Iterator[Line]:
        """All lines in the order of time."""
        return Writing(self).lines()


class Writing:
    """Makes the lines of one run."""

    def __init__(self, run: MadeRun) -> None:
        self.run, self.random = run, random.Random(0)
        self.of: dict[str, list[Outage]] = {}
        for outage in run.outages:
            self.of.setdefault(run.names[outage.island], []).append(outage)
        self.incarnations = dict.fromkeys(run.names, 1)
        self.joined = dict.fromkeys(run.names, 0)
        self.versions = [0] * FRAGMENTS
        self.seqs = dict.fromkeys(run.names, 0)
        self.out: tuple[int, int, tuple[str, ...]] | None = None

    def lines(self) -> Iterator[Line]:
        total = self.run.seconds * self.run.islands * TOKENS_PER_STEP
        facts = {"fragment_parameters": self.run.fragment_parameters}
        yield self.tape(made(journal.Begun, total_tokens=total, **facts), 0.0)
        for name in self.run.names:
            yield from self.join(name, 0.0)
        gone, back = self.run.coordinator_away
        for second in range(1, self.run.seconds):
            if gone <= second < back:
                continue
            if second == back and back:
                yield from self.recover(second)
            yield from self.outages(second)
            if second % self.run.every_s == 0:
                yield from self.metrics(second)
            if second % LOOK_S == 0:
                yield self.machine(second)
            yield from self.merges(second)
        yield self.tape(records.Stopping(tokens=1), self.run.seconds)
        yield self.tape(records.Finished(), self.run.seconds + 1.0)

    def join(self, name: str, time: float) -> Iterator[Line]:
        incarnation = self.incarnations[name]
        self.joined[name], self.seqs[name] = int(time), 0
        who = {"island": name, "incarnation": incarnation}
        config = {"stands_for": f"{name[:3]}-16"}
        environment = {"device_kind": KINDS[name[:3]]}
        hello = made(journal.Hello, config=config, environment=environment, **who)
        yield self.tape(hello, time)
        joined = made(records.Joined, tokens_per_step=TOKENS_PER_STEP, **who)
        yield self.tape(joined, time + 0.1)

    def recover(self, second: int) -> Iterator[Line]:
        since = BEGIN + self.run.coordinator_away[0]
        yield self.tape(made(journal.Recovered, since=since), second)
        for name in self.run.names:
            resumed = records.Resumed(
                island=name, incarnation=self.incarnations[name], steps=second
            )
            yield self.tape(resumed, second + 0.5)
        self.out = None

    def outages(self, second: int) -> Iterator[Line]:
        for outage in self.run.outages:
            name = self.run.names[outage.island]
            common = {"island": name, "incarnation": self.incarnations[name]}
            if second == outage.at_s:
                yield self.tape(records.Absent(why="disconnected", **common), second)
            if second == outage.at_s + outage.seconds:
                lost = self.run.lost_by_fragment
                facts = {"steps": second, "lost_tokens_by_fragment": lost, **common}
                left = made(records.Left, reason="died", **facts)
                yield self.tape(left, second)
                self.incarnations[name] += 1
                yield from self.join(name, second)

    def away(self, name: str, second: int) -> bool:
        outages = self.of.get(name, ())
        return any(o.at_s <= second < o.at_s + o.seconds for o in outages)

    def trains(self, name: str, second: int) -> bool:
        here = second - self.joined[name] >= COMPILE_S
        return here and not self.away(name, second)

    def metrics(self, second: int) -> Iterator[Line]:
        for number, name in enumerate(self.run.names):
            if self.away(name, second):
                continue
            step = max(0, second - self.joined[name] - COMPILE_S)
            noise = self.random.gauss(0, 0.03)
            loss = 2.0 + 8.0 * math.exp(-second / 900) + 0.01 * number + noise
            yield (
                "metrics",
                {
                    "kind": "island",
                    "time": BEGIN + second + 0.2 + number / 200,
                    "island": name,
                    "phase": "training" if step else "compiling",
                    "step": step,
                    "loss": loss if step else None,
                    "eval_loss": None,
                    "learning_rate": 1e-3,
                    "median_step_seconds": 1.0 if step else 0.0,
                    "stalled_seconds": 0.01 * step,
                    "skipped_steps": 0,
                    "tokens_predicted": None,
                    "bytes_up": 1_000_000 * step,
                    "bytes_down": 900_000 * step,
                },
            )

    def machine(self, second: int) -> Line:
        return "metrics", {
            "kind": "machine",
            "time": BEGIN + second + 0.1,
            "memory_bytes": round(1e9 * (150 + 8 * math.sin(second / 60))),
            "memory_left_bytes": 260_000_000_000,
            "memory_whole_bytes": 448_000_000_000,
            "disk_free_bytes": 1_400_000_000_000 - 40_000_000 * second,
            "workers_memory_bytes": [],
        }

    def merges(self, second: int) -> Iterator[Line]:
        if second % self.run.tick_s:
            return
        tick = second // self.run.tick_s
        if self.out is not None:
            yield from self.merge(second)
        fragment = tick % FRAGMENTS
        asked = tuple(n for n in self.run.names if self.trains(n, second))
        if not asked:
            return
        ticked = records.Tick(tick=tick, fragment=fragment, asked=asked, final=False)
        yield self.tape(ticked, second + 0.6)
        for name in asked:
            yield self.fact(name, second + 0.7, "took", fragment, tick)
        self.out = (tick, fragment, asked)

    def merge(self, second: int) -> Iterator[Line]:
        assert self.out is not None
        tick, fragment, asked = self.out
        self.out = None
        names = [name for name in asked if self.trains(name, second)]
        base = Version(1, self.versions[fragment])
        version = Version(1, base.number + 1)
        self.versions[fragment] += 1
        steps = FRAGMENTS * self.run.tick_s
        common = {"tick": tick, "end": steps, "tokens": steps * TOKENS_PER_STEP}
        who = ({"island": n, "incarnation": self.incarnations[n]} for n in names)
        merged = made(
            records.Merged,
            fragment=fragment,
            version=version,
            tick=tick,
            contributions=tuple(
                made(Contribution, base=base, **one, **common) for one in who
            ),
            share=len(names) / self.run.islands,
            verdicts=dict.fromkeys(names, (tick, "merged", "")),
        )
        yield self.tape(merged, second + 0.4)
        yield (
            "metrics",
            {
                "kind": "merge",
                "time": BEGIN + second + 0.41,
                "fragment": fragment,
                "version": version.number,
                "islands": names,
                "tokens": len(names) * steps * TOKENS_PER_STEP,
                "share": 1.0,
                "norm": 0.5,
                "pairwise_cosine": 0.3 + 0.1 * math.sin(second / 300),
                "cosine_to_last": 0.1 + self.random.gauss(0, 0.02),
                "length_ratio": 1.0,
                "step_ratio": 0.4,
                "seconds": 0.05,
            },
        )
        for name in names:
            yield self.fact(name, second + 0.5, "adopted", fragment, -1)

    def fact(self, name: str, time: float, kind: Any, fragment: int, tick: int) -> Line:
        self.seqs[name] += 1
        record = Record(
            seq=self.seqs[name],
            kind=kind,
            step=int(time),
            fragment=fragment,
            tick=tick,
            version=Version(1, self.versions[fragment]),
        )
        fact = records.Fact(
            island=name, incarnation=self.incarnations[name], record=record
        )
        return self.tape(fact, time)

    def tape(self, record: records.Written, time: float) -> Line:
        return "tape", {**records.line(record), "time": BEGIN + time}


def write_run(run: MadeRun, workdir: Path, *, over: bool = True) -> Path:
    """Write the run's files into a folder; over: with a summary."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_config_json(read_config("mixed_12b"), workdir / run_files.CONFIG)
    RunFacts(run_id="7c41d2e8", begun_unix=BEGIN).write(workdir)
    with (
        (workdir / run_files.TAPE).open("w") as tape,
        (workdir / run_files.METRICS).open("w") as metrics,
    ):
        files = {"tape": tape, "metrics": metrics}
        for which, line in run.lines():
            files[which].write(json.dumps(line, separators=(",", ":")) + "\n")
    if over:
        tokens = run.seconds * run.islands * TOKENS_PER_STEP
        summary = {"phase": "done", "tokens": tokens, "total_tokens": tokens}
        summary |= {
            "progress": 1.0,
            "merges": run.seconds // run.tick_s,
            "tokens_lost": {"died": 2 * TOKENS_PER_STEP * len(run.outages)},
            "goodput": 0.97,
        }
        summary |= {"wall_seconds": float(run.seconds), "alerts": [], "versions": []}
        summary |= {
            "eval_loss": 2.01,
            "eval_bits_per_byte": 2.9,
            "islands": {name: {} for name in run.names},
        }
        write_json(summary, workdir / run_files.SUMMARY)
    return workdir
