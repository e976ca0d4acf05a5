"""The cost of a boundary to a train loop that joined.

Question: how much of its thread's time does `boundary` take, and what does a loop lose
by it? A loop of 300 parameters with P = 24 fragments makes the same steps twice, alone
and as an island of a real coordinator, with about one take and one adoption at each
boundary: the most that a run asks for.

The step waits in place of a device, so that its own work does not hide what a boundary
costs. Processor time is that of the loop's thread. It holds what the programs of takes
and adoptions compute, which an accelerator does beside it: "computed" is the difference
to programs that have the same results and compute nothing. Elapsed time has the waits
for other threads and processes, too. A boundary also frees the arrays that the step
consumed, which a loop alone does itself: "added" is what a step with a boundary takes
more than one without.

Prediction: below 1 ms of processor time, since nothing is computed on the host and no
message is awaited. Small tensors are held in stacks (`island/device/exchange.py`), so
one program takes a fragment and one adopts it, and two trees are looked at.

Seen, 2026-11-30: 1.21 ms on a machine on which the tree of 2026-11-25, which had 0.96
on its own, takes 1.22 (medians of four runs in turns): the bound is one of seconds.

Command: `python benchmarks/boundary.py`. Cost: about 3 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import support

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.files import write_json

LEAVES, WIDTH, FRAGMENTS = 300, 16, 24
STEP_S = 0.02
WARM_STEPS = 2 * FRAGMENTS
"""Steps that are not counted: the first ones have nothing to adopt."""
COMPUTED_CALLS = 100
BOUNDARY_MAX_S = 1e-3
TIMEOUT_S = 300.0
NAME = "a"


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12 * FRAGMENTS)
    parser.add_argument("--loop", nargs=2, metavar=("ADDRESS", "FILE"))
    options = parser.parse_args()
    if options.loop:
        write_json(train(options.loop[0], options.steps), Path(options.loop[1]))
        return 0
    runs = [measure(number, options.steps) for number in range(options.runs)]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    rows = [
        {
            "figure": title,
            "median": format(middle[name], form),
            "lowest": format(min(run[name] for run in runs), form),
            "highest": format(max(run[name] for run in runs), form),
        }
        for name, (title, form) in FIGURES.items()
    ]
    checks = [
        support.at_most(
            "processor seconds of a boundary", middle["cpu_s"], BOUNDARY_MAX_S, ".5f"
        ),
        support.at_least("takes per boundary", middle["takes"], 0.5),
        support.at_least("adoptions per boundary", middle["adoptions"], 0.5),
    ]
    return support.write_results(
        options.out,
        "boundary",
        __doc__,
        {f"{options.runs} runs of {options.steps} steps": rows},
        checks,
        {"runs": runs},
    )


FIGURES = {
    "cpu_s": ("processor time of a boundary, mean (s)", ".5f"),
    "median_cpu_s": ("processor time of a boundary, median (s)", ".5f"),
    "added_s": ("processor time added to a step (s)", ".5f"),
    "take_s": ("of a boundary: takes (s)", ".5f"),
    "adopt_s": ("of a boundary: adoptions (s)", ".5f"),
    "settle_s": ("of a boundary: residuals of before are freed (s)", ".5f"),
    "rest_s": ("of a boundary: trees, books, messages (s)", ".5f"),
    "computed_s": ("computed by the programs of one take (s)", ".5f"),
    "elapsed_s": ("elapsed time of a boundary, mean (s)", ".5f"),
    "ratio": ("step with boundary, over the step alone", ".3f"),
    "cpu_ratio": ("processor time of both, over that of the step alone", ".2f"),
    "takes": ("takes per boundary", ".2f"),
    "adoptions": ("adoptions per boundary", ".2f"),
}


MODEL = f"""
import jax.numpy as jnp

from diloco_jax import loop_model


def parameters(key):
    return {{
        f"block_{{n:03}}": {{"weight": jnp.full(({WIDTH}, {WIDTH}), n / {LEAVES})}}
        for n in range({LEAVES})
    }}


def model(run, island, layout):
    return loop_model(parameters)
