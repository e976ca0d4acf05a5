"""Shared parts of the benchmarks: run a config as real processes, read its files, check
bounds, write the results.

A result is a Markdown file in docs/results/raw, with the raw numbers as JSON beside it.
Pages in docs/results answer what people ask, from those figures.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from machine import FACTS, CpuSamples, machine_facts, sample_cpu

from diloco_jax import run_files
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import Config
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.files import write_json
from diloco_jax.hardware.machines import Measurements
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.process import Interruptible

DILOCO = (sys.executable, "-m", "diloco_jax.cli")
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SAMPLE_EVERY_S = 1.0
STOP_S = 30.0


def script(main: Callable[[], int]) -> NoReturn:
    """Be a benchmark's process: any request to end raises in `main`, as Ctrl-C does, so
    that what it has started is ended and its folders go."""
    try:
        with Interruptible():
            code = main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = EXIT_FAILED
    sys.exit(code)


class RunError(RuntimeError):
    """`diloco run` did not end as it should: tells how, with its last output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The files and figures of one finished `diloco run`."""

    config: Config
    workdir: Path
    summary: dict[str, Any]
    tape: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    cpu: CpuSamples

    def window(self) -> tuple[float, float]:
        """Unix seconds from when all islands train to when the first one stops."""
        training = collections.defaultdict(list)
        for line in self.metrics:
            if line["kind"] == "island" and line["phase"] == "training":
                training[line["island"]].append(line["time"])
        return max(t[0] for t in training.values()), min(
            t[-1] for t in training.values()
        )

    def cpu_share(self, name: str) -> float:
        """CPU seconds per second that a process used in `window`, all its threads."""
        began, ended = self.window()
        used = seconds = 0.0
        for (who, _), samples in self.cpu.items():
            inside = [s for s in samples if began <= s[0] <= ended]
            if who == name and len(inside) > 1:
                used += inside[-1][1] - inside[0][1]
                seconds += inside[-1][0] - inside[0][0]
        return used / seconds if seconds else float("nan")


def run_config(config: Config, label: str, timeout_s: float) -> Run:
    """Run the config with `diloco run` in a folder that is removed afterwards.

    Raises RunError if it ends with another code than 0 or not within `timeout_s`.
    """
    print(f"{time.strftime('%H:%M:%S')} {label}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        return run_in(config, Path(folder), timeout_s)


def run_in(
    config: Config, folder: Path, timeout_s: float, command: Sequence[str] = ("run",)
) -> Run:
    """Run like `run_config`; files stay in `folder`. command: `diloco run` or `diloco
    chaos`, and its options."""
    workdir, log = folder / "run", folder / "diloco.log"
    path = folder / run_files.CONFIG
    write_json(dataclasses.asdict(config), path)
    name, *options = command
    words = [*DILOCO, name, str(path), "--workdir", str(workdir), *options]
    with log.open("wb") as output:
        process = start_child(words, {}, output, output)
    cpu: CpuSamples = collections.defaultdict(list)
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            sample_cpu(workdir, cpu)
            _wait(process, SAMPLE_EVERY_S)
        if process.returncode is None:
            raise RunError(f"not done within {timeout_s:g} s:\n{_tail(log)}")
        if process.returncode:
            raise RunError(f"exit code {process.returncode}:\n{_tail(log)}")
    finally:
        _end(process)
    return Run(
        config=config,
        workdir=workdir,
        summary=json.loads((workdir / run_files.SUMMARY).read_bytes()),
        tape=list(read_tape(workdir / run_files.TAPE)),
        metrics=list(read_metrics(workdir)),
        cpu=dict(cpu),
    )


def fragment_sizes(config: Config) -> tuple[int, ...]:
    """Number of parameters of each fragment."""
    from diloco_jax.models.build import build, build_plan

    return build_plan(config.run, build(config.run)).sizes


@dataclasses.dataclass(frozen=True)
class Check:
    """One bound and what was measured against it, as text for people."""

    what: str
    measured: str
    bound: str
    holds: bool


def at_most(what: str, measured: float, bound: float, form: str = ".3f") -> Check:
    """Check that measured <= bound; NaN fails."""
    return Check(
        what, format(measured, form), f"<= {bound:{form}}", bool(measured <= bound)
    )


def at_least(what: str, measured: float, bound: float, form: str = ".3f") -> Check:
    """Check that measured >= bound; NaN fails."""
    return Check(
        what, format(measured, form), f">= {bound:{form}}", bool(measured >= bound)
    )


def none_of(what: str, problems: Sequence[str]) -> Check:
    """Check that there are no problems."""
    return Check(what, "; ".join(problems) or "none", "none", not problems)


def each(what: str, checks: Iterable[Check]) -> list[Check]:
    """Return the checks of some rows; if there is no row, one check that fails, so that
    a bound does not vanish with the rows that it is about."""
    return list(checks) or [Check(what, "no row", "a row at least", False)]


def parser(doc: str) -> argparse.ArgumentParser:
    """Command-line parser of a benchmark, `--out` included."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return made


