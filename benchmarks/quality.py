"""Quality at equal tokens: the cost of decoupling, codecs, merge and adopt rules.

Question: how far is the validation loss of each way to put islands' work together from
its baseline, on real text, at equal tokens and with paired seeds?

Every run is emulated (`diloco emulate`: the real protocol, the real arithmetic, virtual
time), so the machine's speed plays no part. Rows are in `quality_rows.py`. Runs that
are missing are done in the order of the rows, first seeds first; each is kept in
docs/results/raw/quality.json as soon as it is done, so the study can go on any time.

Prediction, before the first run: decoupled within 0.5 % of synchronous DiLoCo; int8
free, int4 below 0.5 %; data-parallel ahead of 8 islands by 5 to 10 % at these sizes and
tokens; RDA ahead of the mean; overlaps of 1 to 4 steps alike.

Sizes up to 0.1 M parameters train on the Python standard library (7 files with 90 kB
are held out, so tenths of a percent are about these), on a CPU. 0.3 M and 2 M train on
130 MB of Linux 6.1 (Debian's linux-source-6.1, 6.1.192-2: the .rst, .txt, .c, .h and .S
files of Documentation without translations, and of kernel, mm, fs, net, lib, block,
crypto, security, ipc and init; 10,039 files, digest 8834d04465440715; `linux_text.sh`
makes the folder), 2.2 MB of which are held out; 2 M and the first three seeds of 0.3 M
ran mostly on an NVIDIA H100 (jax 0.11.2, Python 3.12.3), which up to 12 runs shared,
later seeds on a CPU. Pairs are of one device, but two of five with data-parallel, whose
seeds 1 and 2 ran on a CPU. The CPUs are of two kinds, AMD EPYC and Intel Xeon, in some
pairs one of each (raw results say which): their rounding differs, as that of any two
rows does.

Learning rates are swept (last tables), each method alike: at 0.1 M and 2 M tokens of
three or more for every headline, failures and momentum too, on one seed; at 0.3 M the
best of four for data-parallel, of three for synchronous and decoupled DiLoCo with 8
islands, of two for 1, 2 and 4 islands (the higher for one); other rows have that of 8.
At 2 M the best of three for data-parallel is the highest. Muon inside has the best of
what was tried on one seed, two rates for islands. 8 M tokens have the rates of 2 M.
The seed of the sweep is one of the pairs at 0.1 M and 2 M tokens.

Raw runs say their commit, a digest of their settings, device, text and learning rate
from 2026-11-30 on. Of the 924 before, none has the first two, 456 have neither device
nor text, and 518 no learning rate.

Command: `python benchmarks/quality.py --size 0.1m --minutes 60`; with a text of one's
own `--size 0.3m --text FOLDER`, `--rates` for the sweep alone, `--add FILE` for the raw
results of another machine. Cost: about a minute of one idle core per run at 0.1 M
parameters and 2 M tokens, 5 minutes at 8 M tokens, 9 minutes at 0.3 M. For a GPU there
is `gpu_hour.py`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import quality_report
import support
from machine import device, machine_facts, provenance
from quality_configs import HEADLINE_SEEDS, MIN_SEEDS, SIZES, Row
from quality_rows import rates, rows, same_runs

from diloco_jax.cluster.cluster import ALLOCATOR
from diloco_jax.config import DataConfig
from diloco_jax.data.corpus import load_corpus
from diloco_jax.files import write_json

RUN_TIMEOUT_S = 3 * 3600.0
RUNS_PER_PROCESS = 16

Job = tuple[str, str, int]
"""Size, row, seed."""


def main() -> int:
    """Do the missing runs within the time given, then write the report."""
    parser = support.parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="0.1m")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no run begins later"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--only", nargs="*", default=[], help="these rows, or groups of rows, alone"
    )
    parser.add_argument(
        "--rates", action="store_true", help="the sweep of learning rates alone"
    )
    parser.add_argument(
        "--seeds", type=int, default=HEADLINE_SEEDS, help="of each row, at most"
    )
    parser.add_argument(
        "--first-seed", type=int, default=0, help="where --only begins to count"
    )
    parser.add_argument(
        "--text", nargs="*", default=[], help="the corpus, if not the standard library"
    )
    parser.add_argument(
        "--add", nargs="*", type=Path, default=[], help="raw results of other machines"
    )
    options = parser.parse_args()
    path = options.out / "raw" / "quality.json"
    known: list[dict[str, Any]] = []
    for file in (path, *options.add):
        if file in options.add or file.exists():
            done = {_job(run) for run in known}
            runs = json.loads(file.read_bytes())["runs"]
            known += [run for run in runs if _job(run) not in done]
    # One thread each: two runs side by side are faster than one on two cores.
    os.environ.update(ALLOCATOR, NPROC="1", JAX_PLATFORMS="cpu")
    _refuse_mixed(known)
    _work(options, path, known)
    _refuse_mixed(known)
    return quality_report.write(options.out, __doc__, known)


def run_one(job: Job, text: tuple[str, ...]) -> dict[str, Any]:
    """Do one run in this process, on this text."""
    from diloco_jax import compilation

    size, name, seed = job
    row = {r.name: r for r in (*rows(SIZES[size]), *rates(SIZES[size]))}[name]
    data = dataclasses.replace(row.config.run.data, paths=text)
    run = dataclasses.replace(row.config.run, seed=seed, data=data)
    config = dataclasses.replace(row.config, run=run)
    compilation.use_cache(compilation.of_user())
    began = time.monotonic()
    if row.plain or row.moments_every:
        import quality_moments

        from diloco_jax import baseline
        from diloco_jax.config.resolving import resolve

        if row.plain:
            found = baseline.run(resolve(config))
        else:
            when = row.merges_power, row.merges_early
            found = quality_moments.run(config, row.moments_every, *when)
        result = {"loss": _loss(found), "tokens": found["tokens"]}
    else:
        from diloco_jax import emulate

        options = dataclasses.replace(row.options, chance_seed=seed)
        summary = emulate(config, options=options).summary
        islands = summary["islands"].values()
        result = {
            "loss": _loss(summary),
            "tokens": summary["tokens_merged"],
            "lost": sum(summary["tokens_lost"].values()),
            "merges": summary["merges"],
            "bytes_up": summary["bytes_up"],
            "bytes_down": summary["bytes_down"],
            "goodput": summary["goodput"],
            "participation": min(i["participation"] for i in islands),
            "restarts": sum(i["joins"] - 1 for i in islands),
        }
    result["seconds"] = round(time.monotonic() - began, 1)
    result |= device()
    result["text"] = _digest(data)
    result["rate"] = run.inner.learning_rate
    more: tuple[int | float, ...] = ()
    more += (row.moments_every,) if row.moments_every else ()
    more += (row.merges_power,) if row.merges_power != 1 else ()
    more += row.merges_early
    result |= provenance(row.config, row.options, row.plain, *more)
    return {"size": size, "row": name, "seed": seed, **result}


def _loss(found: Mapping[str, Any]) -> float:
    return math.nan if found["eval_loss"] is None else float(found["eval_loss"])


@functools.lru_cache(maxsize=1)
def _digest(data: DataConfig) -> str:
    return load_corpus(data.paths, data.validation_fraction).digest


def _wanted(options: Any) -> Iterator[tuple[Row, int]]:
    """Yield the sweep of rates, then all rows by seed; or those of `only`, by seed."""
    size = SIZES[options.size]
    found, swept = list(rows(size)), list(rates(size))
    if only := options.only:
        named: dict[str, list[Row]] = {}
        for row in (*found, *swept):
            named.setdefault(row.group, []).append(row)
        named |= {row.name: [row] for row in (*found, *swept)}
        unknown = [name for name in only if name not in named]
        if unknown:
            raise SystemExit(f"--only: no rows {unknown}; there are {list(named)}")
        first = options.first_seed
        for seed in range(first, first + options.seeds):
            yield from ((row, seed) for name in only for row in named[name])
        return
    chosen = [(row, 0) for row in swept]
    for seed in range(0 if options.rates else options.seeds):
        for row in found:
            if row.headline or seed < MIN_SEEDS:
                chosen.append((row, seed))
    # Headlines come first: the defaults depend on them.
    chosen.sort(key=lambda item: not item[0].headline and item[0].group != "rates")
    yield from chosen


def _job(run: dict[str, Any]) -> Job:
    """Return the job of a run, under the first of its names."""
    return run["size"], same_runs(run["size"])[run["row"]], run["seed"]


def _work(options: Any, path: Path, known: list[dict[str, Any]]) -> None:
    done = {_job(run) for run in known}
    wanted = dict.fromkeys(
        _job({"size": options.size, "row": row.name, "seed": seed})
        for row, seed in _wanted(options)
    )
    todo: list[Job] = [job for job in wanted if job not in done]
    total, text = len(todo), tuple(options.text)
    if todo:
        _refuse_other_text(options.size, text, known)
    deadline = time.monotonic() + 60 * options.minutes
    running: dict[Future[dict[str, Any]], Job] = {}
    pool = _pool(options.jobs)
    while running or (todo and time.monotonic() < deadline):
        while todo and len(running) < options.jobs and time.monotonic() < deadline:
            job = todo.pop(0)
            running[pool.submit(run_one, job, text)] = job
        ended, _ = concurrent.futures.wait(
            running, RUN_TIMEOUT_S, concurrent.futures.FIRST_COMPLETED
        )
        if running and not ended:
            print(f"nothing came within {RUN_TIMEOUT_S:g} s", file=sys.stderr)
            for process in multiprocessing.active_children():
                process.kill()
            break
        for future in ended:
            job = running.pop(future)
            if error := future.exception():
                print(f"{job} failed:", file=sys.stderr)
                traceback.print_exception(error)
                if isinstance(error, BrokenProcessPool):
                    pool = _pool(options.jobs)  # One died, and all others with it.
                continue
            known.append(future.result())
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json({**machine_facts(), "runs": known}, path)
            left = len(todo) + len(running)
            print(
                f"{time.strftime('%H:%M:%S')} {total - left}/{total} {known[-1]}",
                file=sys.stderr,
                flush=True,
            )
    pool.shutdown(wait=False, cancel_futures=True)


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Return processes that begin anew after some runs, to free compiled programs."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, spawn, max_tasks_per_child=RUNS_PER_PROCESS)


def _refuse_other_text(
    size: str, text: tuple[str, ...], known: list[dict[str, Any]]
) -> None:
    """Before anything is run, and kept."""
    texts = {run["text"] for run in known if run["size"] == size and run.get("text")}
    data = next(iter(rows(SIZES[size]))).config.run.data
    given = _digest(dataclasses.replace(data, paths=text)) if texts else ""
    if texts - {given}:
        raise SystemExit(
            f"runs at {size} are of the text {', '.join(sorted(texts))}, given is "
            f"{given} ({', '.join(text) or 'the standard library'}); give that text "
            f"as --text, or another --out"
        )


def _refuse_mixed(known: list[dict[str, Any]]) -> None:
    """Rows of one size are compared: they must be of one text, and have the learning
    rates that their names now stand for; as far as runs say either, older ones do not.
    """
    texts: dict[str, str] = {}
    by_size = {
        name: {row.name: row for row in (*rows(size), *rates(size))}
        for name, size in SIZES.items()
    }
    for run in known:
        size, text = run["size"], run.get("text")
        if text and texts.setdefault(size, text) != text:
            raise SystemExit(
                f"runs at {size} are of two texts, {texts[size]} and {text}; keep one "
                f"of them, or give another --text"
            )
        row = by_size[size].get(run["row"])
        rate = row.config.run.inner.learning_rate if row else None
        if rate is not None and run.get("rate", rate) != rate:
            raise SystemExit(
                f"{run['row']} at {size}, seed {run['seed']} was run at the learning "
                f"rate {run['rate']:g}, which now is {rate:g}; rename or drop it"
            )


if __name__ == "__main__":
    sys.exit(main())
