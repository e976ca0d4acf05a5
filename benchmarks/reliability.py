"""The page on reliability, from raw results: each part by the script that measured it.

Command: `python -m benchmarks.reliability`; it measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import support
from machine import FACTS, machine_facts

from diloco_jax.files import write_json

PAGE = "reliability"
PARTS = (
    "soak",
    "soak_often",
    "coordinator_kills",
    "fault_matrix",
)
"""Raw results of the page, in order."""
TITLE = (
    "Runs under faults: an hour of them, killed coordinators, and single ones by phase"
)


def main() -> int:
    """Write the page."""
    parser = support.parser(__doc__)
    options = parser.parse_args()
    write_page(options.out)
    return 0


def deliver(
    options: argparse.Namespace,
    name: str,
    doc: str,
    tables: Mapping[str, Iterable[Mapping[str, Any]]],
    checks: Sequence[support.Check],
    raw: Mapping[str, Any],
) -> int:
    """Write the raw results of a part and the page anew, but print those of a quick
    run; return the exit code. options: of `support.quick_parser`."""
    if options.quick:
        return support.deliver(options, name, doc, tables, checks, raw)
    title, _, text = doc.partition("\n")
    checks = support.each("bounds", checks)
    part: dict[str, Any] = {
        "title": title.rstrip("."),
        "introduction": text.strip(),
        "checks": [dataclasses.asdict(check) for check in checks],
        "tables": {head: list(rows) for head, rows in tables.items()},
    }
    (options.out / "raw").mkdir(parents=True, exist_ok=True)
    found = {**machine_facts(), **part, **raw}
    write_json(found, options.out / "raw" / f"{name}.json")
    write_page(options.out)
    if options.json:
        print(json.dumps(found))
    print(support.markdown_table(part["checks"]), file=sys.stderr)
    return 0 if all(check.holds for check in checks) else 1


def write_page(out: Path) -> None:
    """Write the page of all raw results that there are."""
    (out / f"{PAGE}.md").write_text(told(out / "raw"))


def told(raw: Path) -> str:
    """Return the page."""
    text = [f"# {TITLE}"]
    for name in PARTS:
        path = raw / f"{name}.json"
        if not path.exists():
            continue
        part = json.loads(path.read_bytes())
        bounds = [
            {
                "bound": check["what"],
                "measured": check["measured"],
                "allowed": check["bound"],
                "holds": "yes" if check["holds"] else "**NO**",
            }
            for check in part["checks"]
        ]
        text += [f"## {part['title']}", part["introduction"]]
        text.append("\n".join(f"- {fact}: {part[fact]}" for fact in FACTS))
        tables = {"Bounds": bounds, **part["tables"]}
        text += [
            f"### {head}\n\n{support.markdown_table(rows)}"
            for head, rows in tables.items()
        ]
        text.append(f"Raw numbers: [raw/{name}.json](raw/{name}.json).")
    return "\n\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
