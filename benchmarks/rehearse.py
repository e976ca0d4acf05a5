"""Rehearsals of a toy fleet: clean ones, and eight with one deviation planted in each.

Question: does `diloco rehearse` find what differs from the plan, does it blame the
right cause, and is it silent where nothing differs? Is `diloco plan` right with what it
measured?

The fleet is three islands of a tiny model, whose steps are emulated ones of 0.2 s. It
is planned with links of 8 Mbit/s, a disk of 20 MB/s and 12 GB of memory. One at a time
are planted: steps four times as long (`slow4`), memory bounded by `ulimit -d`, links of
3.2 Mbit/s, links that damage bytes, links 0.25 s longer each way, other parameters on
one island (`scale1.5`), a disk whose every `fsync` waits for its bytes at 4 MB/s (a
library before libc's own, built by `cc`), and batches that come 0.3 s late
(`starve0.3`).

Prediction: each is found within three minutes, on the islands that have it, with the
one cause; clean runs have no deviation.

Command: `python benchmarks/rehearse.py [--clean 20] [--only CAUSE ...]`. Cost: about
two minutes of two cores a rehearsal.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import support
from rich.console import Console

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.files import write_json
from diloco_jax.launch import rehearse
from diloco_jax.launch.command import RehearseOptions
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import fragments_of, plan_run

MOST_S = 180.0
NAME = "rehearse"
STEP_S = 0.2
LINK_GBIT_PER_S = 0.008
DISK_BYTES_PER_S = 20e6
SLOW_LINK_BYTES_PER_S = 4e5
SLOW_DISK_BYTES_PER_S = 4e6
BOUND_BYTES = 6e9
MEMORY_BYTES = 12e9
"""Bytes of memory that the plan goes by: less than this machine must have."""
WITHIN = 0.1
"""How far the plan may be off with what was measured."""
SLOW_FSYNC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <time.h>
static long long before[65536];
static int late(const char *name, int fd) {
  int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
  struct stat found;
  if (fd >= 0 && fd < 65536 && !fstat(fd, &found) && S_ISREG(found.st_mode)) {
    long long more = found.st_size - before[fd];
    before[fd] = found.st_size;
    if (more > 0) {
      double s = more / RATE;
      struct timespec wait = {(time_t)s, (long)((s - (long long)s) * 1e9)};
      nanosleep(&wait, 0);
    }
  }
  return real(fd);
}
int fsync(int fd) { return late("fsync", fd); }
int fdatasync(int fd) { return late("fdatasync", fd); }
"""


@dataclasses.dataclass(frozen=True)
class Planted:
    """One deviation: its cause in the findings, and the islands that have it."""

    cause: str
    islands: tuple[str, ...]
    faults: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ("run",)


ALL = ("a", "b", "c")
FAR = ("--strikes", "a@3000s:stop1")
"""A strike that never comes: without one, random ones are drawn."""
CORRUPT = tuple(f"a@{at}s:corrupt1.5" for at in range(1, 40, 3))
PLANTED = {
    "throttled step": Planted("step", ("a",), ("a@1:slow4",)),
    "bounded memory": Planted("memory", ALL),
    "slow link": Planted(
        "link",
        ALL,
        launcher=("chaos", *FAR, "--link-bytes-per-s", f"{SLOW_LINK_BYTES_PER_S:.0f}"),
    ),
    "lossy link": Planted("loss", ("a",), launcher=("chaos", "--strikes", *CORRUPT)),
    "high latency": Planted(
        "latency",
        ALL,
        launcher=("chaos", *FAR, "--link-delay-s", "0.25"),
    ),
    "wrong step": Planted("arithmetic", ("c",), ("c@0:scale1.5",)),
    "slow disk": Planted("disk", ("",)),
    "slow data": Planted("data", ("b",), ("b@1:starve0.3",)),
}


def config() -> Config:
    """The toy fleet."""
    model = ModelConfig(
        d_model=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32, mlp_dim=256
    )
    sync = SyncConfig(steps_per_cycle=16, fragments=4, overlap_steps=2, quorum=2)
    sync = dataclasses.replace(sync, codec_up="f32", codec_down="f32")
    sizes = {"a": 4, "b": 2, "c": 4}
    return Config(
        run=RunConfig(
            model=model,
            inner=InnerConfig(learning_rate=2e-3),
            sync=sync,
            sequence_length=64,
            total_tokens=10_000_000,
        ),
        islands={
            name: IslandConfig(topology="v6e:1x1", step_seconds=STEP_S, batch_size=size)
            for name, size in sizes.items()
        },
    )


def assumptions() -> dict[str, Any]:
    """What the fleet's plan goes by, as `diloco plan --measured` reads it."""
    origin = {"origin": "planned, benchmarks/rehearse.py"}
    return {
        "disk_write_bytes_per_s": {"value": DISK_BYTES_PER_S, **origin},
        "device_memory_bytes": {n: {"value": MEMORY_BYTES, **origin} for n in ALL},
    }


