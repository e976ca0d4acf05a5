"""A coordinator that loses its life, a worker, or its disk again and again.

Question: three islands train while what merges for them is struck at random instants.
Does it come back each time? Does an island notice? Are the books exact?

- *kills*: the coordinator is killed (SIGKILL) 50 times: while it merges, writes or
  waits, and every second time 1 to 6 s after the kill before, while it starts or
  recovers.
- *unit*: a lead and two workers at addresses of their own, over TLS; one of the three,
  drawn at random, is killed 20 times in the same way, after 3 to 9 s. Whatever ends
  with it is started again.
- *replaced*: ten times the coordinator is killed and its folder is gone. Another one
  begins at its address, and gathers the islands' anchors; after 12 merges of
  its own it is the next.
- Halfway through *kills* and *unit* one island is killed, and comes back without its
  disk; a quarter through *unit*, worker 0 does.

*Gap* is the longest time between two steps of an island that nobody struck, beyond the
longest time by which a thread that only sleeps overslept, over the median step of
0.4 s, which is emulated. *Versions* are those of the coordinator's own merges
and recoveries and those that islands adopted, over all its lives; *granted twice* are
positions of the data in two grants of *replaced*, where no island dies. *Replay*
repeats each life of *kills* and *unit*, whose log is whole, and the first of
*replaced*: the tape of a term that islands' anchors began does not hold them.

Prediction: no gap above 2 medians; books, versions and replay exact.

Command: `python -m benchmarks.lives`. Cost: a quarter of an hour on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import soak
import support
import tape_checks
from large_run import GAP_MEDIANS_MAX, replay
from machine import Stall

from diloco_jax import run_files
from diloco_jax.cluster.cluster import free_port
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import Config, IslandConfig
from diloco_jax.faults import COORDINATOR
from diloco_jax.files import write_json
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.workdir import holds_run

ISLANDS = ("a", "b", "c")
WORKERS = 2
WIPED = "c"
"""The island whose disk is lost."""
STEP_SECONDS = 0.4
TIMES = {"kills": 50, "unit": 20, "replaced": 10}
GAPS_S = {"kills": (1.0, 6.0), "unit": (3.0, 9.0)}
MERGES_MIN = 12
RECOVERY_S, LIFE_S = 5.0, 25.0
"""Seconds of training for each strike, and for each life of *replaced*."""
TAIL_S = 30.0
"""Seconds of training after the last strike."""
START_S, END_S = 120.0, 300.0
POLL_S = 0.25


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--parts", nargs="*", choices=TIMES, default=list(TIMES))
    options = parser.parse_args()
    rows, checks, raw = [], [], {}
    for part in options.parts:
        times = 3 if options.quick else TIMES[part]
        with tempfile.TemporaryDirectory(prefix="diloco-") as name:
            lives = Lives(part, times, Path(name))
            with lives, Stall() as stall:
                lives.play()
            found = list(checks_of(lives, stall.longest_s))
            rows.append(row(lives))
            summary = lives.summary()
        checks += [dataclasses.replace(c, what=f"{part}: {c.what}") for c in found]
        raw[part] = {**rows[-1], "struck": lives.struck, "summary": summary}
        print(f"{part}: {rows[-1]}", file=sys.stderr, flush=True)
    tables = {"The runs": rows}
    return support.deliver(options, "lives", __doc__, tables, checks, raw)


class Lives:
    """The processes of one part; use it as a context, which ends them."""

    def __init__(self, part: str, times: int, folder: Path) -> None:
        self.part, self.times, self.folder = part, times, folder
        self.workdir = folder / "run"
        self.random = random.Random(0)
        self.gaps = [
            self.random.uniform(*GAPS_S.get(part, (0, 0))) for _ in range(times)
        ]
        self.wipes = {times // 2: WIPED}
        if part == "unit":
            self.wipes[times // 4] = "worker-0"
        seconds = sum(self.gaps) + times * (RECOVERY_S if part in GAPS_S else LIFE_S)
        self.config = config_of(seconds + TAIL_S, folder, part == "unit")
        self.struck: list[tuple[float, str]] = []
        """Unix seconds, and who."""
        self.earlier: list[Path] = []
        """Folders of coordinators that were replaced."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lives = dict.fromkeys(ISLANDS, 0)
        address = self.config.placement.bind
        self._commands = {
            **{f"worker-{n}": ["worker", "--index", f"{n}"] for n in self.workers()},
            COORDINATOR: [COORDINATOR, "--init"],
            **{n: ["island", "--name", n, "--coordinator", address] for n in ISLANDS},
        }
        write_json(dataclasses.asdict(self.config), folder / run_files.CONFIG)

    def workers(self) -> range:
        """Return the indices of workers."""
        return range(len(self.config.placement.worker_addresses))

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def play(self) -> None:
        """Start all, strike as often as is asked for, and wait for the end."""
        self._until(lambda: self._merges() >= MERGES_MIN, START_S)
        for number, gap in enumerate(self.gaps):
            if self.part == "replaced":
                self._replace()
                continue
            if name := self.wipes.get(number):
                self._kill(name)
                shutil.rmtree(self.folder / name)
            before = self._recovered()
            self._kill(self.random.choice([COORDINATOR, *self._names_of_workers()]))
            if number % 2:
                self._until(lambda before=before: self._recovered() > before, START_S)
            until = time.monotonic() + gap
            self._until(lambda until=until: time.monotonic() >= until, gap + 1)
        self._until(self._over, END_S)

    def tapes(self) -> list[list[dict[str, Any]]]:
        """Return the tape of each folder, in order."""
        return [list(read_tape(f / run_files.TAPE)) for f in self._folders()]

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run."""
        found: dict[str, Any] = json.loads(
            (self.workdir / run_files.SUMMARY).read_bytes()
        )
        return found

    def replayed(self) -> list[str]:
        """Return what is wrong with the replay of the first folder."""
        first = self._folders()[0]
        return replay(first, until=kinds_of(first)["merged"] if self.earlier else None)

    def run(self) -> support.Run:
        """Return the last folder as a run."""
        return support.Run(
            config=self.config,
            workdir=self.workdir,
            summary=self.summary(),
            tape=self.tapes()[-1],
            metrics=list(read_metrics(self.workdir)),
            cpu={},
        )

    def _folders(self) -> list[Path]:
        return [*self.earlier, self.workdir]

    def _names_of_workers(self) -> list[str]:
        return [name for name in self._commands if name.startswith("worker-")]

    def _merges(self) -> int:
        return kinds_of(self.workdir)["merged"]

    def _recovered(self) -> int:
        return kinds_of(self.workdir)["recovered"]

    def _over(self) -> bool:
        return all(process.poll() == 0 for process in self._running.values())

    def _kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()
        self.struck.append((time.time(), name))

    def _replace(self) -> None:
        self._kill(COORDINATOR)
        self.earlier.append(self.folder / f"before-{len(self.earlier)}")
        self.workdir.rename(self.earlier[-1])
        self._commands[COORDINATOR] = [COORDINATOR]
        self._until(lambda: self._merges() >= MERGES_MIN, START_S)

    def _until(self, reached: Any, timeout_s: float) -> None:
        """Wait for it, and start whatever has ended with an error or was killed."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            for name in self._commands:
                running = self._running.get(name)
                if running is None or running.poll():
                    if running is not None and name in ISLANDS and name != WIPED:
                        raise support.RunError(
                            f"island {name} ended: {self._log(name)}"
                        )
                    self._start(name)
            if time.monotonic() > deadline:
                raise support.RunError(
                    f"not within {timeout_s:g} s:\n{self._log(COORDINATOR)}"
                )
            time.sleep(POLL_S)

    def _start(self, name: str) -> None:
        command, *options = self._commands[name]
        own = self.workdir if name == COORDINATOR else self.folder / name
        path = str(self.folder / run_files.CONFIG)
        words = [command, path, "--workdir", str(own), *options]
        if holds_run(self.workdir):
            words = [word for word in words if word != "--init"]
        if name in ISLANDS:
            self._lives[name] += 1
            words += ["--incarnation", str(self._lives[name])]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = start_child([*support.DILOCO, *words], {}, log, log)

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]


