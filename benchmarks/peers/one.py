"""One run of one system, alone in a network where that can be had: what its processes
send to each other is then all that crosses the network's loopback device."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers import ours, torchft_group
from benchmarks.peers.work import Outcome, Work

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    given.name: given for given in (torchft_group.PATIENT, torchft_group.EXAMPLES)
}
SYSTEMS = (ours.SYSTEM, *SETTINGS)
TIMEOUT_S = 600.0
ALONE = "PEERS_ALONE"
ENTER = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Runs a command in a network of its own; root may."""


def run_alone(system: str, work: Work, venv: Path) -> Outcome:
    """Run in a process, and a network, of its own. Raises RuntimeError if it fails."""
    what = f"{work.replicas} replicas, {work.scenario}: {system}"
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
    probe = subprocess.run([*ENTER, "true"], capture_output=True, check=False)
    alone = probe.returncode == 0
    given = json.dumps({"system": system, "venv": str(venv.absolute())})
    command = [*(ENTER if alone else ()), sys.executable, "-m", "benchmarks.peers.one"]
    done = subprocess.run(
        [*command, given, json.dumps(dataclasses.asdict(work))],
        cwd=ROOT,
        env={**os.environ, ALONE: "1" if alone else ""},
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{what}: exit code {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def loopback_bytes() -> int:
    """Return the bytes that were sent over this network's loopback device."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise RuntimeError("/proc/net/dev has no device lo")


def main() -> None:
    """Run what the command line says, and print the outcome."""
    given, work = json.loads(sys.argv[1]), Work(**json.loads(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        if given["system"] == ours.SYSTEM:
            outcome = ours.run(work, Path(folder))
        else:
            settings, venv = SETTINGS[given["system"]], Path(given["venv"])
            outcome = torchft_group.run(work, settings, venv, Path(folder))
    if os.environ.get(ALONE):
        outcome = dataclasses.replace(outcome, bytes_loopback=loopback_bytes())
    print(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main()
