"""Lines of the tape as sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(line: Mapping[str, Any]) -> str:
    """Return what a line of the tape says; for an unknown kind, its fields."""
    kind = line["kind"]
    island, incarnation = line.get("island", ""), line.get("incarnation", 0)
    match kind:
        case "begun":
            return f"run {line['run_id']} begins, to {line['total_tokens']:,} tokens"
        case "compiled":
            return "the coordinator has compiled what merges need"
        case "recovered":
            return (
                f"the coordinator is back, from snapshot {line['snapshot']} and "
                f"{line['records']:,} records of its log"
            )
        case "worker_recovered":
            count = len(line["fragments"])
            away = line.get("away_seconds")
            after = "" if away is None else f" after {away:.1f} s"
            return f"worker {line['worker']} is back with its {count} fragments{after}"
        case "term":
            return f"term {line['term']} begins with anchors of islands"
        case "hello":
            device = line["environment"].get("device_kind", "")
            return f"{island} #{incarnation} says hello from {line['peer']} ({device})"
        case "joined":
            return (
                f"{island} #{incarnation} joins with "
                f"{line['tokens_per_step']:,} tokens a step"
            )
        case "resumed":
            return f"{island} #{incarnation} is back after {line['steps']:,} steps"
        case "absent":
            return f"{island} #{incarnation} is away: {line['why']}"
        case "left":
            return _left(line)
        case "leaving":
            return f"{island} #{incarnation} is leaving, and sends what it has"
        case "refused":
            return (
                f"the delta of {island} #{incarnation} for fragment "
                f"{line['fragment']} is refused: {line['reason']}"
            )
        case "skipped":
            return (
                f"tick {line['tick']} of fragment {line['fragment']} is skipped: "
                f"{line['why']}"
            )
        case "turned_away":
            return f"{island} is turned away ({line['code']}): {line['message']}"
        case "quarantined":
            return (
                f"{island} #{incarnation} is quarantined after {line['refused']} "
                f"unfit deltas"
            )
        case "released":
            return f"{island} #{incarnation} is out of quarantine"
        case "stopping":
            return f"the run has its tokens ({line['tokens']:,}): the flush begins"
        case "finished":
            return "the run is over"
        case "extended":
            return f"the run goes on to {line['total_tokens']:,} tokens"
        case "alert":
            return str(line["text"])
    shown = {k: v for k, v in line.items() if k not in ("kind", "time", "prev")}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _left(line: Mapping[str, Any]) -> str:
    fragments = line["lost_tokens_by_fragment"]
    lost = sum(fragments) / max(1, len(fragments))
    said = f" ({line['said']})" if line["said"] else ""
    cost = f"; {lost:,.0f} tokens are lost" if lost else "; nothing is lost"
    return (
        f"{line['island']} #{line['incarnation']} ended after {line['steps']:,} steps: "
        f"{line['reason']}{said}{cost}"
    )