"""


def measure(number: int, steps: int) -> dict[str, float]:
    """Serve a run, and have a loop in a process of its own measured."""
    print(f"{time.strftime('%H:%M:%S')} run {number}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL)
        return measure_in(folder, steps)


def measure_in(folder: Path, steps: int) -> dict[str, float]:
    """Do so in this folder."""
    run = RunConfig(
        model=ModelConfig(factory=f"{folder / 'model.py'}:model"),
        sync=SyncConfig(steps_per_cycle=FRAGMENTS, fragments=FRAGMENTS),
        sequence_length=8,
        total_tokens=8 * (steps + WARM_STEPS),
    )
    config = Config(
        run=run,
        islands={NAME: IslandConfig(batch_size=1)},
        placement=Placement(bind="127.0.0.1:0"),
    )
    workdir, path, out = (folder / name for name in ("run", run_files.CONFIG, "out"))
    write_json(dataclasses.asdict(config), path)
    with (folder / "log").open("wb") as log:
        serve = ["coordinator", str(path), "--workdir", str(workdir), "--init"]
        served = subprocess.Popen([*support.DILOCO, *serve], stdout=log, stderr=log)
    try:
        address, deadline = workdir / run_files.ADDRESS, time.monotonic() + TIMEOUT_S
        while not address.exists():
            if served.poll() is not None or time.monotonic() > deadline:
                raise support.RunError((folder / "log").read_text())
            time.sleep(0.1)
        command = [sys.executable, __file__, "--steps", str(steps), "--loop"]
        command += [address.read_text().strip(), str(out)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        served.wait(TIMEOUT_S)
    finally:
        served.kill()
    found: dict[str, float] = json.loads(out.read_bytes())
    return found


def train(address: str, steps: int) -> dict[str, float]:
    """Make the steps alone, then as an island, and return what each costs."""
    import jax

    import diloco_jax

    step = jax.jit(
        lambda params: (
            jax.tree.map(lambda x: 0.999 * x, params),
            params["block_000"]["weight"][0, 0],
        ),
        donate_argnums=0,
    )

    def stepped(params: Any) -> Any:
        params, loss = step(params)
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        time.sleep(STEP_S)
        return params, loss

    key = jax.random.key(0)
    made: dict[str, Any] = {}
    exec(MODEL, made)
    params = made["parameters"](key)
    alone: list[tuple[float, float]] = []
    params, _ = stepped(params)
    for _ in range(steps):
        began = time.thread_time(), time.perf_counter()
        params, _ = stepped(params)
        alone.append(since(began))
    both: list[tuple[float, float]] = []
    boundaries: list[tuple[float, float]] = []
    with diloco_jax.join(
        address, name=NAME, like=params, tokens_per_step=8, incarnation=1
    ) as island:
        params = island.params
        exchange = island._host.exchange
        done = dict.fromkeys(("take", "adopt", "settle"), (0, 0.0))
        for what in done:
            setattr(exchange, what, counted(getattr(exchange, what), done, what))
        while not island.over:
            if island.step == WARM_STEPS:
                both.clear()
                boundaries.clear()
                done.update(dict.fromkeys(done, (0, 0.0)))
            whole = time.thread_time(), time.perf_counter()
            params, loss = stepped(params)
            began = time.thread_time(), time.perf_counter()
            params = island.boundary(params, loss)
            if not island.over:  # The last one waits for the end of the run.
                boundaries.append(since(began))
                both.append(since(whole))
        computed = computed_s(exchange, island.final)
    parts = {name: spent / len(boundaries) for name, (_, spent) in done.items()}
    cpu, elapsed = zip(*boundaries, strict=True)
    return {
        "cpu_s": statistics.fmean(cpu),
        "median_cpu_s": statistics.median(cpu),
        "added_s": mean_of(both, 0) - mean_of(alone, 0),
        **{f"{name}_s": spent for name, spent in parts.items()},
        "rest_s": statistics.fmean(cpu) - sum(parts.values()),
        "computed_s": computed,
        "elapsed_s": statistics.fmean(elapsed),
        "ratio": mean_of(both, 1) / mean_of(alone, 1),
        "cpu_ratio": mean_of(both, 0) / mean_of(alone, 0),
        "takes": done["take"][0] / len(boundaries),
        "adoptions": done["adopt"][0] / len(boundaries),
    }


def counted(function: Any, done: dict[str, tuple[int, float]], what: str) -> Any:
    """Return the function, with its calls and their processor time counted."""

    def counting(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        result = function(*arguments, **options)
        times, spent = done[what]
        done[what] = times + 1, spent + time.thread_time() - began
        return result

    return counting


def computed_s(exchange: Any, params: Any) -> float:
    """Return the processor time that the programs of one take compute, without what it
    costs to start them and to have their results."""
    import jax
    import jax.numpy as jnp

    from diloco_jax.models.model import named

    leaves, pieces = jax.tree.leaves(named(params)), exchange.held(0)
    given = [(h.leaf(leaves), h.index, h.anchor, h.residual) for h in pieces]
    take = pieces[0].programs.take
    shapes = jax.eval_shape(take, *given[0])
    empty = jax.jit(
        lambda *given: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        out_shardings=jax.tree.map(lambda x: x.sharding, take(*given[0])),
        keep_unused=True,
    )
    spent: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(COMPUTED_CALLS):
        for real, program in ((True, take), (False, empty)):
            time.sleep(STEP_S / 4)
            began = time.thread_time()
            results = [program(*one) for one in given]
            spent[real].append(time.thread_time() - began)
            jax.block_until_ready(results)  # type: ignore[no-untyped-call]
    return statistics.median(spent[True]) - statistics.median(spent[False])


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Return processor and elapsed seconds of this thread."""
    return time.thread_time() - began[0], time.perf_counter() - began[1]


def mean_of(times: list[tuple[float, float]], which: int) -> float:
    """Return the mean of one of both."""
    return statistics.fmean(pair[which] for pair in times)


if __name__ == "__main__":
    support.script(main)
