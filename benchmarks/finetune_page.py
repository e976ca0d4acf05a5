"""The page of the fine-tune: bounds, tables, texts and figure of the parts so far."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import support

NAME = "finetune"
SECONDS_MAX = 900.0
"""Seconds of a run, from its coordinator's start to its end. Compilation, kill and
return are included."""
FALL_IN_ERRORS_MIN = 3.0
RUN_OVER_TWIN_MAX = 1.02
FALL_MISSED_MAX = 0.05
"""Share of the twin's fall, upper end of the 95 % interval over files; set after the
runs, since 1.02 of the end would let a quarter of the fall go."""
Z_95 = 1.96
PARSED_MIN = 0.5
TWINS = {"run": "twin", "lora": "lora twin"}
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "finetune.py"


def add_part(out: Path, doc: str, part: str, found: Mapping[str, Any]) -> int:
    """Add a part to raw/finetune.json, and write the page; return 1 if a bound is
    broken. doc: the benchmark's docstring."""
    raw = out / "raw" / f"{NAME}.json"
    parts = json.loads(raw.read_bytes())["parts"] if raw.exists() else {}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts[part] = {**found, "date": now}
    return write_page(out, doc, parts, None)


def write_again(out: Path, doc: str) -> int:
    """Write the page of what raw/finetune.json has; return 1 if a bound is broken."""
    raw = json.loads((out / "raw" / f"{NAME}.json").read_bytes())
    return write_page(out, doc, raw["parts"], support.measured_before(raw))


def write_page(
    out: Path, doc: str, parts: Mapping[str, Any], facts: dict[str, str] | None
) -> int:
    """Write the page of these parts, and its figure. facts: None if the last part was
    measured now."""
    title, _, told = doc.partition("\n")
    if trials := [name for name, each in parts.items() if each["quick"]]:
        told = "\n**Trials** of few tokens, which show that all works and not how " + (
            f"well: {', '.join(trials)}.\n{told}"
        )
    code = support.write_results(
        out,
        NAME,
        f"{title}\n{told}",
        {
            "Parts": [row(name, each) for name, each in parts.items()],
            "Islands": [
                island
                for name, each in parts.items()
                if "summary" in each
                for island in islands(name, each)
            ],
        },
        [check for name in parts for check in checks(name, parts)],
        {"parts": parts},
        facts,
    )
    with (out / "raw" / f"{NAME}.md").open("a") as page:
        page.write("".join(texts(name, each) for name, each in parts.items()))
    if out == support.RESULTS:
        subprocess.run([sys.executable, str(FIGURE)], check=True)
    return code


def checks(name: str, parts: Mapping[str, Any]) -> list[support.Check]:
    """Return the bounds of one part; a twin has none of its own."""
    part = parts[name]
    if "summary" not in part:
        return []
    fall, error = part["fall"]
    twin = parts.get(TWINS[name])
    killed = part["summary"]["islands"]["small"]["incarnation"]
    lines = [text["parsed"] for text in part["texts"][1]]
    found = [
        support.at_least(
            f"{name}: fall, in standard errors", fall / error, FALL_IN_ERRORS_MIN, ".1f"
        ),
        support.at_most(f"{name}: seconds", part["seconds"], SECONDS_MAX, ".0f"),
        support.at_least(f"{name}: lives of the killed island", killed, 2, ".0f"),
        support.at_least(
            f"{name}: lines of the export's texts that Python parses",
            sum(lines) / len(lines),
            PARSED_MIN,
            ".2f",
        ),
    ]
    if twin:
        ratio, over = last(part) / last(twin), f"{name}: over its twin"
        missing, its_error = missed(part, twin)
        found += [
            support.at_most(over, ratio, RUN_OVER_TWIN_MAX, ".4f"),
            support.at_most(
                f"{name}: share of its twin's fall that is missing, upper end over "
                f"files",
                missing + Z_95 * its_error,
                FALL_MISSED_MAX,
                ".3f",
            ),
        ]
    return found


def missed(part: Mapping[str, Any], twin: Mapping[str, Any]) -> tuple[float, float]:
    """Return the share of its twin's fall that a part does not have, and its standard
    error over the held-out files, which are the same for both.

    The error is that of a ratio of sums over files, which are drawn, by its linear
    part, as in `HeldOut.per_byte`; another run of either would add its own.
    """
    ended = np.array(part["bits"][1])
    first, last = map(np.array, twin["bits"])
    behind, fall, count = ended - last, first - last, len(first)
    share = behind.sum() / fall.sum()
    rest = behind - share * fall
    error = np.sqrt(count / (count - 1) * np.sum(rest**2)) / fall.sum()
    return float(share), float(error)


def last(part: Mapping[str, Any]) -> float:
    """Return the bits per byte at the end."""
    return float(part["curve"][-1]["bits_per_byte"])


def row(name: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """A row for people."""
    first, end = part["curve"][0], part["curve"][-1]
    fall, error = part["fall"]
    memory = sum(part.get("memory", {}).values()) / 2**30
    return {
        "part": name,
        "learning rate": f"{part['rate']:g}",
        "tokens": f"{end['tokens']:,.0f}",
        "bits per byte before": f"{first['bits_per_byte']:.4f} ± {first['error']:.4f}",
        "after": f"{end['bits_per_byte']:.4f} ± {end['error']:.4f}",
        "fall": f"{fall:.4f} ± {error:.4f}",
        "seconds": f"{part['seconds']:.0f}",
        "tokens a second": f"{end['tokens'] / part['seconds']:.0f}",
        "memory, GiB": f"{memory:.1f}" if memory else "",
        "date": part["date"],
    }


def islands(name: str, part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for people, one for each island of a run."""
    return [
        {
            "part": name,
            "island": island,
            "lives": its["incarnation"],
            "steps": its["steps"],
            "median step, s": f"{its['median_step_seconds']:.2f}",
            "tokens computed": f"{its['tokens_computed']:,.0f}",
            "tokens merged": f"{its['tokens_merged']:,.0f}",
            "memory, GiB": f"{part['memory'].get(island, 0) / 2**30:.1f}",
        }
        for island, its in part["summary"]["islands"].items()
    ]


def texts(name: str, part: Mapping[str, Any]) -> str:
    """Return the continuations of the weights before and after, as Markdown."""
    if "texts" not in part:
        return ""
    blocks = [f"\n## Greedy continuations: {name}\n"]
    for before, after in zip(*part["texts"], strict=True):
        for when, said in (("Before", before), ("After", after)):
            head = f"{when}, {said['parsed']:.0%} of the whole lines are valid Python:"
            blocks.append(f"{head}\n\n````text\n{said['text'].rstrip()}\n````\n")
    return "\n".join(blocks)
