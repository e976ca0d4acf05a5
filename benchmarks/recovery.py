"""From the start of an island to its first step and its first merge.

Question: how long does an island take to train and to be merged, when it starts for
the first time and when it comes back after SIGKILL? Where do the seconds go? Two
islands train on a core each; one is killed, and started again at once. H = P = 24.

*Start* is from the process's start until it is in the run: interpreter, imports, data,
hello. *Compile* is until everything has run once; *compiled* counts programs that XLA
compiled in the process's life, *read* those that it read from the cache. A program that
is read is traced and lowered first, which is most of *compile* when the cache is warm.
*Fetch* is that of all fragments, beside it; *restore* is what follows until the first
step begins: moments and residuals of the checkpoint. *Beyond compile* is what a start
takes above it. *Steps to merge* are the island's own steps in the first delta of its
that was merged; a cycle has 24.

Prediction: a returned island compiles nothing and is merged after one to five steps,
since a fragment is due at every step; 3 s beyond compile, of which imports take 2.

*Imports* are CPU seconds of a process: `import diloco_jax` over `import jax`, and
`diloco --help`.

Command: `python -m benchmarks.recovery`. Cost: about 4 minutes on two cores.

With `--behind-link`, as root: an island of 85 M parameters comes back on an empty disk,
with the programs of its first life in the run's folder, over a link on which its fetch
takes 20 s. Is it at its first step 2 s after the longer of fetch and *compile*, from
its hello on, and does it compile nothing, takes and adoptions included?
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import support
import tape_checks
from links import HUB_ADDRESS, links
from pinned import PinnedRun, cores, pinned_run
from sizes import MODELS

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.coordinator.roster import Roster
from diloco_jax.models.presets import preset
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire.certificates import make_certificates

BEYOND_MAX_S = 3.0
FETCH_S, AFTER_S = 20.0, 2.0
"""Seconds of a fetch behind the link; seconds in which the first step may follow."""
IMPORT_MAX_S, HELP_MAX_S = 0.3, 0.5
CYCLE = 24
NAMES = ("a", "b")
SEQUENCE = 128
TIMEOUT_S = 900.0
STARTS = 5
CHECKPOINT = r"checkpoint \d+, after step"
LINES = {
    "joined": r"island a, incarnation {}: in run",
    "compiled": r"compiled in ([\d.]+) s \(.*\), fetched .* in ([\d.]+) s",
    "begins": r"island a begins to train",
}


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--behind-link", action="store_true")
    options = parser.parse_args()
    if options.behind_link:
        return behind_link(options)
    repeats = 1 if options.quick else options.repeats
    size = "3m"
    lives = [life for _ in range(repeats) for life in measure(size)]
    imports = start_seconds(1 if options.quick else STARTS)
    back = [life for life in lives if life["incarnation"] == 2]
    middle = {
        name: statistics.median(life[name] for life in back)
        for name in ("beyond_s", "steps_to_merge")
    }
    checks = [
        support.at_most(
            "a rejoin: s beyond compile", middle["beyond_s"], BEYOND_MAX_S, ".2f"
        ),
        support.at_most(
            "a rejoin: programs compiled",
            max(life["compiled"] for life in back),
            0,
            "d",
        ),
        support.at_most(
            "a rejoin: own steps to its first merge",
            max(life["steps_to_merge"] for life in back),
            CYCLE,
            ".0f",
        ),
        support.at_most(
            "import diloco_jax over jax, CPU s", imports["ours"], IMPORT_MAX_S, ".2f"
        ),
        support.at_most("diloco --help, CPU s", imports["help"], HELP_MAX_S, ".2f"),
    ]
    return support.deliver(
        options,
        "recovery",
        __doc__,
        {"Lives": [row(life) for life in lives]},
        checks,
        {"lives": lives, "imports": imports},
    )


def row(life: dict[str, Any]) -> dict[str, Any]:
    """Return a life as text."""
    seconds = ("start_s", "compile_s", "fetch_s", "restore_s", "beyond_s", "merged_s")
    return {
        "incarnation": life["incarnation"],
        "compiled": life["compiled"],
        "read": life["read"],
        **{
            name.removesuffix("_s").replace("merged", "first merge, after the start")
            + ", s": f"{life[name]:.2f}"
            for name in seconds
        },
        "steps to merge": f"{life['steps_to_merge']:.0f}",
    }


def measure(size: str) -> list[dict[str, Any]]:
    """Return both lives of island a."""
    config = config_of(MODELS[size], NAMES, checkpoint_every_s=2.0)
    with (
        tempfile.TemporaryDirectory(prefix="diloco-") as folder,
        pinned_run(config, Path(folder)) as run,
    ):
        first, second = cores()[0], cores()[-1]
        run.island("b", second)
        lives = []
        for incarnation in (1, 2):
            print(f"{time.strftime('%H:%M:%S')} life {incarnation}", file=sys.stderr)
            began = time.time()
            run.island("a", first, incarnation)
            run.until(lambda of=incarnation: first_merge(run, of), TIMEOUT_S)
            lives.append(life_of(run, incarnation, began))
            if incarnation == 1:
                run.until(lambda: re.search(CHECKPOINT, run.log_of("a")), TIMEOUT_S)
                run.kill("a")
        run.terminate("a")
        lives[1] |= programs(run.log_of("a"))
        lives[0] |= {"compiled": lives[0].pop("compiled_until_ready"), "read": 0}
        lives[1].pop("compiled_until_ready")
    return lives


def behind_link(options: argparse.Namespace) -> int:
    """Have an island come back behind a link; return 1 if a bound is broken."""
    model = dataclasses.replace(preset("100m"), num_kv_heads=12, mlp_dim=2048)
    with (
        tempfile.TemporaryDirectory(prefix="diloco-") as name,
        links(["a"]) as made,
    ):
        folder = Path(name)
        make_certificates(folder / "certs", [HUB_ADDRESS], 1, islands=["a"])
        config = config_of(
            model,
            ("a",),
            bind=f"{HUB_ADDRESS}:0",
            certificates=str(folder / "certs"),
            checkpoints=str(folder / "shared"),
            checkpoint_every_s=0.0,
        )
        parameters = sum(support.fragment_sizes(config))
        lives = []
        with pinned_run(config, folder, within=made.within) as run:
            for incarnation in (1, 2):
                if incarnation == 2:
                    shutil.rmtree(folder / "a", ignore_errors=True)
                    made.limit(8 * 4 * parameters / FETCH_S)
                began = time.time()
                run.island("a", None, incarnation)
                run.until(lambda of=incarnation: has_all(run, of), TIMEOUT_S)
                lives.append(life_of(run, incarnation, began))
                run.terminate("a")
                lives[-1] |= programs(run.log_of("a"))
                lives[-1]["dispatch_s"] = first_step(run) - began - lives[-1]["start_s"]
    back = lives[1]
    longer = max(back["fetch_s"], back["compile_s"])
    checks = [
        support.at_most(
            f"from hello to the first step, s; the longer of both is {longer:.1f}",
            back["dispatch_s"],
            longer + AFTER_S,
            ".2f",
        ),
        support.at_most(
            "programs compiled by the second life", back["compiled"], 0, "d"
        ),
    ]
    rows = [
        {**row(life), "hello to first step, s": f"{life['dispatch_s']:.2f}"}
        for life in lives
    ]
    raw = {"lives": lives, "parameters": parameters}
    return support.deliver(options, "returning", __doc__, {"Lives": rows}, checks, raw)


def has_all(run: PinnedRun, incarnation: int) -> bool:
    """Tell if a life has adopted a merge, and has a delta in one."""
    adopted = any(
        record["kind"] == "island"
        and record["incarnation"] == incarnation
        and record["record"]["kind"] == "adopted"
        for record in run.tape()
    )
    return bool(adopted and first_merge(run, incarnation))


def first_step(run: PinnedRun) -> float:
    """Return the time at which the newest life dispatched its first step."""
    members = Roster(run.workdir / run_files.ROSTER).members
    return members["a"].current.first_step_unix


def first_merge(run: PinnedRun, incarnation: int) -> float:
    """Return the time of the first merge of a delta of this life; 0 if none was."""
    for record in read_tape(run.workdir / run_files.TAPE):
        if record["kind"] == "merged" and any(
            (part["island"], part["incarnation"]) == ("a", incarnation)
            for part in record["contributions"]
        ):
            return float(record["time"])
    return 0.0


def config_of(model: ModelConfig, names: Sequence[str], **placement: Any) -> Config:
    """Return a run with more tokens than it needs: it is ended when all is measured."""
    return Config(
        run=RunConfig(
            model=model,
            data=DataConfig(validation_fraction=0.005),
            sync=SyncConfig(steps_per_cycle=CYCLE, fragments=CYCLE, quorum=1),
            sequence_length=SEQUENCE,
            total_tokens=10_000 * SEQUENCE,
        ),
        islands=dict.fromkeys(names, IslandConfig(batch_size=1)),
        placement=Placement(evaluate_every_steps=0, time_budget_s=300.0, **placement),
    ).validate()


def life_of(run: PinnedRun, incarnation: int, began: float) -> dict[str, Any]:
    """Return the seconds of a life's parts, by its log."""
    log = run.log_of("a").splitlines()
    at: dict[str, tuple[float, re.Match[str]]] = {}
    for name, pattern in LINES.items():
        for line in log:  # The last one: earlier lives are in the same log.
            if found := re.search(pattern.format(incarnation), line):
                stamp = datetime.datetime.fromisoformat(line.split()[0])
                at[name] = stamp.timestamp(), found
    compile_s, fetch_s = map(float, at["compiled"][1].groups())
    joined, ready = at["joined"][0], at["begins"][0]
    counted = programs(at["compiled"][1].string)
    return {
        "incarnation": incarnation,
        "start_s": joined - began,
        "compile_s": compile_s,
        "fetch_s": fetch_s,
        "restore_s": ready - at["compiled"][0],
        "beyond_s": ready - began - compile_s,
        "merged_s": first_merge(run, incarnation) - began,
        "steps_to_merge": tape_checks.steps_to_first_merge(
            list(read_tape(run.workdir / run_files.TAPE)), "a", incarnation
        ),
        "compiled_until_ready": counted["compiled"],
    }


def programs(log: str) -> dict[str, int]:
    """Return the last count of programs in a log."""
    found = re.findall(r"(\d+) programs compiled, (\d+) read", log)
    compiled, read = map(int, found[-1])
    return {"compiled": compiled, "read": read}


def start_seconds(count: int) -> dict[str, float]:
    """Return CPU seconds, the least of several."""
    what = {
        "jax": ["-c", "import jax"],
        "both": ["-c", "import jax, diloco_jax"],
        "help": ["-m", "diloco_jax.cli", "--help"],
    }
    best: dict[str, float] = {}
    for _ in range(count):
        for name, arguments in what.items():
            before = children_s()
            subprocess.run(
                [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL
            )
            best[name] = min(best.get(name, float("inf")), children_s() - before)
    return {"ours": best["both"] - best["jax"], **best}


def children_s() -> float:
    """Return CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    support.script(main)