@contextmanager
def world(name: str, folder: Path) -> Iterator[None]:
    """Plant what no option does: less memory, or a slow disk."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    preloaded = os.environ.get("LD_PRELOAD")
    try:
        if name == "bounded memory":
            resource.setrlimit(resource.RLIMIT_DATA, (int(BOUND_BYTES), limits[1]))
        if name == "slow disk":
            source, library = folder / "slow.c", folder / "slow.so"
            rate = f"-DRATE={SLOW_DISK_BYTES_PER_S}"
            source.write_text(SLOW_FSYNC)
            cc = ["cc", "-shared", "-fPIC", rate, "-o", str(library), str(source)]
            subprocess.run([*cc, "-ldl"], check=True)
            os.environ["LD_PRELOAD"] = str(library)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        os.environ.pop("LD_PRELOAD", None)
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded


def rehearsed(name: str, folder: Path, fleet: Config) -> dict[str, Any]:
    """Rehearse with a deviation, or none for an empty name; return what was told, the
    seconds, and the plan's figures with what was measured."""
    planted, path = PLANTED.get(name, Planted("", ())), folder / "fleet.py"
    measured = folder / "assumed.json"
    write_json(assumptions(), measured)
    own = fleet.replace("workdir", str(folder / "rehearsal"))
    if planted.faults:
        own = own.replace("faults", planted.faults)
    options = RehearseOptions(
        max_minutes=MOST_S / 60,
        measured=str(measured),
        link_gbit_per_s=LINK_GBIT_PER_S,
        json=True,
    )
    began, out = time.monotonic(), io.StringIO()
    console = Console(stderr=True, markup=False)
    with world(name, folder), redirect_stdout(out):
        code = rehearse.run(own, str(path), options, console, launcher=planted.launcher)
    told: dict[str, Any] = json.loads(out.getvalue())
    deviates = sorted(
        {(r["cause"], r["island"]) for r in told["findings"] if r["deviates"]}
    )
    return {
        "planted": name,
        "code": code,
        "over": told["over"],
        "deviates": deviates,
        "right": deviates == sorted((planted.cause, i) for i in planted.islands),
        "seconds": time.monotonic() - began,
        "not_tried": sum(r["measured"] == "not tried" for r in told["findings"]),
        "plan": planned(fleet, told["measured"]),
        "measured": told["measured"],
    }


def planned(fleet: Config, measured: dict[str, Any]) -> dict[str, float | None]:
    """Return what the plan says with these measured values, and what was planted."""
    import msgspec

    from diloco_jax.hardware.machines import Measurements

    found = msgspec.convert(measured, Measurements)
    plan = plan_run(
        "toy",
        fleet,
        fragments_of(fleet),
        Assumptions(link_gbit_per_s=LINK_GBIT_PER_S),
        measured=found,
    )
    steps = {n: i.expected_step_seconds for n, i in plan.islands.items()}
    link, disk = found.link_down_gbit_per_s, found.disk_write_bytes_per_s
    return {
        **{f"step {name}": seconds for name, seconds in steps.items()},
        "link": link.value if link else None,
        "disk": disk.value if disk else None,
    }


TRUTH = {
    "throttled step": ("step a", 4 * STEP_S),
    "slow link": ("link", 8 * SLOW_LINK_BYTES_PER_S / 1e9),
    "slow disk": ("disk", SLOW_DISK_BYTES_PER_S),
    "slow data": ("step b", STEP_S + 0.3),
}
"""What the plan must say with what was measured, within `WITHIN`. Memory of a CPU is
blamed, and is not the plan's, whose islands have that of their slices."""


def off(row: dict[str, Any]) -> float | None:
    """Return how far the plan is off with what was measured; None where it has no term
    for what was planted."""
    if row["planted"] not in TRUTH:
        return None
    field, truth = TRUTH[row["planted"]]
    found: float = row["plan"][field] or 0.0
    return abs(found / truth - 1)


def main() -> int:
    """Run the cases, and write the results."""
    parser = support.parser(__doc__)
    parser.add_argument(
        "--clean", type=int, default=20, help="runs without a deviation"
    )
    parser.add_argument("--known", type=Path, help="raw/rehearse.json of earlier calls")
    parser.add_argument("--only", nargs="*", default=list(PLANTED), choices=PLANTED)
    options: argparse.Namespace = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.known is not None:
        rows = json.loads(options.known.read_bytes())["rows"]
    for name in (*options.only, *([""] * options.clean)):
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            row = rehearsed(name, Path(folder), config())
        rows.append(row)
        code = support.write_results(
            options.out,
            NAME,
            __doc__,
            {"rehearsals": map(shown, rows)},
            list(checks(rows)),
            {"rows": rows},
        )
    return code


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the page."""
    blamed = ", ".join(f"{cause} {island}".strip() for cause, island in row["deviates"])
    return {
        "planted": row["planted"] or "nothing",
        "blamed": blamed or "nothing",
        "plan off by": "-" if (share := off(row)) is None else f"{share:.1%}",
        "seconds": f"{row['seconds']:.0f}",
    }


def checks(rows: list[dict[str, Any]]) -> Iterator[support.Check]:
    """Yield the bounds."""
    planted = [row for row in rows if row["planted"]]
    missing = [n for n in PLANTED if n not in [row["planted"] for row in planted]]
    wrong = [row["planted"] for row in planted if not row["right"]]
    yield support.none_of("planted, and not found with its cause alone", wrong)
    yield support.none_of("not planted", missing)
    clean = [row for row in rows if not row["planted"]]
    alarms = sum(not row["right"] for row in clean)
    what = f"deviations found in {len(clean)} clean rehearsals"
    yield support.at_most(what, alarms, 0, "d")
    longest = max(row["seconds"] for row in rows)
    yield support.at_most("seconds of the longest rehearsal", longest, MOST_S, ".0f")
    most = max((share for row in rows if (share := off(row)) is not None), default=0.0)
    what = "share by which the plan is off with what was measured, at most"
    yield support.at_most(what, most, WITHIN)


if __name__ == "__main__":
    support.script(main)