def config_of(seconds: float, folder: Path, workers: bool) -> Config:
    """Return islands that train for about that long, with keys for all."""
    config = soak.soak_config(seconds * soak.STEP_SECONDS / STEP_SECONDS)
    island = IslandConfig(batch_size=soak.BATCH, step_seconds=STEP_SECONDS)
    total = round(config.run.total_tokens * len(ISLANDS) / len(config.islands))
    placement = dataclasses.replace(
        config.placement,
        workers=WORKERS if workers else 1,
        outage_budget_s=120.0,
        snapshot_every_s=10.0,
        time_budget_s=10.0,
        evaluate_every_steps=0,
    )
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, total_tokens=total),
        islands=dict.fromkeys(ISLANDS, island),
        placement=placement,
    )
    return at_addresses(config, folder / "certificates")


def at_addresses(config: Config, certificates: Path) -> Config:
    """Return the config with ports and keys for all, its workers included."""
    workers = config.placement.workers if config.placement.workers > 1 else 0
    make_certificates(
        certificates, [], 1, islands=list(config.islands), workers=workers
    )
    ports = [f"127.0.0.1:{free_port()}" for _ in range(workers + 1)]
    placement = dataclasses.replace(
        config.placement,
        bind=ports[0],
        worker_addresses=tuple(ports[1:]),
        certificates=str(certificates),
    )
    return dataclasses.replace(config, placement=placement).validate()


