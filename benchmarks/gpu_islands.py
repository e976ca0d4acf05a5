"""Unlike hardware in one run: an island on a GPU, the others on CPUs.

Question: does the quickstart train when one of its islands is a GPU, with books as
exact as else, and does each island count by the tokens that it processed?

A coordinator and the three islands of the quickstart are started by hand, as on
machines of their own, since `diloco run` gives all its islands one kind of device. The
GPU island makes its steps as fast as it can, the others at the quickstart's pace.

Prediction: exact books, as nothing in a delta says where it was computed; the GPU's
share of the merged tokens is that of the tokens that it computed.

Command: `python -m benchmarks.gpu_islands` on a machine with a GPU. `--platform cpu`
tries the script on any machine. Cost: 3 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import tempfile
import time
from pathlib import Path

import support
import tape_checks

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.config.loading import read_config
from diloco_jax.files import write_json
from diloco_jax.observability.tape import read_tape
from diloco_jax.workdir import read_summary

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"
ON_GPU = "v6e"
"""The island of the quickstart that is given the GPU."""
TOKENS, QUICK_TOKENS = 1_600_000, 100_000
SHARE_ERROR_MAX = 0.02
TIMEOUT_S, LOOK_S = 900.0, 0.2


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    config = config_of(QUICK_TOKENS if options.quick else TOKENS)
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        workdir = trained(config, Path(name), options)
        summary = read_summary(workdir)
        tape = list(read_tape(workdir / run_files.TAPE))
    islands = summary["islands"]
    computed = {n: island["tokens_computed"] for n, island in islands.items()}
    merged = {n: island["tokens_merged"] for n, island in islands.items()}
    off = max(
        abs(merged[n] / sum(merged.values()) - computed[n] / sum(computed.values()))
        for n in islands
    )
    rows = [
        {
            "island": name,
            "device": options.platform if name == ON_GPU else "cpu",
            "median step, s": f"{island['median_step_seconds']:.3f}",
            "tokens computed": f"{computed[name]:,}",
            "share": f"{computed[name] / sum(computed.values()):.3f}",
            "share of the merged": f"{merged[name] / sum(merged.values()):.3f}",
        }
        for name, island in islands.items()
    ]
    books = tape_checks.ledger_problems(summary, tape, support.fragment_sizes(config))
    checks = [
        support.none_of("ledger", list(books)),
        support.none_of("versions", list(tape_checks.version_problems(tape))),
        support.none_of("rows of the data", list(tape_checks.row_problems(tape))),
        support.at_most("share merged, off that computed", off, SHARE_ERROR_MAX),
    ]
    return support.deliver(
        options,
        "gpu_islands",
        __doc__,
        {"Islands": rows},
        checks,
        {"summary": summary, "platform": options.platform},
    )


def config_of(tokens: int) -> Config:
    """Return the quickstart without its fault, and a GPU island without a pace."""
    config = read_config(str(CONFIG))
    quick = dataclasses.replace(config.islands[ON_GPU], step_seconds=0.0)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, total_tokens=tokens),
        islands={**config.islands, ON_GPU: quick},
        placement=dataclasses.replace(config.placement, faults=()),
    ).validate()


def trained(config: Config, folder: Path, options: argparse.Namespace) -> Path:
    """Run the coordinator and all islands to their end; return the workdir."""
    workdir, path = folder / "run", folder / "config.json"
    write_json(dataclasses.asdict(config), path)
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.ExitStack() as stack:

        def start(name: str, platform: str, *words: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            environment = {**os.environ, "JAX_PLATFORMS": platform}
            process = subprocess.Popen(
                [*support.DILOCO, *words], stdout=log, stderr=log, env=environment
            )
            stack.callback(process.kill)
            return process

        def ended(name: str, process: subprocess.Popen[bytes]) -> None:
            while (code := process.poll()) is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            if code != 0:
                said = (folder / f"{name}.log").read_text()[-2000:]
                raise support.RunError(f"{name} ended with {code}:\n{said}")

        at = ("--workdir", str(workdir), "--init")
        coordinator = start("coordinator", "cpu", "coordinator", str(path), *at)
        address = workdir / run_files.ADDRESS
        while not address.exists():
            if coordinator.poll() is not None or time.monotonic() > deadline:
                ended("coordinator", coordinator)
            time.sleep(LOOK_S)
        islands = {
            name: start(
                name,
                options.platform if name == ON_GPU else "cpu",
                *("island", str(path), "--name", name),
                *("--coordinator", address.read_text().strip()),
                *("--workdir", str(folder / name)),
            )
            for name in config.islands
        }
        for name, process in islands.items():
            ended(name, process)
        ended("coordinator", coordinator)
    return workdir


if __name__ == "__main__":
    support.script(main)
