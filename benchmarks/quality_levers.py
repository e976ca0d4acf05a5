"""Rows of `quality.py` on what could close the gap at no more bytes: bits for merges, a
shorter overlap, momentum.

Screened at "0.1m, short" with two seeds, all at 4e-3, the best of the three rates that
were tried for data-parallel training and for 8 islands there; what is ahead of the
defaults by more than half a percent goes on to five pairs, and to longer runs. With
P = H every row sends one fragment a step, so it sends as many messages, and the
headers of all are alike; `bytes_up` and `bytes_down` of a raw run count payloads, with
scales and tails. A parameter is 1.008 bytes as int8 and 0.5625 as int4, with a scale
for 32 of them: int4 at H = 12 sends 11.6 % more a step than int8 at H = 24, at H = 14
4.3 % less.

Predictions over the defaults (int8, H = P = 24, tau = 2, an outer step of 1), made when
one seed of int4 at H = 12 (-3.0 %) and of int8 there (-2.7 %) was known: int4 at H = 14
-2.3 %, with tau = 1 -2.8 %; tau = 1 alone -0.5 %. Nesterov 0.4 / 0.6 over an outer step
of 1, in 586 steps: +0.8 % at H = 24, +0.5 % at H = 14, 0 at H = 4, +4 % at H = 2.

Command: `python benchmarks/quality.py --size "0.1m, short" --only data-parallel levers
--seeds 2`. Cost: a minute of one core per run, up to three at H = 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quality_configs import PLAIN, Row, Size, config, network
from quality_variants import GENTLE, PRESET

from diloco_jax.config import OuterConfig

GROUP = "levers"
DEFAULTS = "H = P = 24, int8"
"""The product's own codec, cycle, fragments and overlap."""
INT4 = "H = P = 14, int4"
FOUR_BITS: dict[str, Any] = {"codec_up": "int4", "codec_down": "int4"}
BOTH: tuple[tuple[str, OuterConfig], ...] = (("", PLAIN), (PRESET, GENTLE))
"""Outer steps without and with momentum, with the ends of their rows' names."""


def levers(size: Size) -> Iterator[Row]:
    """Yield rows on bits, cycle, overlap and momentum, over the product's defaults."""
    short: dict[str, Any] = {"overlap_steps": 1}
    for name, cycle, changes, outers in (
        (DEFAULTS, 24, {}, BOTH),
        (INT4, 14, FOUR_BITS, BOTH),
        (f"{INT4}, tau 1", 14, FOUR_BITS | short, BOTH[:1]),
        ("H = P = 12, int4", 12, FOUR_BITS, BOTH[:1]),
        ("H = P = 12, int4, tau 1", 12, FOUR_BITS | short, BOTH[:1]),
        ("H = P = 12, int8", 12, {}, BOTH[:1]),
        (f"{DEFAULTS}, tau 1", 24, short, BOTH[:1]),
        ("H = P = 4, int8", 4, {}, BOTH),
        ("H = P = 2, int8", 2, {}, BOTH),
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
