"""The hour on a GPU: how the gap to data-parallel falls with size, unattended.

Question: how far is the validation loss of 2, 4 and 8 islands from data-parallel at 2,
5, 10 and 25 M parameters, 20 tokens per parameter, three seeds each?

Rows are laboratories (`simulation/laboratory.py`), in an order in which whatever has
ended is a set that can be published: data-parallel, the default with 8 islands and the
best recipe before the other numbers of islands, and a second learning rate last. A
data-parallel row is one island with an outer step of 1 and f32, which changes nothing.
The rates of 2 and 5 M are `RATES`; those of 10 and 25 M are the best of 5 M times
(5 M / size)^0.25, by a rule stated before the run. Times are those of the measured
speed: first a probe says which share of the device's peak a row has, and below
`--least-share` nothing else is run; then rows that no longer fit into `--total-minutes`
are left out. Each row is written when it has ended. A row that `--minutes` cut off goes
on in the next call from `--state`, or begins anew if that is gone.

Prediction: the gap at 8 islands falls from 2 M to 25 M, with the number of steps.

Command, in calls of up to ten minutes on a machine that has no network:

    python benchmarks/gpu_hour.py pack --text FOLDER   # here: wheels and text, .gpu/
    bash .gpu/begin && python benchmarks/gpu_hour.py run --half 1 --out $OUT  # there

`--known FILE` names the results of earlier calls, `--half 2` is 25 M alone, and
`--rehearse` has tiny sizes, for a CPU. Cost: two half-hours of an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import quality_configs
import support

from diloco_jax import compilation
from diloco_jax.config import Config, DataConfig, OuterConfig, SyncConfig
from diloco_jax.config.resolving import LONG
from diloco_jax.data.corpus import load_corpus
from diloco_jax.files import write_json
from diloco_jax.models.flops import analytic_flops
from diloco_jax.models.presets import preset

PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L4": 121e12}
"""Dense bfloat16 FLOP/s of the devices whose name has this (NVIDIA's data sheets)."""
PACKED = Path(".gpu")
LACKING = (
    "array_record",
    "cffi",
    "cryptography",
    "grain",
    "msgspec",
    "portpicker",
    "xxhash",
)
"""Packages that the machine's image does not have."""
CARRIED_MIB = 64
"""Most that can be carried, the text included."""
PYTHON = "3.12"
GLIBC = ("manylinux2014", *(f"manylinux_2_{n}" for n in (17, 24, 27, 28)))
"""Tags of wheels that its system can load; pip takes each as it stands."""
SEEDS = (0, 1, 2)
TOKENS_PER_PARAMETER = 20
LEAST_SHARE = 0.1
COMPILE_S = 60.0
"""Seconds that a row needs besides its steps."""
SAVE_EVERY_STEPS = 1000
PROBE_CYCLES = 6
RATES = {"data-parallel": (8e-3, 4e-3), "islands": (2e-3, 4e-3)}
"""Learning rates of the first two sizes."""
CARRIED_FROM, CARRY_POWER = "5m", 0.25
BEST: dict[str, Any] = {"steps_per_cycle": 12, "fragments": 12, "codec_up": "int4"}
BEST["codec_down"] = "int4"
"""What differs from the default in the best recipe: its bytes spent on more merges."""


class CallEndedError(Exception):
    """The time of this call is over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A row of the study: one configuration with all seeds."""

    size: str
    method: str
    islands: int
    second_rate: bool = False

    @property
    def name(self) -> str:
        """Name of the row, under which its result is kept."""
        more = ", other rate" * self.second_rate
        return f"{self.size}, {self.method}, M = {self.islands}{more}"


def cells(half: int) -> Iterator[Cell]:
    """Yield the rows of a half-hour, in their order."""
    three = (("data-parallel", 1), ("default", 8), ("best", 8))
    for size in ("2m", "5m", "10m") if half == 1 else ("25m",):
        yield from (Cell(size=size, method=m, islands=n) for m, n in three)
    if half == 1:
        for size in ("2m", "5m"):
            yield from (
                Cell(size=size, method=m, islands=n, second_rate=True) for m, n in three
            )
        for islands in (2, 4):
            for size in ("2m", "5m"):
                yield Cell(size=size, method="default", islands=islands)


def main() -> int:
    """Pack, or run what fits into this call."""
    parser = support.parser(__doc__)
    parser.add_argument("what", choices=["pack", "run"])
    parser.add_argument("--text", nargs="*", default=[str(PACKED / "text")])
    parser.add_argument("--half", type=int, choices=[1, 2], default=1)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--total-minutes", type=float, default=28.0, help="of all")
    parser.add_argument("--known", type=Path, help="results of earlier calls")
    parser.add_argument("--state", type=Path, default=Path("/tmp/gpu_hour"))
    parser.add_argument("--least-share", type=float, default=LEAST_SHARE)
    parser.add_argument("--rehearse", action="store_true", help="tiny, for a CPU")
    options = parser.parse_args()
    if options.what == "pack":
        return pack(Path(options.text[0]))
    os.environ.setdefault("JAX_PLATFORMS", "cpu" if options.rehearse else "cuda")
    return Study(options).run()


def pack(text: Path) -> int:
    """Collect wheels, text and a script that installs them into `PACKED`; return 1 if
    it is more than can be carried. Raises ConfigError if the text is none."""
    digest = load_corpus((str(text),), DataConfig().validation_fraction).digest
    wheels = PACKED / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "pip", "download", "--no-deps", "-q"]
    line += ["--only-binary", ":all:", "--python-version", PYTHON, "-d", str(wheels)]
    line += [word for name in GLIBC for word in ("--platform", f"{name}_x86_64")]
    wanted = [f"{name}=={metadata.version(name)}" for name in LACKING]
    subprocess.run([*line, *wanted], check=True)
    packed = PACKED / "text.tar.xz"
    subprocess.run(["tar", "-cJf", packed, "-C", text, "."], check=True)
    (PACKED / "begin").write_text(
        "set -e\n"
        f"pip install -q --no-index --no-deps {wheels}/*.whl\n"
        "pip install -q --no-index --no-deps --no-build-isolation -e .\n"
        f"mkdir -p {PACKED}/text && tar -xJf {packed} -C {PACKED}/text\n"
    )
    size = sum(path.stat().st_size for path in PACKED.rglob("*") if path.is_file())
    told = f"{PACKED}: {size / 2**20:.1f} MiB of {CARRIED_MIB}, text {digest}"
    print(told, file=sys.stderr)
    return int(size > CARRIED_MIB * 2**20)


