"""The rows of `quality.py`: the runs, and the row that each is compared with.

All rows of one size train the same model on as many tokens of the same text, with as
many sequences in all islands' batches together; seeds give init and order of the data.
What a row leaves unsaid is as in `decoupled`: 8 equal islands, H = P = 12, overlap of 2
steps, K = 1 with grace, RDA, keep, weights by tokens, int8 both ways, an outer step
of 1 without momentum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import quality_variants as variants
from quality_configs import (
    SEQUENCES,
    SIZES,
    Row,
    Size,
    config,
    equal,
    fast_and_slow,
    inner,
    network,
    plain,
    unequal,
)
from quality_levers import SHORT, SHORT_CYCLE, ladder, levers
from quality_rules import rules
from quality_schedules import batches, schedules, tokens
from quality_trouble import trouble
from quality_variants import GENTLE, PRESET, by_name

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
"""Learning rates swept for the headline rows, each method alike."""
RATE = ", rate "
"""In the name of a row of the sweep, before its rate."""
SWEPT = (
    "data-parallel",
    "synchronous DiLoCo, 8 islands",
    "decoupled, 8 islands",
    "decoupled, 2 islands",
    "decoupled, 4 islands",
    "decoupled, 4 fast + 4 slow islands",
    "decoupled, failures as at 1.2 M chips",
    "one island, outer step of 1",
    "one island, outer optimizer",
    "Muon inside, data-parallel",
    "Muon inside",
    variants.SYNCHRONOUS + PRESET,
    variants.EQUAL + PRESET,
    variants.UNLIKE + PRESET,
    variants.FAILING + PRESET,
)
MUON = "muon"
SYNCHRONOUS: dict[str, Any] = {
    "quorum": 8,
    "grace": 0.0,
    "overlap_steps": 0,
    "fragments": 1,
    "codec_up": "bf16",
    "codec_down": "bf16",
}
"""All islands merge everything at once, and wait for it."""
MIXTURE = "mixture of experts"
"""Its rows: data-parallel, and 8 islands."""
INT2: dict[str, Any] = {"codec_up": "int2", "codec_down": "int2"}


def rows(size: Size) -> Iterator[Row]:
    """All rows, the ones that decide most first."""
    headlines = list(_headlines(size))
    others = [
        *_islands(size),
        *_merging(size),
        *_by_use(size),
        *_mixtures(size),
        *_codecs(size),
        *_adoption(size),
        *schedules(size),
        *_muon(size),
        *tokens(size),
        *batches(size),
        *trouble(size),
        *levers(size),
        *ladder(size),
        *rules(size),
    ]
    found = [*headlines, *variants.presets(by_name([*headlines, *others]))]
    found += variants.defaults(by_name(found))
    found += variants.members(by_name(found))
    found += others
    found += variants.windows(by_name(found))
    yield from found
    yield from variants.partial(by_name(found))


def rates(size: Size) -> Iterator[Row]:
    """The sweep of learning rates, on the first seed, for every headline method."""
    swept = [row for row in rows(size) if row.name in SWEPT]
    for rate in RATES:
        for row in swept:
            optimizer = row.config.run.inner.optimizer
            yield dataclasses.replace(
                row,
                name=f"{row.name}{RATE}{rate:g}",
                group="rates",
                config=inner(row.config, optimizer, rate),
                against="",
                headline=False,
            )


@functools.cache
def same_runs(size: str) -> dict[str, str]:
    """Return the names of all rows of a size, each with the first name of the same run:
    one run may answer several questions."""
    firsts: list[Row] = []
    names: dict[str, str] = {}
    for row in (*rows(SIZES[size]), *rates(SIZES[size])):
        same = next((first for first in firsts if first.same_run(row)), None)
        if same is None:
            firsts.append(row)
        names[row.name] = (same or row).name
    return names


def _headlines(size: Size) -> Iterator[Row]:
    yield Row(
        name="data-parallel",
        group="headline",
        plain=True,
        headline=True,
        config=plain(size, size.sequences),
    )
    yield Row(
        name="synchronous DiLoCo, 8 islands",
        group="headline",
        headline=True,
        against="data-parallel",
        config=config(size, **SYNCHRONOUS),
    )
    yield Row(
        name="decoupled, 8 islands",
        group="headline",
        headline=True,
        against="synchronous DiLoCo, 8 islands",
        config=config(size),
        options=network(2),
    )
    yield Row(
        name="decoupled, 4 fast + 4 slow islands",
        group="headline",
        headline=True,
        against="synchronous DiLoCo, 8 islands",
        config=config(size, islands=fast_and_slow(size.sequences)),
        options=network(2, out_of_phase=True),
    )
    yield Row(
        name="decoupled, failures as at 1.2 M chips",
        group="headline",
        headline=True,
        against="synchronous DiLoCo, 8 islands",
        config=config(size),
        options=network(
            2, out_of_phase=True, failure_every_seconds=200.0, down_seconds=12.0
        ),
    )
    yield Row(
        name="one island, outer optimizer",
        group="headline",
        headline=True,
        against="data-parallel",
        config=config(size, islands=equal(1, size.sequences), outer=GENTLE),
        options=network(2),
    )


def _islands(size: Size) -> Iterator[Row]:
    # Only codecs and dispatch distinguish this row from plain training.
    yield Row(
        name="one island, outer step of 1",
        group="islands",
        against="data-parallel",
        config=config(size, islands=equal(1, size.sequences)),
        options=network(2),
    )
    for count in (2, 4, 16):
        if count > size.sequences:
            continue
        yield Row(
            name=f"decoupled, {count} islands",
            group="islands",
            against="data-parallel",
            config=config(size, islands=equal(count, size.sequences)),
            options=network(2),
        )


def _merging(size: Size) -> Iterator[Row]:
    for name, changes in (
        ("mean", {"merge": "mean"}),
        ("K = 8 on unlike islands", {"quorum": 8, "unlike": True}),
        ("K = 1 without grace on unlike islands", {"grace": 0.0, "unlike": True}),
        ("K = 1 with grace on unlike islands", {"unlike": True}),
        ("uniform weights, unequal batches", {"weighting": "uniform", "batches": True}),
        (
            "weights tokens x rate, unequal batches",
            {"weighting": "tokens_times_rate", "batches": True},
        ),
        ("weights by tokens, unequal batches", {"batches": True}),
    ):
        sync: dict[str, Any] = dict(changes)
        unlike, batches = sync.pop("unlike", False), sync.pop("batches", False)
        if batches and size.sequences != SEQUENCES:
            continue
        islands = (
            fast_and_slow(size.sequences) if unlike else unequal() if batches else None
        )
        tokens = "weights by tokens, unequal batches"
        against = "decoupled, 8 islands"
        if unlike:
            against = "decoupled, 4 fast + 4 slow islands"
        elif batches and name != tokens:
            against = tokens
        yield Row(
            name=name,
            group="merging",
            against=against,
            config=config(size, islands=islands, **sync),
            options=network(2, out_of_phase=unlike or batches),
        )


def _by_use(size: Size) -> Iterator[Row]:
    """Weights by use of the rows of an input table that is not the output's, with texts
    alike and unlike."""
    unlike = "unlike shards"
    for more, against in (("", "decoupled, 8 islands"), (f", {unlike}", unlike)):
        yield Row(
            name=f"weights by use{more}",
            group="merging",
            against=against,
            config=config(size, weights_by_use="rows"),
            options=network(2, out_of_phase=False, unlike_shards=bool(more)),
        )


def _mixtures(size: Size) -> Iterator[Row]:
    """A mixture with as many active parameters, but for its routers, at the dense
    model's learning rates; what is asked is whether its gap is the dense model's."""
    model = dataclasses.replace(
        size.model,
        experts=8,
        experts_per_token=2,
        expert_dim=size.model.mlp_dim // 2,
        balance_loss=0.01,
    )
    own = dataclasses.replace(size, model=model)
    base = f"{MIXTURE}, data-parallel"
    yield Row(
        name=base,
        group=MIXTURE,
        plain=True,
        against="data-parallel",
        config=plain(own, size.sequences),
    )
    for name, overlap, sync, outer in (
        ("", 2, {}, None),
        (f", {SHORT}", 1, SHORT_CYCLE, None),
        (f", {SHORT}{PRESET}", 1, SHORT_CYCLE, GENTLE),
    ):
        yield Row(
            name=f"{MIXTURE}, 8 islands{name}",
            group=MIXTURE,
            against=base,
            config=config(own, outer=outer, **sync),
            options=network(overlap),
        )


def _codecs(size: Size) -> Iterator[Row]:
    for name, sync in (
        ("bf16 both ways", {"codec_up": "bf16", "codec_down": "bf16"}),
        ("int4 both ways", {"codec_up": "int4", "codec_down": "int4"}),
        ("int4 up, int8 down", {"codec_up": "int4"}),
        ("int8 up, bf16 down", {"codec_down": "bf16"}),
        ("bf16 up, int8 down", {"codec_up": "bf16"}),
        ("int4 up, bf16 down", {"codec_up": "int4", "codec_down": "bf16"}),
        ("bf16 up, int4 down", {"codec_up": "bf16", "codec_down": "int4"}),
        ("int8 without feedback", {"error_feedback": False}),
        (
            "int4 without feedback",
            {"codec_up": "int4", "codec_down": "int4", "error_feedback": False},
        ),
    ):
        against = "" if name == "bf16 both ways" else "bf16 both ways"
        yield Row(
            name=name,
            group="codecs",
            against=against,
            config=config(size, **sync),
            options=network(2),
        )
    for name, sync in (
        ("int2 both ways", INT2),
        ("int2 without feedback", {**INT2, "error_feedback": False}),
    ):
        yield Row(
            name=name,
            group="codecs",
            against="decoupled, 8 islands",
            config=config(size, **sync),
            options=network(2),
        )


def _adoption(size: Size) -> Iterator[Row]:
    for tau in (1, 2, 4):
        for adopt in ("rebase", "overwrite", "blend"):
            name, first = f"{adopt}, tau {tau}", "rebase, tau 1"
            yield Row(
                name=name,
                group="adoption",
                against="" if name == first else first,
                config=config(size, adopt=adopt, overlap_steps=tau),
                options=network(tau),
            )


def _muon(size: Size) -> Iterator[Row]:
    """Muon inside, at the best of the rates that were tried on the first seed."""
    yield Row(
        name="Muon inside, data-parallel",
        group="muon",
        plain=True,
        against="data-parallel",
        config=inner(config(size, islands=equal(1, size.sequences)), MUON, 8e-3),
    )
    for name, sync, outer, against in (
        ("synchronous DiLoCo", SYNCHRONOUS, None, "Muon inside, data-parallel"),
        ("", {}, None, "Muon inside, synchronous DiLoCo"),
        ("int2 both ways", INT2, None, "Muon inside"),
        ("H = 4", {"steps_per_cycle": 4, "fragments": 4}, None, "Muon inside"),
        ("Nesterov 0.4 / 0.6", {}, GENTLE, "Muon inside"),
        (
            "H = 4, Nesterov 0.4 / 0.6",
            {"steps_per_cycle": 4, "fragments": 4},
            GENTLE,
            "Muon inside",
        ),
    ):
        yield Row(
            name=f"Muon inside{', ' if name else ''}{name}",
            group="muon",
            against=against,
            config=inner(config(size, outer=outer, **sync), MUON, 6e-3),
            options=network(0 if sync is SYNCHRONOUS else 2),
        )
    for count in (2, 4):
        yield Row(
            name=f"Muon inside, {count} islands",
            group="muon",
            against="Muon inside, data-parallel",
            config=inner(
                config(size, islands=equal(count, size.sequences)), MUON, 6e-3
            ),
            options=network(2),
        )
