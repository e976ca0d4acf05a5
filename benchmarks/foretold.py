"""A plan by what a small run measured, and larger runs that it foretells.

Question: two islands train a model of 79 M parameters on this machine, and leave
`measured.json`. What does `diloco plan` foretell with it of 315 M parameters on two
islands, and of 142 M on four, and what do they do then? The coordinator of each run is
killed once. Four islands of 315 M take more memory than this machine has.

The islands stand for a chip of v5e each, so that the plan has a peak of which the small
run's share was measured; the machine's cores are divided among the islands, so a share
counts for as many islands and is less in proportion for more. The disk's rates are
those of half a GB that is written and synced, dropped from the cache, and read by as
many threads as a restore has. A restart lasts from the kill until the last fragment is
back.

Prediction: bytes as planned, the step within 25 %, all else within 10 %; but for the
restart, whose reading and decoding have no core of their own here.

Command: `python -m benchmarks.foretold`. Cost: 15 minutes on two cores, 20 GiB of
memory, 9 GB of disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import support
import tape_checks
from large_run import FRAGMENTS, large_config, within
from machine import PeakUse
from restore import read_through

from diloco_jax import run_files
from diloco_jax.config import Config, IslandConfig
from diloco_jax.coordinator.holding.holder import RESTORES_AT_ONCE
from diloco_jax.coordinator.settings import payload_bytes
from diloco_jax.files import write_json
from diloco_jax.planning.checks import LINK_UTILISATION
from diloco_jax.planning.plan import fragments_of

SEQUENCE, CYCLES, SNAPSHOT_EVERY_S = 128, 4, 40.0
SMALL = (5, 2)
"""Layers and islands of the run that is measured."""
LARGER = ((20, 2), (9, 4))
TIMEOUT_S = 2400.0
CHIP = "v5e:1x1"
FILE_BYTES = 512 << 20


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    options = support.parser(__doc__).parse_args()
    rows, checks, raw = [], list[support.Check](), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="diloco-") as scratch:
        folder = Path(scratch)
        measured = disk_rates(folder) | measure(folder / "small")
        for layers, islands in LARGER:
            config = config_of(layers, islands)
            name = f"{layers} layers, {islands} islands"
            foretold, plan = foretold_of(config, shared(measured, islands), folder)
            found = facts_of(config, folder / f"{layers}-{islands}")
            rows += [
                {
                    "run": name,
                    "what": what,
                    "foretold": f"{foretold[what]:,.4g}",
                    "seen": f"{found[what]:,.4g}",
                    "seen over foretold": f"{found[what] / foretold[what]:.3f}",
                }
                for what in foretold
            ]
            checks += [
                within(f"{name}: {what}", found[what] / foretold[what], most)
                for what, most in ALLOWED.items()
            ]
            raw[name] = {"found": found, "foretold": foretold, "plan": plan}
    raw["measured"] = measured
    tables = {"Foretold and seen": rows}
    return support.write_results(options.out, "foretold", __doc__, tables, checks, raw)


ALLOWED = {
    "MB up a cycle": 0.001,
    "MB down a cycle": 0.001,
    "GB of the coordinator": 0.1,
    "GB of the disk": 0.1,
    "s of a restart": 0.1,
    "Mbit/s up": 0.1,
    "Mbit/s down": 0.1,
    "s of a step": 0.25,
}
"""By how much of it what is seen may be off. Bytes: the headers of transfers."""


def config_of(layers: int, islands: int) -> Config:
    """Return a run of like islands whose coordinator is killed once."""
    steps = FRAGMENTS * CYCLES
    own = IslandConfig(batch_size=1, topology=CHIP)
    config = large_config(layers, 0.0, SNAPSHOT_EVERY_S)
    return (
        config.replace("islands", {f"i{i}": own for i in range(islands)})
        .replace("run.sequence_length", SEQUENCE)
        .replace("run.total_tokens", steps * islands * SEQUENCE)
        .replace("run.sync.quorum", islands)
        .replace("placement.faults", (f"coordinator@{round(0.6 * steps)}:kill",))
        .replace("launch.coordinator_machine", "n2-highmem-2")
    )


def disk_rates(folder: Path) -> dict[str, Any]:
    """Measure the disk's rates as `diloco plan --measured` takes them."""
    paths = [folder / f"bytes-{i}" for i in range(RESTORES_AT_ONCE)]
    block = os.urandom(FILE_BYTES // len(paths))
    began = time.monotonic()
    for path in paths:
        with path.open("wb") as file:
            file.write(block)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    written = time.monotonic()
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(read_through, paths))
    read = time.monotonic()
    for path in paths:
        path.unlink()
    return {
        "disk_write_bytes_per_s": one(FILE_BYTES / (written - began)),
        "disk_read_bytes_per_s": one(FILE_BYTES / (read - written)),
    }


