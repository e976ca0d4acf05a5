"""The closing report of a run, for newcomers, from its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_jax.faults import Faults
from diloco_jax.observability.health import EVALUATING
from diloco_jax.observability.terminal import bytes_text, duration_text
from diloco_jax.protocol.reasons import STOPPED

NO_FAULTS = Faults()


def closing_report(
    summary: Mapping[str, Any],
    outages: Mapping[str, Sequence[float | None]],
    faults: Faults = NO_FAULTS,
) -> str:
    """Return the report as lines of plain text. outages: seconds of each outage, by
    island; None for one that did not end. faults: what was to strike."""
    islands: Mapping[str, Mapping[str, Any]] = summary.get("islands", {})
    width = _width(islands)
    lines = [
        _result(summary),
        f"goodput {summary.get('goodput', 0):.3f}, uptime "
        f"{summary.get('uptime', 0):.1%}, {summary.get('merges', 0):,} merges in "
        f"{duration_text(summary.get('wall_seconds', 0))}; "
        f"{bytes_text(summary.get('bytes_up', 0))} up, "
        f"{bytes_text(summary.get('bytes_down', 0))} down, "
        f"{bytes_text(summary.get('bytes_join', 0))} for joins",
        "",
        f"{'tokens':<{width}} {'computed':>11} {'merged':>11} {'lost':>11} "
        f"{'in flight':>11}  {'share of merged':>15}",
    ]
    total = max(1, summary.get("tokens_merged", 0))
    for name, island in [*islands.items(), ("total", summary)]:
        merged = island.get("tokens_merged", 0)
        lines.append(
            f"{name:<{width}} {island.get('tokens_computed', 0):>11,} {merged:>11,} "
            f"{_lost(island):>11,} {island.get('tokens_in_flight', 0):>11,}"
            f"  {merged / total:>15.1%}"
        )
    cost = _outage_lines(summary, islands, outages)
    skipped = [
        f"{name}: {island['skipped_steps']:,} of {island.get('steps', 0):,} steps had "
        f"a loss or gradient that is not finite, and changed nothing"
        for name, island in islands.items()
        if island.get("skipped_steps")
    ]
    alerts = [f"alert: {text}" for text in summary.get("alerts", ())]
    for part in (alerts, skipped, cost, list(_never_struck(summary, faults))):
        lines += ["", *part] if part else []
    return "\n".join(lines)


def _never_struck(summary: Mapping[str, Any], faults: Faults) -> Iterator[str]:
    """Describe the faults that cannot have struck, by what the summary counts."""
    for fault in faults.faults:
        if (island := summary.get("islands", {}).get(fault.who)) is None:
            made, unit, lives = summary.get("merges", 0), "merges", fault.incarnation
        else:
            made, unit, lives = island.get("steps", 0), "steps", island.get("joins", 1)
        came = lives >= fault.incarnation
        # One that was killed before its last report is in the run once more.
        if not came or (made < fault.step and lives == fault.incarnation):
            joined = "" if came else f", and its joins were {lives}"
            text = f"the fault {fault.text} never struck: {fault.who} made {made:,} "
            yield f"{text}{unit}{joined}"


def comparison(summary: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """Return one sentence on the run and plain training on as many tokens."""
    ours, theirs = summary.get("eval_loss"), baseline.get("eval_loss")
    if ours is None or theirs is None:
        return "no comparison: a validation loss is missing, or not finite"
    return (
        f"plain data-parallel training on {baseline.get('tokens', 0):,} tokens "
        f"(learning rate {baseline.get('learning_rate', 0):g}): loss {theirs:.4f}; "
        f"this run {ours:.4f}, {ours / theirs - 1:+.1%}"
    )


def loss_line(found: Mapping[str, Any]) -> str:
    """Return the validation loss of `diloco eval` or of a summary as a text."""
    if found["eval_loss"] is None:
        return "validation loss not finite: the parameters have diverged"
    bits = found.get("eval_bits_per_byte")
    per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
    sources = found.get("eval_loss_by_source") or {}
    parts = (f"{name} {loss:.4f}" for name, loss in sources.items() if loss is not None)
    by_source = f" ({', '.join(parts)})" if sources else ""
    return (
        f"validation loss {found['eval_loss']:.4f} nats per token{per_byte}{by_source}"
    )


def _result(summary: Mapping[str, Any]) -> str:
    if "eval_loss" not in summary:
        if summary.get("phase") == EVALUATING:
            return "over, and being evaluated"
        stopped = summary.get("phase") == "stopped"
        return f"{'stopped before its end, ' if stopped else ''}not evaluated"
    return loss_line(summary)


def _outage_lines(
    summary: Mapping[str, Any],
    islands: Mapping[str, Mapping[str, Any]],
    outages: Mapping[str, Sequence[float | None]],
) -> list[str]:
    """Describe the cost of each island's outages to itself and to the others."""
    victims = [
        name
        for name, island in islands.items()
        if _returns(island) or outages.get(name)
    ]
    lines = []
    stopped = summary.get("phase") == "stopped"
    if of_stops := sum(_of_stops(i, stopped=stopped) for i in islands.values()):
        lines.append(f"stopping the run as a whole cost {of_stops:,} tokens")
    for name in victims:
        island = islands[name]
        seen = outages.get(name, ())
        away = ", ".join("to the end" if s is None else f"for {s:.1f} s" for s in seen)
        times = max(1, len(seen), _returns(island))
        lost = _lost(island) - _of_stops(island, stopped=stopped)
        share = lost / max(1, island.get("tokens_computed", 0))
        lines.append(
            f"{name} went away {'once' if times == 1 else f'{times} times'}"
            f"{f' ({away})' if away else ''}: it lost {lost:,} tokens of its own, "
            f"{share:.1%} of what it computed"
        )
    others = [name for name in islands if name not in victims]
    if victims and others:
        lines.append("the others' longest gap between two steps:")
    for name in others if victims else []:
        median = islands[name].get("median_step_seconds", 0)
        gap = islands[name].get("max_step_gap_seconds", 0)
        ratio = f" = {gap / median:.1f} medians of {median:.3f} s" if median else ""
        lines.append(f"  {name:<{_width(islands)}} {gap:.3f} s{ratio}")
    return lines


def _width(islands: Mapping[str, Any]) -> int:
    """Return the width of a column of islands' names."""
    return max([8, *map(len, islands)])


def _returns(island: Mapping[str, Any]) -> int:
    """Return the number of an island's returns, without those of the whole run."""
    return max(0, int(island.get("joins", 1)) - 1 - int(island.get("resumed", 0)))


def _of_stops(island: Mapping[str, Any], *, stopped: bool) -> int:
    """Return the tokens that an island lost because the whole run was stopped, now or
    earlier. An island that is asked to end alone loses tokens for the same reason."""
    if not stopped and not island.get("resumed"):
        return 0
    return int(island.get("tokens_lost", {}).get(STOPPED, 0))


def _lost(tokens: Mapping[str, Any]) -> int:
    return int(sum(tokens.get("tokens_lost", {}).values()))
