"""The memory of an island beside that of the same loop alone.

Question: what does an island hold beyond a plain loop of the same model, batch and
optimizer? It needs its anchors, one f32 array per parameter; encoded deltas wait for
their upload, publishes for their adoption. A run of 87 M parameters in 24 fragments,
int8 both ways, two islands with tiny batches, and the loop alone in a process of its
own.

Memory is the peak of the resident set (VmHWM, ru_maxrss) of a process over its life,
compilation included. The ratio is that of the island to the loop's peak plus the
anchors' bytes.

Prediction: 1.05. One encoded fragment up, one down and two of the sender's buffers are
a sixth of an int8 copy; the rest is libraries of the wire.

Found: 1.43 at first, 1.28 with one arena of malloc for all threads. Within its first
cycle an island grows by 0.56 GB: 0.35 are the residuals of error feedback, one more f32
array per parameter, without which int8 loses quality and which the prediction had
forgotten (loop, anchors and residuals alone are *at least* in the table); the rest is
freed memory between the arrays that stay. Freed memory was given back every 10 s, and
the peak came at the end of that cycle, just before the next time. Of 16 islands in
eight runs 14 had 1.14 to 1.20, two had 1.28 and 1.29; by this script four runs had
1.198 to 1.293. It is given back within a second while the peak grows, now
(`island/watches.py`, 7 ms of CPU each time): 1.155 and 1.164, then as in the table.

The profile of a peak, sampled 30 times a second: 3660 MiB, where the loop alone has
2827. 664 of the difference are anchors and residuals, 17 are files of more libraries,
and 150 are what takes, adoptions and the wire hold at that moment, with holes. Given
back every 2 s, four islands had 1.113 to 1.163. With settings by which malloc keeps a
step's temporaries in its heap, which makes a CPU island's step 10 to 15 % shorter
(overhead.md), four had 1.152 to 1.463, so they were not taken.

Command: `python -m benchmarks.island_memory`. Cost: about 3 minutes on two cores and
8 GB.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import support
from coordinator_memory import LARGE, SEQUENCE, config_of
from pinned import pinned_run

from diloco_jax.config import Config, IslandConfig
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader
from diloco_jax.files import write_json
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import TrainState

RATIO_MAX = 1.10
CYCLES = 2
ALONE_STEPS = 5
TIMEOUT_S = 1500.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--alone", nargs=2, metavar=("CONFIG", "FILE"), help="itself")
    options = parser.parse_args()
    if options.alone:
        given, file = map(Path, options.alone)
        write_json({"peak": alone_here(given)}, file)
        return 0
    cycles = 1 if options.quick else CYCLES
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 20_000)
        config = config_of(LARGE, str(text), cycles)
        placement = dataclasses.replace(config.placement, faults=())
        config = dataclasses.replace(config, placement=placement)
        plain = alone(config, Path(folder))
        print(time.strftime("%H:%M:%S"), "live", file=sys.stderr, flush=True)
        with pinned_run(config, Path(folder)) as run:
            for name in config.islands:
                run.island(name)
            run.finish(TIMEOUT_S)
        peaks = {name: run.peaks[name] for name in config.islands}
    anchors = 4 * sum(support.fragment_sizes(config))
    rows = [
        {
            "island": name,
            "peak, GB": f"{peak / 1e9:.2f}",
            "the loop alone": f"{plain / 1e9:.2f}",
            "anchors": f"{anchors / 1e9:.2f}",
            "at least": f"{1 + anchors / (plain + anchors):.3f}",
            "ratio": f"{peak / (plain + anchors):.3f}",
        }
        for name, peak in peaks.items()
    ]
    most = max(peaks.values()) / (plain + anchors)
    checks = [support.at_most("an island over loop and anchors", most, RATIO_MAX)]
    raw = {"peaks": peaks, "plain": plain, "anchors": anchors}
    return support.deliver(
        options, "island_memory", __doc__, {"Islands": rows}, checks, raw
    )


def alone(config: Config, folder: Path) -> int:
    """Return the peak in bytes of the loop alone, in a process of its own."""
    print(time.strftime("%H:%M:%S"), "alone", file=sys.stderr, flush=True)
    path, file = folder / "alone.json", folder / "peak.json"
    write_config_json(config, path)
    command = [sys.executable, __file__, "--alone", str(path), str(file)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    peak: int = json.loads(file.read_bytes())["peak"]
    return peak


def alone_here(path: Path) -> int:
    """Make the steps of an island without any other process, and return the peak."""
    run = read_config_json(path).run
    island = IslandConfig(batch_size=2)
    _, trainer = build_trainer(run, island)
    reader = BatchReader(load_data(run).index(run.seed), trainer.fields, SEQUENCE)
    params = trainer.first(run.seed)
    state = TrainState(params, trainer.init_inner(params))
    del params
    for step in range(ALONE_STEPS):
        rows = np.arange(2 * step, 2 * step + 2)
        batch = trainer.put_batch(reader.batch(rows))
        state, metrics = trainer.step(state, batch, run.inner.learning_rate)
        float(metrics["loss"])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    support.script(main)