def one(value: float) -> dict[str, Any]:
    """Return a measured value."""
    return {"value": value, "origin": "this machine"}


def measure(folder: Path) -> dict[str, Any]:
    """Return what the small run measured: its file, and the restart."""
    folder.mkdir()
    run = support.run_in(config_of(*SMALL), folder, TIMEOUT_S)
    own: dict[str, Any] = json.loads((run.workdir / run_files.MEASURED).read_bytes())
    (restart,) = tape_checks.outage_seconds(run.tape)
    return {"share_of_peak": own["share_of_peak"], "restart_seconds": one(restart)}


def shared(measured: dict[str, Any], islands: int) -> dict[str, Any]:
    """Return the same for so many islands, which have the cores of `SMALL`'s."""
    shares = {
        chip: one(share["value"] * SMALL[1] / islands)
        for chip, share in measured["share_of_peak"].items()
    }
    return measured | {"share_of_peak": shares}


def foretold_of(
    config: Config, measured: dict[str, Any], folder: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what the plan says by these values, and the plan as JSON has it."""
    write_json(dataclasses.asdict(config), folder / run_files.CONFIG)
    write_json(measured, folder / run_files.MEASURED)
    (share,) = (str(found["value"]) for found in measured["share_of_peak"].values())
    words = [*support.DILOCO, "plan", str(folder / run_files.CONFIG), "--arithmetic"]
    words += ["--json", "--share", share, share]
    words += ["--measured", str(folder / run_files.MEASURED)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    if not done.stdout:
        raise support.RunError(done.stderr[-500:])
    plan: dict[str, Any] = json.loads(done.stdout)
    run, island = plan["run"], plan["islands"]["i0"]
    # Bytes of payloads: the plan's links have room for what is around them, too.
    sent = LINK_UTILISATION * 1e9
    up, down = (sent * island["network"][way]["mean"] for way in ("up", "down"))
    foretold = {
        "MB up a cycle": up * run["cycle_seconds"] / 8e6,
        "MB down a cycle": down * run["cycle_seconds"] / 8e6,
        "GB of the coordinator": run["coordinator"]["memory"] / 1e9,
        "GB of the disk": run["coordinator"]["disk"]["expected"] / 1e9,
        "s of a restart": run["outage"]["restart_seconds"],
        "Mbit/s up": up / 1e6,
        "Mbit/s down": down / 1e6,
        "s of a step": island["expected_step_seconds"],
    }
    return foretold, plan


def facts_of(config: Config, folder: Path) -> dict[str, float]:
    """Return the same of a run."""
    folder.mkdir()
    with PeakUse(folder / "run") as peaks:
        run = support.run_in(config, folder, TIMEOUT_S)
    sync, plan = config.run.sync, fragments_of(config)
    up = payload_bytes(sync.codec_up, plan, up=True)
    down = payload_bytes(sync.codec_down, plan)
    merged = [r for r in run.tape if r["kind"] == "merged"]
    (killed,) = (
        r["since"] for r in run.tape if r["kind"] == "recovered" and r["since"]
    )
    back = max(r["time"] for r in run.tape if r["kind"] == "restored")
    began, ended = run.window()
    ways_up, ways_down, speeds_up = [], [], []
    for name, island in run.summary["islands"].items():
        own = (
            r["record"] for r in run.tape if r.get("island") == name and "record" in r
        )
        taken = [r for r in own if r["kind"] == "took"]
        sent = sum(up[r["fragment"]] for r in taken)
        ways_up.append(island["bytes_up"] / sent)
        ways_down.append(
            island["bytes_down"] / sum(down[r["fragment"]] for r in merged)
        )
        # The flush sends all fragments once more, after the last step.
        usual = sum(up[r["fragment"]] for r in taken if r["step"] < island["steps"])
        speeds_up.append(8e-6 * usual / (ended - began))
    usual = sum(down[r["fragment"]] for r in merged if not r["final"])
    islands = run.summary["islands"].values()
    return {
        # What the kill interrupts is sent again, by some.
        "MB up a cycle": min(ways_up) * sum(up) / 1e6,
        "MB down a cycle": min(ways_down) * sum(down) / 1e6,
        "GB of the coordinator": peaks.own["coordinator"] / 1e9,
        "GB of the disk": peaks.disk / 1e9,
        "s of a restart": back - killed,
        "Mbit/s up": statistics.mean(speeds_up),
        "Mbit/s down": 8e-6 * usual / (ended - began),
        "s of a step": statistics.mean(i["median_step_seconds"] for i in islands),
    }


if __name__ == "__main__":
    support.script(main)
