"""All raw results, each with the question that it answers and whether its bounds hold.

A page beside each says how it was measured, and has its tables. The load is that of the
machine at the end; a load above its cores means that others worked on it too.

Command: `python -m benchmarks.results_index`; it measures nothing.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import support

FIGURE = support.RESULTS.parent / "figures" / "limits.py"
INDEX, PERFORMANCE = "index.md", "performance.md"
IN_A_ROW = 66
"""Characters of a bound's name on the page, whose rows have a width."""
TITLES = (
    "## What does not hold",
    "## Too few runs, whatever they show",
    "## The tightest of each that holds",
)
NEEDED = "are needed)"
"""Last words of a bound that does not hold before there are more runs."""
INTRODUCTION = """
# Performance: measures against their goals

Each benchmark holds what it measures to bounds. Here are all that do not hold, the
worst first, then those of too few runs, and the tightest of each benchmark that does
hold. The command of a row is `python -m benchmarks.NAME`; its page
has the method, the limit of the machine where there is one, all tables, load and
versions. A row is as old as its date: the code has changed since.

![Bounds against their limits](../figures/limits.svg)
"""


class Bound(NamedTuple):
    """One bound whose limit is a number above 0, or that does not hold."""

    what: str
    used: float
    """Share of the limit that is used; at most 1 holds. Infinite for what has no share,
    and does not hold."""
    measured: str
    limit: str
    holds: bool

    def within(self, most: int) -> str:
        """Return its name in at most so many characters, both ends of it, without how
        many pairs are needed."""
        what = self.what.partition(" (")[0] if self.too_few else self.what
        if len(what) <= most:
            return what
        return f"{what[: most // 2 - 2]} ... {what[3 - most // 2 :]}"

    @property
    def too_few(self) -> bool:
        """True if it cannot hold before there are more runs, whatever they show."""
        return not self.holds and self.what.endswith(NEEDED)


def main() -> int:
    """Write the index of the raw results, and the figure of their bounds."""
    options = support.parser(__doc__).parse_args()
    raw = options.out / "raw"
    (raw / INDEX).write_text(told(raw))
    (options.out / PERFORMANCE).write_text(performance(raw))
    if options.out == support.RESULTS:
        subprocess.run([sys.executable, FIGURE], check=True)
    return 0


def told(raw: Path) -> str:
    """Return the index of a folder of raw results."""
    title, _, introduction = (__doc__ or "").partition("\n")
    pages = sorted(page for page in raw.glob("*.md") if page.name != INDEX)
    measured = [row for page in pages if (row := row_of(page))]
    described = {page.stem for page in pages}
    alone = [f"[{p.name}]({p.name})" for p in others(raw, described)]
    parts = [
        f"# {title.rstrip('.')}",
        introduction.strip(),
        "![Bounds against their limits](../../figures/limits.svg)",
        support.markdown_table(measured),
        "Without a page of their own, named by the pages that show them: "
        f"{', '.join(alone)}.",
    ]
    return support.wrapped("\n\n".join(parts) + "\n")


def row_of(page: Path) -> dict[str, Any]:
    """Return the row of a page; its bounds are those of the JSON file beside it."""
    found = page.with_suffix(".json")
    facts = json.loads(found.read_bytes()) if found.exists() else {}
    title = page.read_text().partition("\n")[0].lstrip("# ")
    broken = [check for check in facts.get("checks", ()) if not check["holds"]]
    total = len(facts.get("checks", ()))
    held = f"**{len(broken)} of {total} do not**" if broken else f"all {total}"
    return {
        "result": f"[{page.stem}]({page.name})",
        "measures": title,
        "bounds hold": held if total else "",
        "date": facts.get("date", "").partition(" ")[0],
        "machine": machine_of(facts),
    }


def performance(raw: Path) -> str:
    """Return the page of the bounds that do not hold, and of the tightest others."""
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in TITLES}
    broken, too_few, tightest = found.values()
    for path in sorted(raw.glob("*.json")):
        for bound in telling(bounds_of(path)):
            row = {**row_of_bound(path, bound), "used": bound.used}
            failed = too_few if bound.too_few else broken
            (tightest if bound.holds else failed).append(row)
    parts = [support.wrapped(INTRODUCTION.strip())]
    for title, rows in found.items():
        rows.sort(key=lambda row: -row.pop("used"))
        parts += [title, support.markdown_table(rows)]
    return "\n\n".join(parts) + "\n"


def row_of_bound(path: Path, bound: Bound) -> dict[str, Any]:
    """Return the row of one bound of the raw results in this file."""
    facts = json.loads(path.read_bytes())
    name = path.stem
    linked = path.with_suffix(".md").exists()
    return {
        "benchmark": f"[{name}](raw/{name}.md)" if linked else name,
        "measure": bound.within(IN_A_ROW),
        "goal": bound.limit,
        "seen": bound.measured,
        "date": facts.get("date", "").partition(" ")[0],
        "machine": machine_of(facts).split("(R)")[0].removesuffix(", 24 GiB"),
    }


def machine_of(facts: dict[str, Any]) -> str:
    """Return the machine of raw results, without what kept it busy."""
    machine: str = facts.get("machine", "").partition(", busy")[0]
    return re.sub(r"^1 cores\b", "1 core", machine)


def telling(bounds: list[Bound]) -> list[Bound]:
    """Return those that do not hold, the worst first, and the tightest of the rest.
    What is counted has no margin."""
    ordered = sorted(bounds, key=lambda bound: -bound.used)
    broken = [bound for bound in ordered if not bound.holds]
    held = [bound for bound in ordered if bound.holds and "." in bound.limit]
    return [*broken, *held[:1]]


def bounds_of(path: Path) -> list[Bound]:
    """Return the bounds of these raw results."""
    read = json.loads(path.read_bytes())
    found = []
    for check in read.get("checks", []) if isinstance(read, dict) else []:
        used = _share_used(check)
        if used is not None or not check["holds"]:
            what, told = check["what"], check["measured"]
            used = math.inf if used is None else used
            found.append(Bound(what, used, told, check["bound"], check["holds"]))
    return found


def _share_used(check: dict[str, Any]) -> float | None:
    """Return the share of a check's limit that is used; None if it has none."""
    sign, _, text = check["bound"].partition(" ")
    try:
        measured, limit = (
            float(words.replace(",", "")) for words in (check["measured"], text)
        )
    except ValueError:
        return None
    if sign not in ("<=", ">=") or limit <= 0:
        return None
    return measured / limit if sign == "<=" else limit / max(measured, 1e-12)


def others(raw: Path, described: set[str]) -> list[Path]:
    """Return the raw files without a page."""
    return [p for p in sorted(raw.glob("*.json")) if p.stem not in described]


if __name__ == "__main__":
    sys.exit(main())