class Study:
    """The rows that fit, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._began = options, time.monotonic()
        self._path: Path = options.out / "gpu_hour.json"
        self._found: dict[str, Any] = {"rows": {}, "seconds": 0.0}
        self._found |= {"left_out": {}, "done_seconds": {}}
        if options.known is not None and options.known.exists():
            self._found = json.loads(options.known.read_bytes())
        self._before_s = float(self._found["seconds"])

    def run(self) -> int:
        """Run; return 1 if the device is used too little to go on."""
        self._options.state.mkdir(parents=True, exist_ok=True)
        compilation.use_cache(self._options.state / "compiled")
        todo = [c for c in cells(self._options.half) if c.name not in self._rows]
        try:
            if todo and "flops_per_second" not in self._found:
                self._probe(todo[0])
            share = self._found.get("share")
            if share is not None and share < self._options.least_share:
                print(f"share of the peak {share:.3f} is too small", file=sys.stderr)
                return 1
            for cell in todo:
                self._run(cell)
        except CallEndedError as error:
            print(f"{error}; the next call goes on", file=sys.stderr)
        finally:
            self._write()
        return 0

    @property
    def _rows(self) -> dict[str, Any]:
        rows: dict[str, Any] = self._found["rows"]
        return rows

    @property
    def _left_s(self) -> float:
        spent = self._before_s + time.monotonic() - self._began
        return 60 * float(self._options.total_minutes) - spent

    def _write(self) -> None:
        self._found["seconds"] = self._before_s + time.monotonic() - self._began
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._found, self._path)

    def _probe(self, cell: Cell) -> None:
        """Measure FLOP/s on a short run, and its share of the peak, if that is known;
        one that is cut off begins anew."""
        import jax

        config = self._config(dataclasses.replace(cell, method="default", islands=8))
        cycles = 2 if self._options.rehearse else PROBE_CYCLES
        steps = cycles * config.run.sync.cycle
        short = config.replace("total_tokens", steps * _step_tokens(config))
        found = self._laboratory(short, None)
        flops = found.tokens_per_second * _token_flops(config)
        assert flops > 0, "the probe is too short to have a speed"
        device = jax.devices()[0].device_kind
        peak = next((p for name, p in PEAKS.items() if name in device), None)
        share = flops / peak if peak else None
        self._found.update(device=device, flops_per_second=flops, share=share)
        self._write()

    def _run(self, cell: Cell) -> None:
        """Run a row to its end, unless it does not fit."""
        config = self._config(cell)
        work = len(SEEDS) * config.run.total_tokens * _token_flops(config)
        before_s = self._found["done_seconds"].get(cell.name, 0.0)
        left_s = max(0.0, work / self._found["flops_per_second"] - before_s)
        if (needed := COMPILE_S + left_s) > self._left_s:
            note = f"{needed:.0f} s of {self._left_s:.0f}"
            self._found["left_out"][cell.name] = note
            print(f"left out {cell.name}: {note}", file=sys.stderr)
            return
        state = self._options.state / f"{cell.name.replace(', ', '-')}.state"
        began = time.monotonic()
        try:
            found = self._laboratory(config, state)
        except CallEndedError:
            own_s = max(0.0, time.monotonic() - began - COMPILE_S)
            self._found["done_seconds"][cell.name] = before_s + own_s
            raise
        runs = [run.summary for run in found.runs]
        self._rows[cell.name] = {
            "losses": found.losses.tolist(),
            "seeds": list(SEEDS),
            "curve": [
                run.history.frame("evaluations").values.tolist() for run in found.runs
            ],
            "tokens": runs[0]["tokens_merged"],
            "merges": runs[0]["merges"],
            "bytes_up": sum(i["bytes_up"] for i in runs[0]["islands"].values()),
            "bytes_down": sum(i["bytes_down"] for i in runs[0]["islands"].values()),
            "rate": config.run.inner.learning_rate,
            # NaN where all merges compiled something, and no JSON.
            "tokens_per_second": _or_none(found.tokens_per_second),
            "seconds": found.seconds,
        }
        state.unlink(missing_ok=True)
        self._write()
        print(f"{cell.name}: {found.losses}", file=sys.stderr, flush=True)

    def _laboratory(self, config: Config, state: Path | None) -> Any:
        from diloco_jax.simulation import laboratory

        sync, steps = config.run.sync, SAVE_EVERY_STEPS
        if self._options.rehearse:
            steps = 1

        def show(line: str) -> None:
            print(line, file=sys.stderr, flush=True)
            if time.monotonic() - self._began > 60 * self._options.minutes:
                raise CallEndedError(f"{self._options.minutes:g} minutes are over")

        options = dataclasses.replace(
            quality_configs.network(2),
            evaluate_every_tokens=config.run.total_tokens // 20,
        )
        return laboratory.run(
            config,
            seeds=SEEDS,
            options=options,
            save=state,
            save_every_merges=max(1, steps * sync.fragments // sync.cycle),
            show=show,
        )

    # ---- rows -----------------------------------------------------------------------

    def _config(self, cell: Cell) -> Config:
        plain = cell.method == "data-parallel"
        model = preset("tiny" if self._options.rehearse else cell.size)
        rates = ((0, self._rate(cell)),)
        size = quality_configs.Size(model=model, tokens=1, rates=rates, sequences=64)
        size = dataclasses.replace(size, sequence=1024)
        if self._options.rehearse:
            size = dataclasses.replace(size, sequences=8, sequence=32)
        islands = quality_configs.equal(cell.islands, size.sequences)
        config = quality_configs.config(size, islands=islands, **SYNC[cell.method])
        tokens = TOKENS_PER_PARAMETER * sum(support.fragment_sizes(config))
        if self._options.rehearse:
            tokens = 60 * _step_tokens(config)
        config = config.replace("total_tokens", tokens)
        config = config.replace("data.paths", tuple(self._options.text))
        if not plain:
            outer = dataclasses.replace(config.run, outer=OuterConfig())
            config = dataclasses.replace(config, run=outer)
        for name in config.islands if not self._options.rehearse else ():
            config = config.replace(f"islands.{name}.compute_dtype", "bfloat16")
        return config

    def _rate(self, cell: Cell) -> float:
        method = "data-parallel" if cell.method == "data-parallel" else "islands"
        first, second = RATES[method]
        if cell.size in ("2m", "5m"):
            return second if cell.second_rate else first
        own = dataclasses.replace(cell, size=CARRIED_FROM)
        both = [own, dataclasses.replace(own, second_rate=True)]
        known = [self._rows[c.name] for c in both if c.name in self._rows]
        best = min(known, key=lambda row: sum(row["losses"]), default={"rate": first})
        parameters = float(cell.size.rstrip("m")) / float(CARRIED_FROM.rstrip("m"))
        rate = float(best["rate"])
        return rate * float(parameters**-CARRY_POWER)


SYNC: dict[str, dict[str, Any]] = {
    "data-parallel": {
        "fragments": 1,
        "steps_per_cycle": 100,
        "codec_up": "f32",
        "codec_down": "f32",
        "merge": "mean",
    },
    "default": {
        "steps_per_cycle": LONG.cycle,
        "fragments": SyncConfig.fragments,
    },
    "best": BEST,
}
"""What the methods set; the rest is the product's default."""


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def _step_tokens(config: Config) -> int:
    batch = sum(island.batch_size for island in config.islands.values())
    return batch * config.run.sequence_length


def _token_flops(config: Config) -> float:
    length = config.run.sequence_length
    return analytic_flops(config.run.model, length) / length


if __name__ == "__main__":
    support.script(main)