def quick_parser(doc: str) -> argparse.ArgumentParser:
    """Command-line parser of a benchmark that has a short form, for `deliver`."""
    made = parser(doc)
    made.add_argument("--quick", action="store_true", help="within a minute, no page")
    made.add_argument("--json", action="store_true", help="print the raw numbers")
    return made


def deliver(
    options: argparse.Namespace,
    name: str,
    doc: str,
    tables: Mapping[str, Iterable[Mapping[str, Any]]],
    checks: Sequence[Check],
    raw: Mapping[str, Any],
    facts: Mapping[str, str] | None = None,
) -> int:
    """Write the results as `write_results` does, but print those of a quick run;
    return the exit code. options: of `quick_parser`."""
    checks = each("bounds", checks)
    if options.json:
        told = {"checks": [dataclasses.asdict(check) for check in checks], **raw}
        print(json.dumps({**(facts or machine_facts()), **told}))
    if not options.quick:
        return write_results(options.out, name, doc, tables, checks, raw, facts=facts)
    for head, rows in tables.items():
        print(f"{head}\n\n{markdown_table(rows)}\n", file=sys.stderr)
    print(markdown_table(map(dataclasses.asdict, checks)), file=sys.stderr)
    return 0 if all(check.holds for check in checks) else 1


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, with the lowest and the highest value."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def write_measured(path: Path, **values: float) -> None:
    """Add values to a file for `diloco plan --measured`, by field of `Measurements`,
    with this command, machine and day as their origin."""
    facts = machine_facts()
    origin = f"{facts['command']}, {facts['machine']}, {facts['date']}"
    before = json.loads(path.read_bytes()) if path.exists() else {}
    added = {name: {"value": v, "origin": origin} for name, v in values.items()}
    found = msgspec.convert(before | added, Measurements)
    write_json(msgspec.to_builtins(found), path)


def write_results(
    out: Path,
    name: str,
    doc: str,
    tables: Mapping[str, Iterable[Mapping[str, Any]]],
    checks: Sequence[Check],
    raw: Mapping[str, Any],
    facts: Mapping[str, str] | None = None,
) -> int:
    """Writes raw/NAME.md and raw/NAME.json under `out`; returns the exit code.

    doc: the script's docstring, which becomes title and introduction. tables: rows by
    heading; a row is a mapping of column to value. facts: of the measurement, if it was
    not now (`measured_before`).
    """
    title, _, introduction = doc.partition("\n")
    facts, checks = facts or machine_facts(), each("bounds", checks)
    bounds = [
        {
            "bound": check.what,
            "measured": check.measured,
            "allowed": check.bound,
            "holds": "yes" if check.holds else "**NO**",
        }
        for check in checks
    ]
    sections = {"Bounds": bounds, **tables}
    text = [f"# {title.rstrip('.')}", introduction.strip()]
    text.append("\n".join(f"- {key}: {value}" for key, value in facts.items()))
    text += [f"## {head}\n\n{markdown_table(rows)}" for head, rows in sections.items()]
    text.append(f"Raw numbers: [{name}.json]({name}.json).")
    (out / "raw").mkdir(parents=True, exist_ok=True)
    (out / "raw" / f"{name}.md").write_text("\n\n".join(text) + "\n")
    checked = [dataclasses.asdict(check) for check in checks]
    write_json({**facts, "checks": checked, **raw}, out / "raw" / f"{name}.json")
    print(markdown_table(bounds), file=sys.stderr)
    return 0 if all(check.holds for check in checks) else 1


def measured_before(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the machine facts of raw results; older ones have no commit."""
    return {fact: raw[fact] for fact in FACTS if fact in raw}


def markdown_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows with the columns of the first one, in its order."""
    rows = list(rows)
    if not rows:
        return "(none)"
    columns = list(rows[0])
    cells = [columns, ["---"] * len(columns)]
    cells += [[str(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def wrapped(markdown: str, width: int = 100) -> str:
    """The text with its prose wrapped; tables, code and headings stay as they are."""
    out: list[str] = []
    prose: list[str] = []

    def flush() -> None:
        if prose:
            # A line that begins with a percent sign is a comment on the site.
            text = " ".join(line.strip() for line in prose).replace(" %", "\xa0%")
            indent = prose[0][: len(prose[0]) - len(prose[0].lstrip())]
            mark = re.match(r"([-*]|\d+\.) ", text)
            rest = indent + " " * len(mark[0] if mark else "")
            lines = textwrap.wrap(
                text,
                width,
                initial_indent=indent,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
            out.extend(line.replace("\xa0", " ") for line in lines)
            prose.clear()

    in_code = False
    for line in markdown.splitlines():
        fence = line.lstrip().startswith("```")
        if in_code or fence or line.lstrip()[:1] in ("", "|", "#", "<", "!"):
            flush()
            out.append(line)
            in_code ^= fence
            continue
        if re.match(r" *([-*]|\d+\.) ", line):
            flush()
        prose.append(line)
    flush()
    return "\n".join(out) + "\n" * markdown.endswith("\n")


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask `diloco run` to end its processes; kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        _wait(process, STOP_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
