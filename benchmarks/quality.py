"""Quality at equal tokens: what decoupling, codecs, merge and adopt rules cost.

Question: how far is the validation loss of each way to put islands' work together from
its baseline, on real text, at equal tokens and with paired seeds?

Every run is emulated (`diloco emulate`: the real policy, the real arithmetic, virtual
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
crypto, security, ipc and init; 10,039 files, digest 8834d04465440715), 2.2 MB of which
are held out; 2 M and the first three seeds of 0.3 M ran mostly on an NVIDIA H100 (jax
0.11.2, Python 3.12.3), which up to 12 runs shared, later seeds on a CPU. Pairs are of
one machine, but two of five with data-parallel, whose seeds 1 and 2 ran on a CPU.

At 0.3 M parameters, 7 M tokens, the best of four learning rates for data-parallel, of
three for synchronous and decoupled DiLoCo with 8 islands, of two for 1, 2 and 4 islands
(other rows have that of 8; at 2 M data-parallel's best of three is the highest):

- Over synchronous DiLoCo, five pairs: 4 fast + 4 slow islands -1.0 % +- 0.9, decoupled
  -0.1 % +- 0.6, failures -1.7 % +- 0.5. One island with Nesterov 0.4 / 0.6 over
  data-parallel: -1.5 % +- 0.8 (five). Over bf16, seven pairs (three had int8 at -0.1 %
  +- 0.8, then seven were decided on): int8 -0.05 % +- 0.27, int4 +0.1 % +- 0.4.
- The gap to data-parallel: 1.8 % +- 1.1 and 4.7 +- 0.7 with 2 and 4 islands (four
  pairs), 9.0 +- 1.5 with 8 (five). At 2 M parameters and 40 M tokens, one seed of each:
  3.8, 6.5 and 12.0 %, and -0.4 % with one island; synchronous DiLoCo 9.1 %, so
  decoupled is 2.7 % behind it there, at twice the rate 5 % ahead: one seed shows
  neither. From 0.04 M to 2 M the gap does not fall with size; the published line, which
  begins at 35 M, does.

At 0.1 M parameters. What has one seed is a lead; and 8 M tokens say more than 2 M,
where the same run with other rounding differs by some 0.6 %.

- **Deltas that missed their merge** were taken out of their island's parameters until
  the next one (`adopt = "rebase"`, rows ", rebase"). Now they stay (`"keep"`,
  docs/design/pending_deltas.md). 2 M tokens, three pairs each, kept over taken out: no
  time for grace -4.6 % +- 2.8, K = 1 without grace -5.2 +- 3.0, unequal batches and
  speeds -1.3 +- 0.6; where few deltas are late no difference is shown (+0.9 +- 1.4 with
  4 fast + 4 slow islands, +0.5 +- 1.0 with failures). 8 M tokens: 4 fast + 4 slow
  islands +0.1 % +- 0.5 (thirteen pairs; with Nesterov 0.4 / 0.6 +0.3 +- 1.9, three),
  failures -0.2 +- 0.6 (six).
- **Merges that some live islands are not in** went as far as all others, until the
  rows "merges at full length" showed what that costs. Now they go as far as their share
  (docs/design/partial_merges.md). 2 M tokens, three pairs each, full length over
  scaled, both under `rebase`: unequal batches and speeds +8.2 % +- 1.3 (uniform
  weights +5.6 +- 2.7, tokens x rate +11.9 +- 4.1), no time for grace +6.8 +- 1.8, 4
  fast + 4 slow +1.1 +- 2.8, failures +1.0 +- 1.5. Rows whose islands are in all merges
  are as they were.
- Over synchronous DiLoCo, 8 M tokens: decoupled +0.5 % +- 0.3 (thirteen pairs), 4 fast
  + 4 slow islands -0.3 % +- 0.6 (thirteen), failures -1.0 % +- 0.6 (six). So overlap
  and fragments cost half a percent there, and islands of two speeds and failures
  nothing on top that is as large.
- With 2 M tokens: 4 fast + 4 slow -0.3 % +- 1.3, failures -2.5 +- 1.7, decoupled +0.3
  +- 1.7 (three pairs). Failures leave fewer islands at a time, so smaller batches and
  more merges: against seven of the eight islands, which have that too, +0.8 +- 1.8.
- An island whose steps are twice as large and take twice as long is in two of three
  merges, and the run ends as with 8 equal ones: +0.2 % +- 2.2 (three pairs).
- Weights, unequal batches and speeds, 2 M tokens, three pairs: by tokens -1.6 % +- 2.4
  over 8 equal islands. Uniform +1.5 +- 1.8 and tokens x rate +0.6 +- 6.0 over by
  tokens: no difference is shown. At full length uniform was ahead, in four pairs of
  four, and tokens x rate behind in three of three: there weights said, too, how much
  too far a merge went.
- int8 both ways: +0.14 % +- 0.14 over bf16, fourteen pairs with 8 M tokens (as many as
  there was time for; seven showed +0.2 +- 0.3). int4: +0.20 % +- 0.18, twenty pairs
  (seven showed +0.4 +- 0.5, thirteen +0.3 +- 0.3; then twenty were decided on).
  Without error feedback, 2 M tokens, three pairs: int8 -0.1 % +- 0.4, int4 +0.3 +- 1.9
  over bf16.
- With the outer step of the preset (Nesterov 0.4 / 0.6) everywhere, 8 M tokens, three
  pairs: synchronous DiLoCo gains 2.0 % +- 2.0; decoupled is 0.35 % +- 0.30 behind it, 4
  fast + 4 slow islands 1.2 % +- 2.2 (under `rebase` 0.9 +- 1.0).
- Islands that are out of phase need time for the grace window (docs/design/grace.md):
  without it they lost 18 % over synchronous DiLoCo at first, 11 % since partial merges
  are scaled, and lose 5.4 % +- 3.5 (three pairs) since deltas are kept. An alert says
  so.
- One island with an outer step of 1 is plain training but for rounding, -0.1 % +- 2.2
  (three pairs, 2 M tokens). With Nesterov 0.4 / 0.6 it is ahead of plain training by
  1.6 % +- 1.1 with 8 M tokens (eight pairs).
- The gap of 8 islands to data-parallel: 16.7 % +- 8.3 with 2 M tokens (three
  pairs), 7.7 % +- 0.9 with 8 M (eight), 5.3 % +- 1.7 with 0.4 / 0.6. Below 2 M it
  rises with tokens (10 % +- 6 and 13 % +- 5 at a quarter and a half of them). By model
  size, 19 or 20 tokens per parameter: 12.0 % +- 3.3 at 0.04 M, 17 % at 0.1 M; for more
  see above. With smaller batches, which make more steps of as many tokens, it is
  smaller (10 % +- 4 at 8 sequences; data-parallel gains 11 % +- 5 by them, 8 islands 16
  +- 3). 2, 4 and 16 islands: 4.5 +- 12.3, 9.0 +- 10.6, 26 % +- 8, at the learning rate
  that is best for 8, which is half of data-parallel's best; 2 and 4 with 8 M tokens 2.3
  +- 4.8 and 3.7 +- 2.9 (three pairs each).
- Islands that each have a part of the text, in order of the files' names: -1.6 % +- 2.3
  over 8 that share all of it; one of 8 that leaves when half is done, which makes for
  more merges: -1.0 % +- 0.3 over 8 that stay (2 M tokens, three pairs each).
- Muon inside, 2 M tokens, three pairs, rates swept with two points: data-parallel gains
  12 % +- 4, decoupled 14 % +- 4, and that is as good as synchronous with it (-0.3 % +-
  2.1); the gap to data-parallel stays: 5 % +- 3, 7 +- 4 and 14 +- 6 with 2, 4 and 8
  islands. With it H = 4 is 2.7 % +- 1.9 ahead of 12; 0.4 / 0.6 is not (+1.6 +- 2.8).
- Outer momentum: what matters is how far it goes in all, lr / (1 - mu), and the cycle.
  As far as the islands went (0.4 / 0.6), it is 2.3 % +- 2.8 better than none with 8 M
  tokens (H = 12, three pairs of three; H = 4 one), and within 3 % of none with 2 M.
  Seven times as far (0.7 / 0.9) it is worse everywhere, the more so the shorter the
  cycle: 5 % at H = 48, 9 % at H = 12, 72 % at H = 4 with 8 M tokens. Four times as far
  (0.4 / 0.9) is -1.2 and +0.2 % over none at H = 24 and 325 merges, eight times (0.8 /
  0.9) 6 % worse. (One seed where no other number stands.) With 2 M tokens, three pairs:
  0.7 / 0.9 is 9 % +- 3, 22 +- 1 and 43 +- 8 worse than none at H = 48, 12 and 4; a
  larger step without momentum (1.4) 7 % +- 5, at H = 12.
- RDA over the mean, 2 M tokens: 1.8 % +- 0.8 ahead (three pairs). The quickstart's rows
  (docs/results/quickstart.md; 3 unequal islands, H = 2) have the mean 1 % ahead, in two
  of three pairs. A smaller H is better: 12 to 4 -1.8 % +- 2.8.
- Fragments by layer +0.7 % +- 2.2, by tensor -0.0 +- 2.1 over as many by size; all in
  one (P = 1) +1.1 +- 0.7 over 12 (2 M tokens, three pairs).
- Adopt rules, 2 M tokens that count, over rebase at tau 1, three pairs: rebase +1.3 %
  +- 0.5 at tau 2 and +3.8 +- 0.6 at tau 4; overwrite -2.3 +- 1.4, -3.8 +- 2.2 and -8.2
  +- 5.2 at tau 1, 2 and 4, for which its islands computed 9, 20 and 50 % more tokens,
  since steps that it overwrites do not count; blend +2.8 +- 1.7, +2.8 +- 0.8 and +3.2
  +- 1.5. So a longer overlap costs, other than predicted. As many more tokens would
  lower rebase's loss by about 2, 4 and 9 %, if it goes on as from 2 to 8 M: most of the
  2, 5 and 11 % by which overwrite is ahead of it. With 20 % more tokens rebase was not
  run. Nobody is late in these rows, so keep is rebase.

The defaults, and what each follows from:

- partial merges scaled: better in every pair with 2 M tokens. With 8 M no difference is
  shown where islands are in nearly all merges (4 fast + 4 slow +0.6 % +- 0.8, failures
  -0.0 +- 0.8 at full length); the others were not run.
- codecs int8 both ways: at most 0.3 % behind bf16 at 8 M tokens (upper end of the
  interval), half its bytes. int4 halves them again, with 0.4 % as that end.
- merge `rda`: ahead of the mean in three pairs of three with 8 islands (1.3 to 1.8
  points in the paper).
- adopt `keep`: ahead of `rebase` in three of six rows where many deltas are late, by 1
  to 5 %; elsewhere no difference is shown (upper ends of the intervals 0.6 and 0.4 %
  with 8 M tokens where few are). No step is lost, and most of what `overwrite` is ahead
  by, it computes more.
- weights by tokens: the design's, and nothing is ahead of it.
- K = 1, gamma = 0.8, tau = 2: the paper's. On 4 fast + 4 slow islands, 2 M tokens,
  three pairs: waiting for all (K = 8) is 0.9 % +- 0.8 better, and costs their time; not
  waiting at all 5.3 +- 1.3 worse; gamma = 0.99 1.1 +- 0.2 better, which is not taken
  before it is tried on links that vary; tau = 4 shows nothing (-1.2 +- 1.3).
- H = P = 24: the paper's, for its traffic. Where the link carries more, take less: the
  quickstart has 4.
- outer step: by merges per fragment and H, see `core/outer.py`. None of momentum below
  150 merges, Nesterov 0.4 / 0.6 from there on, 0.4 / 0.9 from 200 merges and H = 24 on,
  which is the published recipe (arXiv 2503.09799) for one island, because RDA keeps the
  length of one island's delta; it was not compared with 0.4 / 0.6 there. The 0.8 that
  is published for a mean of 8 was the default until these rows.
- AdamW inside: Muon is better in every row, and the quickstart takes it. It is not the
  default because each chip orthogonalises whole matrices: about 20 x d_model FLOP per
  parameter and step, which for the 12 B reference (d_model 3840) is 2 s of a v5p beside
  a step of 1 s, and `diloco plan` of the toy case finds half as many bytes again
  gathered.

Command: `python benchmarks/quality.py --size 0.1m --minutes 60`; with a text of one's
own and a GPU `--size 2m --text FOLDER --platform cuda --jobs 8`, `--rates` for the
sweep alone, `--add FILE` for the raw results of another machine. Cost: about a minute
of one idle core per run at 0.1 M parameters and 2 M tokens, 5 minutes at 8 M tokens, 9
minutes at 0.3 M; on an H100 that 8 runs share 3 minutes at 0.3 M and 6 at 2 M.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import quality_report
import support
from machine import machine_facts
from quality_configs import SIZES, Row
from quality_rows import rates, rows, same_runs

from diloco_jax.cluster.commands import HUGE_PAGES
from diloco_jax.config import DataConfig
from diloco_jax.data.corpus import load_corpus
from diloco_jax.loading import write_json

RUN_TIMEOUT_S = 3 * 3600.0
RUNS_PER_PROCESS = 16
MIN_SEEDS, HEADLINE_SEEDS = 3, 5

Job = tuple[str, str, int]
"""Size, row, seed."""


def main() -> int:
    """Does what is missing within the time given, then writes the report."""
    parser = support.parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="0.1m")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no run begins later"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--only", nargs="*", default=[], help="these rows alone, in this order"
    )
    parser.add_argument(
        "--rates", action="store_true", help="the sweep of learning rates alone"
    )
    parser.add_argument(
        "--seeds", type=int, default=HEADLINE_SEEDS, help="of each row, at most"
    )
    parser.add_argument(
        "--text", nargs="*", default=[], help="the corpus, if not the standard library"
    )
    parser.add_argument("--platform", default="cpu", help='"cpu" or "cuda"')
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
    # One thread each: two runs side by side are faster than one on two cores. Of a
    # GPU's memory each takes what it needs.
    os.environ.update(HUGE_PAGES)
    os.environ.update(NPROC="1", JAX_PLATFORMS=options.platform)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    _refuse_mixed(known)
    _work(options, path, known)
    _refuse_mixed(known)
    return quality_report.write(options.out, __doc__, known)


def run_one(job: Job, text: tuple[str, ...]) -> dict[str, Any]:
    """One run in this process, on this text."""
    import jax

    from diloco_jax import compilation

    size, name, seed = job
    row = {r.name: r for r in (*rows(SIZES[size]), *rates(SIZES[size]))}[name]
    data = dataclasses.replace(row.config.run.data, paths=text)
    run = dataclasses.replace(row.config.run, seed=seed, data=data)
    config = dataclasses.replace(row.config, run=run)
    compilation.use_cache(compilation.of_user())
    began = time.monotonic()
    if row.plain:
        from diloco_jax import baseline
        from diloco_jax.loading import resolve

        found = baseline.run(resolve(config))
        result = {"loss": found["eval_loss"], "tokens": found["tokens"]}
    else:
        from diloco_jax import emulate

        options = dataclasses.replace(row.options, chance_seed=seed)
        summary = emulate(config, options=options).summary
        islands = summary["islands"].values()
        result = {
            "loss": summary["eval_loss"],
            "tokens": summary["tokens_merged"],
            "lost": sum(summary["tokens_lost"].values()),
            "merges": summary["merges"],
            "goodput": summary["goodput"],
            "participation": min(i["participation"] for i in islands),
            "restarts": sum(i["joins"] - 1 for i in islands),
        }
    result["seconds"] = round(time.monotonic() - began, 1)
    result["device"] = jax.devices()[0].device_kind
    result["text"] = _digest(data)
    result["rate"] = run.inner.learning_rate
    return {"size": size, "row": name, "seed": seed, **result}


@functools.lru_cache(maxsize=1)
def _digest(data: DataConfig) -> str:
    return load_corpus(data.paths, data.validation_fraction).digest


def _wanted(options: Any) -> Iterator[tuple[Row, int]]:
    """First the sweep of rates, then all rows by seed; or those of `only`, by seed."""
    size = SIZES[options.size]
    found, swept = list(rows(size)), list(rates(size))
    if only := options.only:
        by_name = {row.name: row for row in (*found, *swept)}
        unknown = [name for name in only if name not in by_name]
        if unknown:
            raise SystemExit(f"--only: no rows {unknown}; there are {list(by_name)}")
        for seed in range(options.seeds):
            yield from ((by_name[name], seed) for name in only)
        return
    chosen = [(row, 0) for row in swept]
    for seed in range(0 if options.rates else options.seeds):
        for row in found:
            if row.headline or seed < MIN_SEEDS:
                chosen.append((row, seed))
    # Headlines first: they are what the defaults hang on.
    chosen.sort(key=lambda item: not item[0].headline and item[0].group != "rates")
    yield from chosen


def _job(run: dict[str, Any]) -> Job:
    """Under the first of its names."""
    return run["size"], same_runs(run["size"])[run["row"]], run["seed"]


def _work(options: Any, path: Path, known: list[dict[str, Any]]) -> None:
    done = {_job(run) for run in known}
    wanted = dict.fromkeys(
        _job({"size": options.size, "row": row.name, "seed": seed})
        for row, seed in _wanted(options)
    )
    todo: list[Job] = [job for job in wanted if job not in done]
    deadline = time.monotonic() + 60 * options.minutes
    total, text = len(todo), tuple(options.text)
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
    """Processes that begin anew after some runs: what they compile stays with them."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, spawn, max_tasks_per_child=RUNS_PER_PROCESS)


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
