"""Rows of `quality.py` on where the gap to data-parallel comes from, and on what could
close it at no more bytes: bits for merges, a shorter overlap, momentum.

The ladder goes from the product's defaults (int8, H = P = 24, tau = 2, an outer step
of 1) to data-parallel by one change at a time, at one learning rate: codec, tau, H, RDA
for the mean, Adam's moments merged too, gradients merged, which is data-parallel. In
the other order H comes first, then tau and the codec. The difference of a rung's shares
in both is its interaction with the others.

Predictions, percent of data-parallel's loss, made before a rung was run but for the
default and H = 12 in one seed: of 18 at 0.1 M and 1.2 M tokens the codec 0, tau 1, H 24
to 12 3, 12 to 4 4, 4 to 1 5, the mean -3, moments 2, gradients 6; tau 3 where H is 1
or 4 already, so shares of H are larger with tau = 0. At 0.04 M the same order. At 0.3 M
and 7 M tokens (1,709 steps), where H = 12 has 8.6: of 10 the codec 0, tau 0.5, H 24 to
1 6, the rest 3.5.

Screened at "0.1m, short" with two seeds, all at 4e-3, the best of the three rates that
were tried for data-parallel training and for 8 islands there; "0.04m, short" has twice
that, as 0.04 M has over 0.1 M in larger batches. With P = H every row sends one
fragment a step, so it sends as many messages, and the headers of all are alike;
`bytes_up` and `bytes_down` of a raw run count payloads, with scales and tails. A
parameter is 1.008 bytes as int8 and 0.5625 as int4, with a scale for 32 of them: int4
at H = 12 sends 11.6 % more a step than int8 at H = 24, at H = 14 4.3 % less, and int2
with 0.3125 bytes at H = 8 7.0 % less.

Predictions over the defaults, made when one seed of int4 at H = 12 (-3.0 %) and of int8
there (-2.7 %) was known: int4 at H = 14 -2.3 %, with tau = 1 -2.8 %; tau = 1 alone
-0.5 %. Nesterov 0.4 / 0.6 over an outer step of 1, in 586 steps: +0.8 % at H = 24,
+0.5 % at H = 14, 0 at H = 4, +4 % at H = 2. int2 at H = 8, when at the same H it was
known to cost 1.0 to 1.4 %: -2.5 %. Moments merged beside parameters, over
parameters alone, with H = 24: at H -1 %, at H / 4 -2 %, at every step -3 %. As many
merges, but H growing with the steps: merge k of K after (k / K)^1.5 of them -0.5 %, ^2
-0.5 %, and ^0.7, falling, +1 %. Nesterov at H = 1: +6 %.

Seen, 2026-11-30: int4 at H = 14 -2.1, -1.9 and -1.6 % at 0.93 of the counted bytes,
int2 at H = 8 -3.0 and -0.4 %; Nesterov at H = 24 +1.1 % (one pair). On the ladder tau
is 0.6 at H = 24 and 7.3 at H = 1 (0.1 M), and moments merged are nothing. 2026-12-01,
at 0.3 M in three pairs: the sum is 10.1 as predicted, and with H = 1, f32 and tau = 0
0.2 of it is left, not 3.5; int4 at H = 14 -1.8 %, both with Nesterov, which is -1.5 %
alone; at 0.1 M -1.7 % in five pairs.

Command: `python benchmarks/quality.py --size "0.04m, short" --only data-parallel ladder
--seeds 5`, and so with "0.1m, short". Cost: half a minute and a minute of one core per
run; levers up to three at H = 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from quality_configs import PLAIN, Row, Size, config, equal, inner, network, plain
from quality_variants import GENTLE, PRESET

from diloco_jax.config import OuterConfig

NEVER = 1 << 30
"""Steps between two merges of moments that are not merged."""
GROUP, LADDER = "levers", "ladder"
DEFAULTS = "H = P = 24, int8"
"""The product's own codec, cycle, fragments and overlap."""
SHORT = "H = P = 4, int8, tau 1"
SHORT_CYCLE: dict[str, Any] = {
    "steps_per_cycle": 4,
    "fragments": 4,
    "overlap_steps": 1,
}
"""What runs of at most 2,000 steps get."""
INT4 = "H = P = 14, int4"
FOUR_BITS: dict[str, Any] = {"codec_up": "int4", "codec_down": "int4"}
TWO_BITS: dict[str, Any] = {"codec_up": "int2", "codec_down": "int2"}
BOTH: tuple[tuple[str, OuterConfig], ...] = (("", PLAIN), (PRESET, GENTLE))
"""Outer steps without and with momentum, with the ends of their rows' names."""
FLOATS: dict[str, Any] = {"codec_up": "f32", "codec_down": "f32"}
AT_ONCE: dict[str, Any] = {"quorum": 8, "grace": 0.0, "overlap_steps": 0}
CYCLE_24: dict[str, Any] = {"steps_per_cycle": 24, "fragments": 24}
AT_ONCE_24 = "H = 24, P = 1, f32, tau 0, mean"
OPTIMIZERS = (("sgd", 0.1), ("sgd", 0.3), ("sgd", 1.0), ("muon", 8e-3), ("muon", 4e-3))
MEAN = "H = P = 1, f32, tau 0, mean"
MERGED = f"{MEAN}, moments"
TAIL = ("H = P = 1, f32, tau 0", MEAN, MERGED, "data-parallel")
ORDERS = (
    (
        *(DEFAULTS, "H = P = 24, f32", "H = P = 24, f32, tau 0"),
        *("H = P = 12, f32, tau 0", "H = P = 4, f32, tau 0", *TAIL),
    ),
    (
        *(DEFAULTS, "H = P = 12, int8", "H = P = 4, int8", "H = P = 1, int8"),
        *("H = P = 1, int8, tau 0", *TAIL),
    ),
)
"""The ladder's rows, from the defaults down, in either order."""
RUNGS = (
    ("codec: int8 to f32", 0, 4),
    ("tau: 2 to 0", 1, 3),
    ("H: 24 to 12", 2, 0),
    ("H: 12 to 4", 3, 1),
    ("H: 4 to 1", 4, 2),
    ("RDA to the mean", 5, 5),
    ("moments merged", 6, 6),
    ("gradients merged", 7, 7),
)
"""What a rung changes, and its place in either order."""


