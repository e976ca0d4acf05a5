"""Rows of `quality.py` that change one thing of another row: the outer step, the cycle,
the grace window, or the handling of late deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quality_configs import Row, network

from diloco_jax.config import OuterConfig

GENTLE = OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
PRESET = ", nesterov 0.4 / 0.6"
CYCLE = ", H = 24"
"""Part, before PRESET, of the name of a headline with the product's own cycle. The
overlap is a smaller share of that cycle."""
WITHIN = ", window within the overlap"
REBASE = ", rebase"
FULL = ", rebase, merges at full length"

SYNCHRONOUS = "synchronous DiLoCo, 8 islands"
EQUAL = "decoupled, 8 islands"
UNLIKE = "decoupled, 4 fast + 4 slow islands"
FAILING = "decoupled, failures as at 1.2 M chips"
PARTIAL = (
    UNLIKE,
    FAILING,
    "4 fast + 4 slow islands, no time for grace",
    "K = 1 without grace on unlike islands",
    "weights by tokens, unequal batches",
    "uniform weights, unequal batches",
    "weights tokens x rate, unequal batches",
    "one island with twice the batch at half the speed",
    "4 fast + 4 slow islands, tau 4",
    "4 fast + 4 slow islands, gamma 0.99",
    "4 fast + 4 slow islands, no time for grace, tau 4",
    UNLIKE + PRESET,
)
"""Rows whose merges miss some live islands unless the merges wait for them."""
WINDOWED = (
    *(name for name in PARTIAL if "without grace" not in name),
    "4 fast + 4 slow islands, steps +- 30 %",
    "4 fast + 4 slow islands, steps +- 30 %, gamma 0.99",
    "4 fast + 4 slow islands, merges +- 100 %",
    "4 fast + 4 slow islands, merges +- 100 %, gamma 0.99",
    FAILING + PRESET,
    UNLIKE + CYCLE + PRESET,
    FAILING + CYCLE + PRESET,
    UNLIKE + ", tau 1" + PRESET,
    UNLIKE + ", tau 3" + PRESET,
    UNLIKE + ", gamma 0.99" + PRESET,
)
"""Rows whose result depends on the grace window."""

Rows = Mapping[str, Row]


def by_name(rows: Iterable[Row]) -> Rows:
    """Return the rows by name."""
    return {row.name: row for row in rows}


def presets(found: Rows) -> Iterator[Row]:
    """Yield headlines with the outer step that the product sets for many merges."""
    bf16 = "bf16 both ways"
    for name, against in (
        (SYNCHRONOUS, SYNCHRONOUS),
        (EQUAL, SYNCHRONOUS + PRESET),
        (UNLIKE, SYNCHRONOUS + PRESET),
        (FAILING, SYNCHRONOUS + PRESET),
        ("decoupled, 2 islands", "decoupled, 2 islands"),
        ("decoupled, 4 islands", "decoupled, 4 islands"),
        (bf16, EQUAL + PRESET),
        ("int4 both ways", bf16 + PRESET),
    ):
        if name in found:
            row = found[name]
            run = dataclasses.replace(row.config.run, outer=GENTLE)
            yield dataclasses.replace(
                row,
                name=name + PRESET,
                group="preset",
                config=dataclasses.replace(row.config, run=run),
                against=against,
                headline=False,
            )


def defaults(found: Rows) -> Iterator[Row]:
    """Yield presets with the product's cycle, and aids for islands of two speeds."""
    cycle = {"steps_per_cycle": 24}
    yield _changed(
        found[SYNCHRONOUS + PRESET], SYNCHRONOUS + CYCLE + PRESET, **cycle
    ).compared_with(SYNCHRONOUS + PRESET)
    for name in (EQUAL, UNLIKE, FAILING):
        row = _changed(found[name + PRESET], name + CYCLE + PRESET, **cycle)
        yield row.compared_with(SYNCHRONOUS + CYCLE + PRESET)
    for tau in (1, 3):
        name = f"{UNLIKE}, tau {tau}{PRESET}"
        row = _changed(found[UNLIKE + PRESET], name, overlap_steps=tau)
        yield dataclasses.replace(row, options=network(tau, out_of_phase=True))
    yield _changed(found[UNLIKE + PRESET], f"{UNLIKE}, gamma 0.99{PRESET}", grace=0.99)


def windows(found: Rows) -> Iterator[Row]:
    """Yield rows on waiting for islands of about the pacing island's speed."""
    for name in WINDOWED:
        if name in found:
            row = _changed(found[name], name + WITHIN, grace_window="overlap")
            row = dataclasses.replace(row, group="grace window", headline=False)
            yield row.compared_with(name)


def partial(found: Rows) -> Iterator[Row]:
    """Yield rows on keeping pending deltas and on scaling partial merges, both without
    waiting for the islands that merges miss."""
    for name in (name for name in PARTIAL if name in found):
        row = found.get(name + WITHIN, found[name])
        rebased = _changed(row, name + REBASE, adopt="rebase")
        rebased = dataclasses.replace(rebased, group="pending deltas")
        yield rebased.compared_with(row.name)
        full = _changed(rebased, name + FULL, partial_merges="full")
        full = dataclasses.replace(full, group="partial merges")
        yield full.compared_with(name + REBASE)


def members(found: Rows) -> Iterator[Row]:
    """Yield rows for members of the open families other than the default, each compared
    with it: with equal islands, and with islands of two speeds."""
    for name in (EQUAL, UNLIKE):
        for what, sync in (
            ("trimmed mean", {"merge": "trimmed_mean"}),
            ("HeLoCo", {"merge": member("merge/heloco")}),
            ("IsoLoCo", {"merge": member("merge/isoloco")}),
            ("top-k up", {"codec_up": member("codecs/topk")}),
        ):
            row = _changed(found[name], f"{name}, {what}", **sync)
            row = dataclasses.replace(row, group="members", headline=False)
            yield row.compared_with(name)
        row = found[name + PRESET]
        outer = dataclasses.replace(GENTLE, optimizer=member("outer/restarts"))
        run = dataclasses.replace(row.config.run, outer=outer)
        yield dataclasses.replace(
            row,
            name=f"{name}{PRESET}, restarts",
            group="members",
            config=dataclasses.replace(row.config, run=run),
            against=name + PRESET,
            headline=False,
        )


def member(path: str) -> str:
    """Return the config's name of a member that lies with the benchmarks."""
    file = Path(__file__).parent / "members" / f"{path}.py"
    return f"{file}:{file.stem}"


def _changed(row: Row, name: str, **sync: Any) -> Row:
    run = row.config.run
    run = dataclasses.replace(run, sync=dataclasses.replace(run.sync, **sync))
    config = dataclasses.replace(row.config, run=run)
    return dataclasses.replace(row, name=name, config=config)
