"""Advice on uneven fragments: the largest one sizes links, merges, snapshots and takes.

Changes that leave more as it is are tried first: another number of fragments near the
present one, fragments by size, numbers further away, then a merge rule that goes
element by element and so cuts every large tensor into bands. Tiles follow from shapes
alone and no setting changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.config import Config, ConfigError
from diloco_jax.core.fragments import EVEN, FragmentPlan, Piece
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.changes import Change, changed, shown
from diloco_jax.planning.results import Advice

NEAR = 4
"""First, numbers of fragments within 1 / NEAR of the present one are tried."""
MOST = 2
"""At most 1 / MOST more fragments are tried, and at least so many that even fragments
are no larger than the largest one now."""
BY_ELEMENT = "mean"
"""The merge rule that leaves no tensor whole."""
Accepts = Callable[[Change, Config, FragmentPlan], bool]
"""Tell if nothing is worse with a change: (change, changed config, its fragments)."""


def unevenness(fragments: FragmentPlan) -> float:
    """Return the size of the largest fragment over the mean."""
    return max(fragments.sizes) * len(fragments.fragments) / fragments.total


def to_even(
    config: Config, fragments: FragmentPlan, accepts: Accepts
) -> Iterator[Advice]:
    """Yield advice if the fragments are uneven: the smallest change with which they are
    even, the largest one is no larger than now, and nothing else is worse."""
    if unevenness(fragments) <= EVEN:
        return
    largest, model = max(fragments.sizes), build(config.run)
    said = (
        f"the largest of {len(fragments.fragments)} fragments is "
        f"{unevenness(fragments):.2f} of the mean, above {EVEN:g}: it sets the peak of "
        f"each link, and the memory of merges, snapshots and takes"
    )
    for change in _changes(config, fewest=math.ceil(fragments.total / largest)):
        try:
            then = changed(config, change).validate()
            cut = build_plan(then.run, model)
        except ConfigError:
            continue
        if unevenness(cut) > EVEN or max(cut.sizes) > largest:
            continue
        if accepts(change, then, cut):
            less = 1 - max(cut.sizes) / largest
            smaller = f"{less:.0%} smaller" if less >= 0.005 else "no larger"
            yield Advice(
                text=f"{said}; set {shown(change)}, with which it is "
                f"{unevenness(cut):.2f} of the mean and {smaller}",
                changes=(change,),
            )
            return
    yield Advice(
        text=f"{said}; no setting that was tried mends it: {_whole(config, fragments)}",
        changes=(),
    )


def _changes(config: Config, fewest: int) -> Iterator[dict[str, Any]]:
    sync = config.run.sync
    now, most = sync.fragments, sync.fragments + sync.fragments // MOST
    counts = sorted(range(fewest, most + 1), key=lambda count: abs(count - now))
    near = [count for count in counts if abs(count - now) <= now // NEAR]
    yield from ({"sync.fragments": count} for count in near if count != now)
    if sync.fragment_by != "size":
        yield {"sync.fragment_by": "size"}
    yield from ({"sync.fragments": count} for count in counts[len(near) :])
    if sync.merge != BY_ELEMENT:
        yield {"sync.merge": BY_ELEMENT}


def _whole(config: Config, fragments: FragmentPlan) -> str:
    """Say which piece of the largest fragment is not cut, and by what."""
    sizes = fragments.sizes
    pieces = fragments.fragments[sizes.index(max(sizes))]
    piece: Piece = max(pieces, key=lambda own: own.size)
    run = config.run
    return (
        f"its largest piece is {piece.name} of {piece.size:,} parameters, with "
        f"sync.fragment_by = {run.sync.fragment_by!r}, sync.merge = "
        f"{run.sync.merge!r}, outer.optimizer = {run.outer.optimizer!r}"
    )
