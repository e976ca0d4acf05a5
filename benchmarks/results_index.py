"""All raw results, each with the question that it answers and whether its bounds hold.

A page beside each says how it was measured, and has its tables. The load is that of the
machine at the end; a load above its cores means that others worked on it too.

Command: `python -m benchmarks.results_index`; it measures nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import support

FIGURE = support.RESULTS.parent / "figures" / "limits.py"
INDEX = "index.md"


def main() -> int:
    """Write the index of the raw results, and the figure of their bounds."""
    options = support.parser(__doc__).parse_args()
    raw = options.out / "raw"
    (raw / INDEX).write_text(told(raw))
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
        "machine": facts.get("machine", "").partition(", busy")[0],
    }


def others(raw: Path, described: set[str]) -> list[Path]:
    """Return the raw files without a page."""
    return [p for p in sorted(raw.glob("*.json")) if p.stem not in described]


if __name__ == "__main__":
    sys.exit(main())