def kinds_of(workdir: Path) -> Counter[str]:
    """Count the lines of the tape by kind."""
    with contextlib.suppress(Exception):  # The last line may be half written.
        tape = read_tape(workdir / run_files.TAPE)
        return Counter(record["kind"] for record in tape)
    return Counter()


def checks_of(lives: Lives, stall_s: float) -> Iterator[support.Check]:
    """Check one part against the promises."""
    summary, tapes = lives.summary(), lives.tapes()
    merges = [r for tape in tapes for r in tape if r["kind"] == "merged"]
    wanted = lives.times + (0 if lives.earlier else len(lives.wipes))
    yield support.at_least("strikes", len(lives.struck), wanted, "d")
    for name, island in summary["islands"].items():
        if name == WIPED and lives.part != "replaced":
            continue
        gap = island["max_step_gap_seconds"] - stall_s
        medians = gap / island["median_step_seconds"]
        yield support.at_most(f"{name}: gap", medians, GAP_MEDIANS_MAX, ".2f")
    yield from soak.book_checks(lives.run()) if not lives.earlier else books(lives)
    yield support.none_of("steps merged twice", tape_checks.interval_problems(merges))
    yield support.none_of(
        "tokens lost with versions", tape_checks.lost_merges_problems(tapes[-1])
    )
    yield support.none_of("adopted versions that go back", backwards(tapes))
    yield support.none_of("replay", lives.replayed())


def books(lives: Lives) -> Iterator[support.Check]:
    """Check the books of the last term, and the grants of all."""
    run, tapes = lives.run(), lives.tapes()
    sizes = support.fragment_sizes(run.config)
    ledger = tape_checks.ledger_problems(run.summary, run.tape, sizes)
    yield support.none_of("ledger", ledger)
    versions = [problem for t in tapes for problem in tape_checks.version_problems(t)]
    yield support.none_of("versions", versions)
    spans = sorted(
        (r["start"], r["stop"]) for t in tapes for r in t if r["kind"] == "granted"
    )
    twice = [f"{a}, {b}" for a, b in itertools.pairwise(spans) if a[1] > b[0]]
    yield support.none_of("granted twice", twice)
    terms = [r["term"] for tape in tapes for r in tape[:1] if r["kind"] == "term"]
    named = list(range(2, 2 + len(lives.earlier)))
    yield support.none_of("terms", [] if terms == named else [f"{terms}"])


def backwards(tapes: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return the adoptions of an island's life that went back."""
    wrong: list[str] = []
    seen: dict[tuple[str, int, int], list[int]] = {}
    for record in itertools.chain.from_iterable(tapes):
        if record["kind"] == "island" and record["record"]["kind"] == "adopted":
            told = record["record"]
            key = record["island"], record["incarnation"], told["fragment"]
            before = seen.get(key, [0, 0])
            # What was not acknowledged is told once more.
            if told["version"] < before:
                wrong.append(f"{key}: {told['version']} after {before}")
            seen[key] = max(told["version"], before)
    return wrong


def row(lives: Lives) -> dict[str, Any]:
    """Return the figures of one part."""
    tapes, summary = lives.tapes(), lives.summary()
    kinds = [record["kind"] for tape in tapes for record in tape]
    silences = [s for tape in tapes for s in tape_checks.outage_seconds(tape)]
    silences += [b[0]["time"] - a[-1]["time"] for a, b in itertools.pairwise(tapes)]
    return {
        "part": lives.part,
        "strikes": len(lives.struck),
        "starts again": kinds.count("recovered") + len(lives.earlier),
        "merges": kinds.count("merged"),
        "longest silence of the tape, s": f"{max(silences, default=0.0):.1f}",
        "lost tokens": sum(summary["tokens_lost"].values()),
        "carried": summary["tokens_carried"],
        "goodput": f"{summary['goodput']:.3f}",
    }


if __name__ == "__main__":
    support.script(main)
