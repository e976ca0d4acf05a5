"""Checks of a run's tape and summary against each other.

The summary comes from the policy's own books; here the same figures are counted again
from the decisions on the tape. Functions return what is wrong as text, empty if
nothing is.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.observability.tape import Repeats

Incarnation = tuple[str, int]
Record = Mapping[str, Any]
TOKEN_FIELDS = (
    "tokens_computed",
    "tokens_merged",
    "tokens_in_flight",
    "tokens_carried",
)


def ledger_problems(
    summary: Mapping[str, Any], tape: Sequence[Record], sizes: Sequence[int]
) -> list[str]:
    """Return the imbalances of a finished run's ledger: per island, in total, and
    against the tape. sizes: parameters by fragment."""
    islands: Mapping[str, Any] = summary["islands"]
    wrong = []
    for name, fields in [*islands.items(), ("total", summary)]:
        settled = fields["tokens_merged"] + sum(fields["tokens_lost"].values())
        settled += fields["tokens_carried"]
        if fields["tokens_computed"] != settled + fields["tokens_in_flight"]:
            wrong.append(
                f"{name}: computed {fields['tokens_computed']}, merged, lost and "
                f"carried {settled}, in flight {fields['tokens_in_flight']}"
            )
        # All that a finished run has in flight are the remainders of rounding down.
        these = [fields] if name in islands else list(islands.values())
        parts = sum(len(i["tokens_lost"]) + (i["tokens_carried"] > 0) for i in these)
        if not 0 <= fields["tokens_in_flight"] <= parts:
            wrong.append(f"{name}: {fields['tokens_in_flight']} tokens still in flight")
    for field in TOKEN_FIELDS:
        found = sum(island[field] for island in islands.values())
        if found != summary[field]:
            wrong.append(f"{field}: islands {found}, total {summary[field]}")
    return [*wrong, *_recount(summary, tape, sizes), *interval_problems(tape)]


def interval_problems(tape: Sequence[Record]) -> list[str]:
    """Return steps of one incarnation that entered two merges of one fragment, or
    merges in the wrong order."""
    wrong = []
    ends: dict[tuple[str, int, int], int] = {}
    for record in tape:
        if record["kind"] != "merged":
            continue
        for part in record["contributions"]:
            key = (part["island"], part["incarnation"], record["fragment"])
            start, end = part["start"], part["end"]
            if not ends.get(key, 0) <= start < end:
                wrong.append(
                    f"fragment {key[2]}, {key[0]} #{key[1]}: steps [{start}, {end}) "
                    f"merged after those up to {ends.get(key, 0)}"
                )
            ends[key] = end
    return wrong


def row_problems(tape: Sequence[Record]) -> list[str]:
    """Return positions of the data that were leased against the rule: those that an
    ended incarnation has in no merge come again, lowest first; else the next new one
    does. Where a delta may still have been merged at the end, they may come again, too,
    unless it was."""
    wrong: list[str] = []
    free: list[int] = []
    new = 0
    size: dict[Incarnation, int] = {}
    held: dict[Incarnation, list[int]] = collections.defaultdict(list)
    merged: dict[Incarnation, set[int]] = collections.defaultdict(set)
    waiting: dict[Incarnation, set[int]] = {}
    """Positions that may yet be merged, of incarnations that have ended."""

    def positions(who: Incarnation, start: int, stop: int) -> list[int]:
        return held[who][start * size[who] : stop * size[who]]

    for record in tape:
        who = (record.get("island", ""), record.get("incarnation", 0))
        if record["kind"] == "joined":
            size[who] = record["sequences_per_step"]
        elif record["kind"] == "granted":
            for position in range(record["start"], record["stop"]):
                for ended in [e for e, left in waiting.items() if position in left]:
                    for again in waiting.pop(ended):
                        heapq.heappush(free, again)
                due = free[0] if free else new
                if position != due:
                    wrong.append(f"{who}: position {position} was leased before {due}")
                if free and position == due:
                    heapq.heappop(free)
                new = max(new, position + 1)
                held[who].append(position)
        elif record["kind"] == "left":
            kept = {p for s in record["in_merges"] for p in positions(who, *s)}
            if missing := merged[who] - kept:
                wrong.append(f"{who}: {sorted(missing)} are in merges, and are free")
            waiting[who] = kept - merged[who]
            for position in set(held[who]) - kept:
                heapq.heappush(free, position)
        elif record["kind"] == "merged":
            for part in record["contributions"]:
                of = (part["island"], part["incarnation"])
                found = positions(of, part["start"], part["end"])
                merged[of].update(found)
                waiting.get(of, set()).difference_update(found)
    return wrong


def version_problems(tape: Sequence[Record]) -> list[str]:
    """Return versions that go back (of merges, of a recovery, of adoptions), and
    adoptions of a version that was never merged."""
    wrong = []
    merged: dict[int, list[int]] = {}
    adopted: dict[tuple[str, int, int], list[int]] = {}
    repeats = Repeats()
    for record in tape:
        if record["kind"] == "island" and repeats.seen(record):
            continue
        if record["kind"] == "term":
            for fragment, version in enumerate(record["versions"]):
                before = merged.get(fragment, [1, 0])
                if version <= before:
                    wrong.append(f"fragment {fragment}: begun {version} after {before}")
                merged[fragment] = version
        elif record["kind"] in ("merged", "term_begun"):
            fragment, version = record["fragment"], record["version"]
            before = merged.get(fragment, [1, 0])
            if version <= before:
                wrong.append(f"fragment {fragment}: merged {version} after {before}")
            merged[fragment] = version
        elif record["kind"] == "recovered":
            for fragment, before in merged.items():
                version = record["versions"][fragment]
                if version < before:
                    wrong.append(
                        f"fragment {fragment}: recovered {version} after {before}"
                    )
        elif record["kind"] == "island" and record["record"]["kind"] == "adopted":
            fragment, version = (record["record"][k] for k in ("fragment", "version"))
            who = (record["island"], record["incarnation"], fragment)
            if version <= adopted.get(who, [1, -1]):
                wrong.append(f"{who}: adopted {version} after {adopted[who]}")
            if version > merged.get(fragment, [1, 0]):
                wrong.append(f"{who}: adopted {version}, which nobody merged")
            adopted[who] = version
    return wrong


def steps_to_first_merge(
    tape: Sequence[Record], island: str, incarnation: int
) -> float:
    """Own steps that an incarnation had done at the take of the first delta of its
    that was merged; infinite if none was, before the flush at the end."""
    for record in tape:
        if record["kind"] == "merged" and not record["final"]:
            for part in record["contributions"]:
                if (part["island"], part["incarnation"]) == (island, incarnation):
                    return float(part["end"])
    return float("inf")


def lost_merges_problems(tape: Sequence[Record]) -> list[str]:
    """Return the terms of lost fragments whose lost tokens are not those that were
    merged into versions above the anchor's, and that count."""
    wrong = []
    counting: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
    for record in tape:
        if record["kind"] == "merged":
            tokens: dict[str, int] = collections.Counter()
            for part in record["contributions"]:
                tokens[part["island"]] += part["tokens"]
            merges = counting.setdefault(record["fragment"], {})
            merges[tuple(record["version"])] = tokens
        elif record["kind"] == "term_begun":
            merges = counting.setdefault(record["fragment"], {})
            lost: dict[str, int] = collections.Counter()
            for version in [v for v in merges if v > tuple(record["replaced"])]:
                lost.update(merges.pop(version))
            if lost != record["lost_tokens"]:
                wrong.append(
                    f"fragment {record['fragment']}, {record['version']}: lost "
                    f"{record['lost_tokens']}, by the merges {dict(lost)}"
                )
    return wrong


