"""The door under attack: one island's stolen key, and what it takes from the others.

Question: somebody has the key of island a, and uses it against the coordinator. Do the
merges of b and c go on as before, do their fetches, and do the coordinator's files and
threads stay bounded?

Each attack has a real coordinator (keys as `diloco certs` makes them, a time budget of
60 s, 1,024 open files as a shell gives them) and two honest islands (`synthetic.py`:
the product's network threads over made deltas, a merge every 0.6 s). Then comes its
control: a coordinator anew, and the same processes burn the CPU that the attack's took,
and dial nothing.

- *one byte*: four processes shake hands 110 times a second each, send one byte, and
  keep what is not closed. *hold*: one of them, with three bytes of a header.
- *garbage*: four processes send random bytes in the place of requests.
- *fetches*: 64 threads fetch whole anchors without pause.
- *lookahead*: island a, of two hosts, says hello with the largest lookahead that is let
  in, which is what an island of two hosts has. *slow*: with that, and in hello and
  reports a step takes it 9e8 seconds.

In *fetches*, *lookahead* and *slow* island a takes part, in the control honestly.
Rates are merges per second; a fetch is one of b or c; files, threads and memory are the
most that the coordinator had. Figures in brackets are the control's.

Command: `python -m benchmarks.hostile_door`. Cost: 20 minutes for each attack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import support
from door_attacks import ATTACKER, STEP_S, be_process
from machine import cpu_seconds, number_of
from pinned import PinnedRun, pinned_run

from diloco_jax import config as settings
from diloco_jax.wire.certificates import make_certificates

HONEST = ("b", "c")
TAKES_PART = ("fetches", "lookahead", "slow")
PROCESSES = {"one byte": 4, "hold": 1, "garbage": 4} | dict.fromkeys(TAKES_PART, 1)
SIDE, FRAGMENTS, CYCLE = 256, 4, 24
WARM_S, START_S = 10.0, 120.0
RATE_MIN, FETCH_MORE_S, FILES_MAX, THREADS_MAX = 0.95, 1.0, 1024, 300


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each phase")
    parser.add_argument("--attacks", nargs="*", default=list(PROCESSES))
    parser.add_argument("--process", nargs="*", help="used by itself")
    options = parser.parse_args()
    if options.process:
        return be_process(*options.process)
    if options.quick:
        options.seconds = min(options.seconds, 30.0)
    found = {}
    for attack in options.attacks:
        attacked = phase(attack, options.seconds)
        control = phase(attack, options.seconds, burn=attacked["cores"])
        found[attack] = {"attacked": attacked, "control": control}
        print(f"{attack}: {json.dumps(found[attack])}", file=sys.stderr, flush=True)
    tables = {"The attacks": [row(*each) for each in found.items()]}
    checks = [check for each in found.items() for check in bounds(*each)]
    raw = {"attacks": found}
    return support.deliver(options, "hostile_door", __doc__, tables, checks, raw)


def config_of(certificates: Path) -> settings.Config:
    """Return the config of a run that does not end by itself."""
    island = settings.IslandConfig(batch_size=1, step_seconds=STEP_S)
    return settings.Config(
        run=settings.RunConfig(
            model=settings.ModelConfig(
                factory=f"{Path(__file__).with_name('matrices.py')}:model",
                d_model=SIDE,
                num_layers=FRAGMENTS,
            ),
            data=settings.DataConfig(validation_fraction=0.005),
            outer=settings.OuterConfig(
                optimizer="nesterov", learning_rate=0.4, momentum=0.6
            ),
            sync=settings.SyncConfig(
                steps_per_cycle=CYCLE, fragments=FRAGMENTS, quorum=2
            ),
            sequence_length=16,
            total_tokens=10**9,
        ),
        islands={
            ATTACKER: dataclasses.replace(island, batch_size=2, hosts=2, mesh_fsdp=2),
            **dict.fromkeys(HONEST, island),
        },
        placement=settings.Placement(
            time_budget_s=60.0, evaluate_every_steps=0, certificates=str(certificates)
        ),
    )


def phase(attack: str, seconds: float, burn: float | None = None) -> dict[str, Any]:
    """Run a coordinator under an attack, or under its control; return the figures.

    burn: cores that each process of the control takes; None = the attack."""

    def within(process: str) -> list[str]:
        return ["prlimit", "--nofile=1024:"] if process == "coordinator" else []

    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        keys = Path(name) / "keys"
        make_certificates(keys, [], 1, islands=[ATTACKER, *HONEST])
        with pinned_run(config_of(keys), Path(name), within) as run:
            start(run, "honest", "islands", ",".join(HONEST), Path(name) / "fetches")
            if burn is not None and attack in TAKES_PART:
                start(run, "own", "islands", ATTACKER, Path(name) / "own")
            run.until(lambda: len(merges(run)) >= 10, START_S)
            time.sleep(WARM_S)
            return measured(run, attack, seconds, burn)


def measured(
    run: PinnedRun, attack: str, seconds: float, burn: float | None
) -> dict[str, Any]:
    """Attack a run, and return the figures."""
    began, pid = time.time(), run.pids()["coordinator"]
    names = [f"attack-{number}" for number in range(PROCESSES[attack])]
    for number, name in enumerate(names):
        how = attack if burn is None else "burn"
        start(run, name, how, number if burn is None else burn, seconds)
    pids = [run.pids()[name] for name in names]
    samples: list[tuple[float, int, int, int]] = []
    cores, ended = 0.0, ""

    def over() -> bool:
        nonlocal cores
        passed = time.time() - began
        with contextlib.suppress(OSError, StopIteration, IndexError, ValueError):
            status = Path(f"/proc/{pid}/status")
            own = number_of(status, "Threads:"), number_of(status, "RssAnon:") // 1000
            files = len(os.listdir(f"/proc/{pid}/fd"))
            samples.append((round(passed, 1), files, *own))
            cores = sum(map(cpu_seconds, pids)) / len(pids) / passed
        return passed >= seconds

    try:
        run.until(over, seconds + START_S)
    except support.RunError as error:
        ended = str(error)[-2000:]
    inside = [at for at in merges(run) if began <= at <= began + seconds]
    lines = (run.workdir.parent / "fetches").read_text().splitlines()
    took = [took_s for at, took_s in map(json.loads, lines) if at >= began]
    gaps = zip([began, *inside], [*inside, began + seconds], strict=True)
    return {
        "merges_per_s": len(inside) / seconds,
        "gap_s": max(later - earlier for earlier, later in gaps),
        "fetches": len(took),
        "fetch_s": max(took, default=seconds),
        "fetch_median_s": statistics.median(took or [seconds]),
        "cores": cores,
        "files": max(sample[1] for sample in samples),
        "threads": max(sample[2] for sample in samples),
        "mb": max(sample[3] for sample in samples),
        "seconds_files_threads_mb": samples[:: max(1, len(samples) // 30)],
        "said": [run.log_of(name)[-200:] for name in names],
        "ended": ended,
    }


def merges(run: PinnedRun) -> list[float]:
    """Return when the merges were, in unix seconds."""
    return [record["time"] for record in run.tape() if record["kind"] == "merged"]


def start(run: PinnedRun, name: str, how: str, *words: object) -> None:
    """Start a process of this benchmark beside the run."""
    own = ["-m", "benchmarks.hostile_door", "--process", how]
    told = [str(run.workdir), run.address, *map(str, words)]
    run.start(name, [sys.executable, *own, *told])


def bounds(attack: str, found: dict[str, Any]) -> list[support.Check]:
    """Return the bounds of one attack."""
    attacked, control = found["attacked"], found["control"]
    rate = attacked["merges_per_s"] / control["merges_per_s"]
    more_s = attacked["fetch_s"] - control["fetch_s"]
    ended = [attacked["ended"]] * bool(attacked["ended"])
    return [
        support.at_least(f"{attack}: merges, of the control's", rate, RATE_MIN),
        support.at_most(f"{attack}: longest fetch, s beyond", more_s, FETCH_MORE_S),
        support.at_most(f"{attack}: files", attacked["files"], FILES_MAX, "g"),
        support.at_most(f"{attack}: threads", attacked["threads"], THREADS_MAX, "g"),
        support.none_of(f"{attack}: ends", ended),
    ]


def row(attack: str, found: dict[str, Any]) -> dict[str, str]:
    """Return the row of one attack, with that of the control in brackets."""
    columns = {
        "merges a second": ("merges_per_s", ".3f"),
        "longest gap, s": ("gap_s", ".2f"),
        "longest fetch, s": ("fetch_s", ".3f"),
        "median": ("fetch_median_s", ".4f"),
        "files": ("files", "d"),
        "threads": ("threads", "d"),
        "memory, MB": ("mb", "d"),
        "cores of each attacker": ("cores", ".2f"),
    }
    attacked, control = found["attacked"], found["control"]
    return {"attack": attack} | {
        column: f"{attacked[key]:{form}} ({control[key]:{form}})"
        for column, (key, form) in columns.items()
    }


if __name__ == "__main__":
    support.script(main)
