"""Make one list of the seconds of every test out of JUnit files, a file a phase.

python tests/durations.py FOLDER    writes FOLDER/durations.txt, the longest first
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def durations(folder: Path) -> list[tuple[float, str, str]]:
    """Return seconds, phase and test of all that ran, the longest first."""
    found = [
        (float(case.get("time", 0)), path.stem, f"{case.get('classname')}::{name}")
        for path in folder.glob("*.xml")
        for case in ElementTree.parse(path).iter("testcase")
        if case.find("skipped") is None and (name := case.get("name"))
    ]
    return sorted(found, key=lambda row: (-row[0], *row[1:]))


def main(folder: Path) -> None:
    """Write the list; each phase has its sum at the top."""
    rows = durations(folder)
    phases = sorted({phase for _, phase, _ in rows})
    lines = []
    for phase in phases:
        seconds = [row[0] for row in rows if row[1] == phase]
        lines.append(f"{sum(seconds):9.2f} {phase:9} {len(seconds)} tests")
    lines += [f"{seconds:9.2f} {phase:9} {test}" for seconds, phase, test in rows]
    (folder / "durations.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/tests"))