def outage_seconds(tape: Sequence[Record]) -> list[float]:
    """Return the seconds for which each crash of the coordinator silenced the tape; a
    stop of the whole run is none."""
    back = (r for r in tape if r["kind"] == "recovered" and r["since"])
    return [r["time"] - r["since"] for r in back]


def _recount(
    summary: Mapping[str, Any], tape: Sequence[Record], sizes: Sequence[int]
) -> list[str]:
    merged: dict[str, list[int]] = collections.defaultdict(lambda: [0] * len(sizes))
    tokens_per_step: dict[tuple[str, int], int] = {}
    computed: dict[str, int] = collections.Counter()
    carried: dict[str, int] = collections.Counter()
    for record in tape:
        if record["kind"] == "merged":
            for part in record["contributions"]:
                merged[part["island"]][record["fragment"]] += part["tokens"]
        elif record["kind"] == "term_begun":
            for name, tokens in record["lost_tokens"].items():
                merged[name][record["fragment"]] -= tokens
        elif record["kind"] == "joined":
            who = (record["island"], record["incarnation"])
            tokens_per_step[who] = record["tokens_per_step"]
        elif record["kind"] == "carried":
            who = (record["island"], record["incarnation"])
            tokens = record["steps"] * tokens_per_step[who]
            carried[record["island"]] += tokens * sizes[record["fragment"]]
        elif record["kind"] == "left":
            who = (record["island"], record["incarnation"])
            computed[record["island"]] += record["steps"] * tokens_per_step.pop(who)
    wrong = [f"{name} #{n} has no end on the tape" for name, n in tokens_per_step]
    for name, island in summary["islands"].items():
        weighted = sum(s * t for s, t in zip(sizes, merged[name], strict=True))
        for field, found in (
            ("tokens_merged", weighted // sum(sizes)),
            ("tokens_merged_by_fragment", merged[name]),
            ("tokens_computed", computed[name]),
            ("tokens_carried", carried[name] // sum(sizes)),
        ):
            if found != island[field]:
                wrong.append(f"{name}: {field} {island[field]}, by the tape {found}")
    by_fragment = [sum(column) for column in zip(*merged.values(), strict=True)]
    if by_fragment != summary["tokens_merged_by_fragment"]:
        wrong.append(
            f"merged by fragment {summary['tokens_merged_by_fragment']}, by the tape "
            f"{by_fragment}"
        )
    return wrong
