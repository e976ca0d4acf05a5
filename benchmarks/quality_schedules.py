"""Rows of `quality.py` on cycles, outer steps, fragments, tokens and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from quality_configs import SEQUENCES, Row, Size, config, equal, network, plain

from diloco_jax.config import OuterConfig

CYCLES = (4, 12, 24, 48)
TOKEN_FACTORS = (0.25, 0.5)
BATCHES = (8, 16)
"""Sequences in all islands' batches together, beside 32: more steps."""


def schedules(size: Size) -> Iterator[Row]:
    """Yield rows on H, the outer step, P and the way fragments are cut."""
    for cycle in CYCLES:
        for optimizer, rate, momentum in (
            ("sgd", 1.0, 0.0),
            ("nesterov", 0.7, 0.9),
            ("nesterov", 0.8, 0.9),
            ("nesterov", 0.4, 0.9),
            ("nesterov", 0.4, 0.6),
            ("sgd", 1.4, 0.0),
            ("nesterov", 0.6, 0.6),
        ):
            name = f"H = {cycle}, {optimizer} {rate:g} / {momentum:g}"
            plain = f"H = {cycle}, sgd 1 / 0"
            yield Row(
                name=name,
                group="schedule",
                against="decoupled, 8 islands" if name == plain else plain,
                config=config(
                    size,
                    steps_per_cycle=cycle,
                    fragments=min(cycle, 12),
                    outer=OuterConfig(
                        optimizer=optimizer,
                        learning_rate=rate,
                        momentum=momentum,
                    ),
                ),
                options=network(2),
            )
    for fragments in (1, 4):
        yield Row(
            name=f"P = {fragments}",
            group="schedule",
            against="decoupled, 8 islands",
            config=config(size, fragments=fragments),
            options=network(2),
        )
    for by in ("layer", "tensor"):
        yield Row(
            name=f"fragments by {by}",
            group="schedule",
            # As many fragments, of the pieces one by one.
            against="P = 4",
            config=config(size, fragments=4, fragment_by=by),
            options=network(2),
        )


def tokens(size: Size) -> Iterator[Row]:
    """Yield rows with fewer and more tokens: does the gap to data-parallel close?"""
    for factor in TOKEN_FACTORS:
        tokens = int(factor * size.tokens)
        shorter = dataclasses.replace(size, tokens=tokens)
        base = f"data-parallel, {factor:g} x tokens"
        yield Row(
            name=base,
            group="tokens",
            plain=True,
            config=plain(shorter, size.sequences),
        )
        for count in (2, 4, 8):
            yield Row(
                name=f"decoupled, {count} islands, {factor:g} x tokens",
                group="tokens",
                against=base,
                config=config(shorter, islands=equal(count, size.sequences)),
                options=network(2),
            )


def batches(size: Size) -> Iterator[Row]:
    """Yield rows with smaller batches, for the gap where each has its own best one."""
    for batch in BATCHES if size.sequences == SEQUENCES else ():
        yield Row(
            name=f"data-parallel, batch {batch}",
            group="batch",
            plain=True,
            against="data-parallel",
            config=plain(size, batch),
        )
        yield Row(
            name=f"decoupled, 8 islands, batch {batch}",
            group="batch",
            against=f"data-parallel, batch {batch}",
            config=config(size, islands=equal(8, batch)),
            options=network(2),
        )
