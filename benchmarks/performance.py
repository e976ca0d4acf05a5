"""The speed of everything, against its limits, from the raw results alone.

Each row is a benchmark of docs/results/raw: its bounds, what was measured, and whether
they hold. Machines and dates are those of the raw files; the load is that of the
machine at the end, and a load above its cores means that others worked on it too.

Command: `python -m benchmarks.performance`; it measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import support

UNKNOWN = "not measured"
FIGURE = support.RESULTS.parent / "figures" / "limits.py"


@dataclasses.dataclass(frozen=True)
class Row:
    """A benchmark of the table: the raw file, and what its figures leave open."""

    name: str
    measures: str
    raw: tuple[str, ...]
    note: str = ""
    """Parts that were not measured, and what is known of a bound that does not hold."""


ROWS = (
    Row(
        "overhead",
        "an island's step with a merge at every step, over the same loop alone",
        ("overhead",),
        "About half of what is above 1 are pages that the system clears for the "
        "temporaries of a step, live and alone; without them CPU is 1.025 and 1.030. "
        "The rest is XLA's work of takes and adoptions, and wake-ups of Python's "
        "threads.",
    ),
    Row(
        "inner_step",
        "the bundled model's step over a minimal one",
        ("inner_step",),
        "On a GPU, and against a compiled PyTorch step: not measured; `gpu_step.py` "
        "and `gpu_islands.py` do that on a machine that has one.",
    ),
    Row(
        "merge",
        "merges over a copy, by codec",
        ("merging",),
    ),
    Row(
        "wire",
        "uploads and fetches beside raw TLS",
        ("wire", "checksums"),
    ),
    Row(
        "written",
        "tape, metrics and logs, of the time of the steps",
        ("written",),
    ),
    Row(
        "wan",
        "islands behind slow links, over no limit and data-parallel training",
        ("wan",),
        "Where the ring of data-parallel training is slower than its formula, the "
        "times by the formula hold their bounds, too.",
    ),
    Row(
        "coordinator_scale",
        "cycles by islands and parameters; runs against their plan",
        ("coordinator_scale", "coordinator_load", "coordinator_memory", "large_run"),
    ),
    Row(
        "recovery",
        "start to first step and first merge",
        ("recovery", "workers"),
        "At 300 M the lead is away for 4.4 and 4.1 s when it is killed, a worker for "
        "4.5 and 5.3 s.",
    ),
    Row("data", "rows per second of one core", ("data",)),
    Row(
        "island_memory",
        "an island's memory over that of the loop alone and the anchors",
        ("island_memory",),
        "Residuals of error feedback, as large as the anchors, make 1.10 of it alone. "
        "The rest is what takes, adoptions and the wire hold at the peak, with holes "
        "between them; two runs before this one had 1.155 and 1.164.",
    ),
    Row(
        "simulator",
        "a day of 2.4 M chips, schedules of faults",
        ("simulator",),
        "Schedules are drawn as by the command: workers are among them.",
    ),
)


def main() -> int:
    """Write the page and its figure; return 1 if the folder has none of the raw
    files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=support.RESULTS)
    options = parser.parse_args()
    page = told(options.out / "raw")
    (options.out / "performance.md").write_text(page)
    if options.out == support.RESULTS:
        subprocess.run([sys.executable, FIGURE], check=True)
    return 0 if "raw/" in page else 1


def told(raw: Path) -> str:
    """Return the page on these raw files."""
    found = {
        row.name: [known(raw / f"{name}.json") for name in row.raw] for row in ROWS
    }
    title, _, introduction = (__doc__ or "").partition("\n")
    parts = [f"# {title.rstrip('.')}", introduction.strip()]
    parts.append("![Every bound against its limit](../figures/limits.svg)")
    parts.append(support.markdown_table(summary(row, found[row.name]) for row in ROWS))
    for row in ROWS:
        parts.append(f"## {row.name}")
        text = f"{row.measures[0].upper()}{row.measures[1:]}."
        parts.append(f"{text} {row.note}".strip())
        for name, facts in zip(row.raw, found[row.name], strict=True):
            if facts is None:
                parts.append(f"`{name}`: {UNKNOWN}.")
                continue
            about = [facts[key] for key in ("command", "date", "machine", "versions")]
            about.append(f"load {facts.get('load', 'not noted')}")
            links = f"[{name}]({name}.md) ([raw numbers](raw/{name}.json))"
            parts.append(f"{links}: {', '.join(about)}.")
            parts.append(support.markdown_table(map(bound, facts["checks"])))
    return support.wrapped("\n\n".join(parts) + "\n")


def known(path: Path) -> dict[str, Any] | None:
    """Return the raw results, None if there are none."""
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return facts


def summary(row: Row, found: list[dict[str, Any] | None]) -> dict[str, str]:
    """Return the row of the table."""
    checks = [check for facts in found if facts for check in facts["checks"]]
    broken = [check["what"] for check in checks if not check["holds"]]
    if not checks:
        holds = UNKNOWN
    elif broken:
        holds = f"**no**: {len(broken)} of {len(checks)} bounds do not"
    else:
        holds = f"yes, all {len(checks)}"
    if checks and None in found:
        holds += f"; a part {UNKNOWN}"
    return {
        "benchmark": f"[{row.name}](#{row.name})",
        "measures": row.measures,
        "holds": holds,
    }


def bound(check: dict[str, Any]) -> dict[str, str]:
    """Return the row of one bound."""
    return {
        "bound": check["what"],
        "target": check["bound"],
        "measured": check["measured"],
        "holds": "yes" if check["holds"] else f"**no**{distance(check)}",
    }


def distance(check: dict[str, Any]) -> str:
    """Return by how much it does not hold, if both are numbers."""
    try:
        measured, target = float(check["measured"]), float(check["bound"].split()[-1])
    except ValueError:
        return ""
    return f", {measured / target:.2f} of it" if target else ""


if __name__ == "__main__":
    sys.exit(main())