def ladder(size: Size) -> Iterator[Row]:
    """Yield the rows between the defaults and data-parallel, in both orders."""
    found: dict[str, str] = {}
    for order in ORDERS:
        found = {row: above for above, row in itertools.pairwise(order)} | found
    for name, above in found.items():
        if name == "data-parallel":
            continue
        cycle = int(name.split()[4].rstrip(","))
        sync: dict[str, Any] = {"steps_per_cycle": cycle, "fragments": cycle}
        sync |= FLOATS if "f32" in name else {}
        sync |= AT_ONCE if "tau 0" in name else {}
        sync |= {"merge": "mean"} if MEAN in name else {}
        yield Row(
            name=name,
            group=LADDER,
            against=above,
            config=config(size, **sync),
            options=network(sync.get("overlap_steps", 2)),
            moments_every=1 if name == MERGED else 0,
        )
    yield from _inner(size)
    yield from _moments(size)


def _inner(size: Size) -> Iterator[Row]:
    """Yield the defaults and data-parallel by inner optimizer and islands."""
    for name, rate in (("adamw", 0.0), *OPTIMIZERS):
        what = "" if name == "adamw" else f"{name} {rate:g}, "
        base = f"{what}data-parallel"
        rows = [
            (
                f"{what}{DEFAULTS}, {n} islands",
                config(size, islands=equal(n, size.sequences), **CYCLE_24),
            )
            for n in (2, 4, 8)
        ]
        if what:  # Without, it is a headline.
            rows.insert(0, (base, plain(size, size.sequences)))
        for own, settings in rows:
            yield Row(
                name=own,
                group="inner",
                against="" if own == base else base,
                plain=own == base,
                config=inner(settings, name, rate or settings.run.inner.learning_rate),
                options=network(2),
            )


def _moments(size: Size) -> Iterator[Row]:
    """Yield rows whose parameters are merged every 24 steps, moments more often; and
    with as many merges, but more of them early or late."""
    first = f"{AT_ONCE_24}, moments never"
    for name, every, power in (
        (first, NEVER, 1.0),
        *((f"{AT_ONCE_24}, moments every {n}", n, 1.0) for n in (24, 6, 1)),
        *((f"{AT_ONCE_24}, merge k at k^{p:g}", NEVER, p) for p in (0.7, 1.5, 2.0)),
    ):
        yield Row(
            name=name,
            group="moments",
            against="data-parallel" if name == first else first,
            config=config(size, **CYCLE_24 | {"merge": "mean"} | FLOATS | AT_ONCE),
            moments_every=every,
            merges_power=power,
        )


def levers(size: Size) -> Iterator[Row]:
    """Yield rows on bits, cycle, overlap and momentum, over the product's defaults."""
    short: dict[str, Any] = {"overlap_steps": 1}
    for name, cycle, changes, outers in (
        (DEFAULTS, 24, {}, BOTH),
        (INT4, 14, FOUR_BITS, BOTH),
        (f"{INT4}, tau 1", 14, FOUR_BITS | short, BOTH[:1]),
        ("H = P = 12, int4", 12, FOUR_BITS, BOTH[:1]),
        ("H = P = 12, int4, tau 1", 12, FOUR_BITS | short, BOTH[:1]),
        ("H = P = 8, int2", 8, TWO_BITS, BOTH[:1]),
        (f"{DEFAULTS}, tau 1", 24, short, BOTH[:1]),
        ("H = P = 4, int8", 4, {}, BOTH[1:]),
        (SHORT, 4, SHORT_CYCLE, BOTH),
        ("H = P = 4, int4, tau 1", 4, FOUR_BITS | short, BOTH[:1]),
        ("H = P = 8, int8, tau 1", 8, short, BOTH[:1]),
        ("H = P = 2, int8", 2, {}, BOTH),
        ("H = P = 1, int8", 1, {}, BOTH[1:]),
    ):
        sync = {"steps_per_cycle": cycle, "fragments": cycle, **changes}
        for suffix, outer in outers:
            against = name if suffix else DEFAULTS
            if name == DEFAULTS and not suffix:
                against = "data-parallel"
            yield Row(
                name=name + suffix,
                group=GROUP,
                against=against,
                config=config(size, outer=outer, **sync),
                options=network(sync.get("overlap_steps", 2)),
            )
