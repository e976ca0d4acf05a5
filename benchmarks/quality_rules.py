"""Rows of `quality.py` on published rules, tuned a little: what moves the inner step,
when to merge, and the outer step.

Screened as `quality_levers.py` says, at "0.1m, short" with two seeds, at the learning
rate of the defaults. Every row but the early merges is over the defaults, which are
int8 and H = P = 24 with an outer step of 1, and sends as many bytes. A row that changes
the inner step is over an unchanged base, and its gap is to unchanged data-parallel
training.

Predictions, percent over the base, made before any of these rows was run:

| lever | settings, and predictions |
| --- | --- |
| slow momentum, beta 0.99 | share 0.3: +1.5; share 0.7: +5 |
| slow momentum, beta 0.999 | share 0.3: +3 |
| merges early, as many of them | every 4 of 56 steps -0.5; every 4 of 28 -0.5; \
every one of 12 0 |
| Nesterov | 0.7 / 0.6: +3; 0.7 / 0.5: +1.5; 0.68 / 0.37: +0.3 |
| HeLoCo | SGD 1.5: +4; Nesterov 0.4 / 0.6: +8; 0.7 / 0.6: +4 |
| IsoLoCo | SGD 1.5: +3; 2: +2; 3: +4 |
| decay | / 8: +0.5; x 8: +1 |
| beta2 | 0.99: +0.7; 0.999: +3 |

Decay / 8 (+0.5, three seeds), beta2 = 0.99 (+0.7, two) and AdEMAMix with a slow beta of
0.98 at half the rate (+7.2, two) were known from runs that are not among the raw ones.

Seen, 2026-11-30, percent over the base in each pair: slow momentum +5.8 and +7.4, +16.2
and +14.6, 0.999 +7.6 and +8.2 (islands lose up to half a percent of their tokens to
deltas that are refused as too long); early merges +1.6, +0.2 and +0.8 on the mean of
two, so a rarer merge later costs more than a denser start gives; MuLoCo 0.7 / 0.6 +2.2
and +4.0, 0.7 / 0.5 +0.4 and +2.0; SNOO -0.4 and -0.4; HeLoCo +8.0 and +7.6, +7.3 and
+10.3, +9.1 and +10.6; IsoLoCo 1.5 +3.4 and -0.7, 2 +2.2 and +0.2, 3 +4.2 and +2.3;
decay / 8 -0.5 and +1.2, x 8 +0.5 and +1.8; beta2 0.99 +0.6 and +0.9, 0.999 -0.8 and
+0.3. Ahead by more than half a percent in both pairs is none.

Command: `python benchmarks/quality.py --size "0.1m, short" --only "slow momentum"
"early merges" "outer rules" "decay and beta2" --seeds 2`. Cost: 1 to 3 minutes of one
core per run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from quality_configs import PLAIN, Row, Size, config, network
from quality_levers import AT_ONCE, AT_ONCE_24, CYCLE_24, DEFAULTS, FLOATS, NEVER
from quality_variants import GENTLE, member

from diloco_jax.config import OuterConfig


def rules(size: Size) -> Iterator[Row]:
    """Yield the rows of all groups."""
    yield from _slow_momentum(size)
    yield from _early(size)
    yield from _outer(size)
    yield from _decay(size)


def _over_defaults(size: Size, group: str, what: str) -> Row:
    """Return the defaults, as a row that is compared with them."""
    return Row(
        name=f"{DEFAULTS}, {what}",
        group=group,
        against=DEFAULTS,
        config=config(size, **CYCLE_24),
        options=network(2),
    )


def _slow_momentum(size: Size) -> Iterator[Row]:
    """Yield rows with a slow first moment beside the fast one (MT-DAO, arXiv
    2510.05361): 0.99 forgets half of a gradient in 69 steps, or three cycles, 0.999 in
    693, longer than the run."""
    for beta, share in ((0.99, 0.3), (0.99, 0.7), (0.999, 0.3)):
        what = f"slow momentum {beta:g}, share {share:g}"
        row = _over_defaults(size, "slow momentum", what)
        own = row.config.replace("inner.optimizer", member("inner/slow_momentum"))
        own = own.replace("inner.arguments", (("b3", beta), ("nu", share)))
        yield dataclasses.replace(row, config=own)


def _early(size: Size) -> Iterator[Row]:
    """Yield rows with as many merges as one each 24 steps makes, dense in the first
    tenth or less and rarer afterwards (a start by data-parallel training, as in
    post-local SGD, arXiv 1808.07217, which goes over to local steps late)."""
    for every, until in ((4, 56), (4, 28), (1, 12)):
        yield Row(
            name=f"{AT_ONCE_24}, H = {every} for {until} steps",
            group="early merges",
            against=f"{AT_ONCE_24}, moments never",
            config=config(size, **CYCLE_24 | {"merge": "mean"} | FLOATS | AT_ONCE),
            moments_every=NEVER,
            merges_early=(every, until),
        )


def _outer(size: Size) -> Iterator[Row]:
    """Yield rows of published outer steps, learning rate / momentum.

    Nesterov 0.7 / 0.6 is MuLoCo's for one worker (arXiv 2505.23725), and 0.7 / 0.5 what
    its author took for a record of modded-nanogpt (pull request 277). SNOO (arXiv
    2510.15830) is Nesterov on the step of one worker, by the same formula as
    "nesterov": here on the merged step, 0.68 / 0.37 as in its authors' record there
    (pull request 128). HeLoCo (arXiv 2606.00271) is written for Nesterov, IsoLoCo
    (arXiv 2607.03011) for none; both merge to a shorter step than RDA, which a longer
    outer step could make up for.
    """
    muloco = dataclasses.replace(GENTLE, learning_rate=0.7)
    rates = {
        rate: dataclasses.replace(PLAIN, learning_rate=rate) for rate in (1.5, 2, 3)
    }
    heloco, isoloco = member("merge/heloco"), member("merge/isoloco")
    for what, merge, outer in (
        ("MuLoCo", "rda", muloco),
        ("MuLoCo", "rda", dataclasses.replace(muloco, momentum=0.5)),
        (
            "SNOO",
            "rda",
            OuterConfig(optimizer="nesterov", learning_rate=0.68, momentum=0.37),
        ),
        ("HeLoCo", heloco, rates[1.5]),
        *(("HeLoCo", heloco, outer) for outer in (GENTLE, muloco)),
        *(("IsoLoCo", isoloco, outer) for outer in rates.values()),
    ):
        step = f"{outer.optimizer} {outer.learning_rate:g} / {outer.momentum:g}"
        row = _over_defaults(size, "outer rules", f"{what}, {step}")
        own = row.config.replace("sync.merge", merge).replace("outer", outer)
        yield dataclasses.replace(row, config=own)


def _decay(size: Size) -> Iterator[Row]:
    """Yield rows whose decay goes by the islands (MuLoCo's job files: by one over their
    number), and whose second moment by tokens (arXiv 2507.07101: an eighth of the batch
    takes 0.95^(1/8) = 0.994)."""
    for field, value in (
        *(("weight_decay", value) for value in (0.0125, 0.8)),
        *(("beta2", value) for value in (0.99, 0.999)),
    ):
        row = _over_defaults(size, "decay and beta2", f"{field} {value:g}")
        own = row.config.replace(f"inner.{field}", value)
        yield dataclasses.replace(row, config=own)
