"""The whole path of the data in one process, islands in lockstep: the oracle.

Everything is done by the functions that coordinator and islands call, piece by piece
and in the same order, so a run of the runtime with the same events gives the same
bits. There are no failures, no grace and no staleness here: everyone takes at tick n,
at step floor(n H / P), everyone is merged, and everyone adopts tau steps later.

`H` steps per cycle, `P` fragments, `tau` overlap steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pieces import merge_deltas, publish, set_piece

from diloco_jax.core.changes import adopt, apply_publish, delta
from diloco_jax.core.codecs import (
    decode_uses,
    encode_uses,
    encode_with_feedback,
    get_codec,
)
from diloco_jax.core.families import ADOPT_RULES, MERGE_RULES, WEIGHTINGS
from diloco_jax.core.fragments import (
    FragmentPlan,
    Params,
    PayloadLayout,
    Piece,
    get_piece,
)
from diloco_jax.core.merging import rule_for, weight
from diloco_jax.core.outer import OuterSettings, make_outer, outer_step
from diloco_jax.files import digest_of


class RoundIsland(NamedTuple):
    """An island as the oracle sees it."""

    name: str
    carry: Any
    """State of the island besides its parameters: moments, place in the data."""
    step: Callable[[Any, Params, int], tuple[Any, Params]]
    """(carry, params, k) -> (carry, params) after k inner steps; donates nothing."""
    tokens_per_step: int
    used: Callable[[Any], np.ndarray] = lambda carry: np.zeros(0)
    """carry -> how often each row of the tables that weigh by use was used so far."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Settings of the islands' work together; names as in the run's configuration."""

    steps_per_cycle: int
    outer: OuterSettings
    overlap_steps: int = 0
    weighting: str = "tokens"
    merge: str = "rda"
    adopt: str = "keep"
    blend_alpha: float = 0.5
    codec_up: str = "f32"
    codec_down: str = "f32"
    error_feedback: bool = True


class MergeRecord(NamedTuple):
    """One merge: the first one is tick 1."""

    tick: int
    fragment: int
    step: int
    """At which everyone took."""
    digest: str
    """`digest_of` of the merge's publish."""


class RoundResult(NamedTuple):
    """Where a run ended; piece arrays are in the plan's order."""

    theta: list[tuple[jax.Array, ...]]
    """Global parameters by fragment."""
    anchors: list[list[jax.Array]]
    """Last published version by fragment."""
    local: dict[str, Params]
    """Parameters by island, at the step of the last tick."""
    history: list[MergeRecord]


def run(
    params: Mapping[str, Any],
    plan: FragmentPlan,
    islands: Sequence[RoundIsland],
    settings: RoundSettings,
    ticks: int,
) -> RoundResult:
    """Trains for `ticks` ticks from `params`, which all islands start with.

    The run ends at the last tick's step, after its merge and the adoptions due then.

    Raises:
      ValueError: tau is not in [0, H), two islands have one name.
    """
    steps_per_cycle, tau = settings.steps_per_cycle, settings.overlap_steps
    if not 0 <= tau < steps_per_cycle:
        raise ValueError(
            f"overlap_steps = {tau} with steps_per_cycle = {steps_per_cycle}; a "
            f"fragment must be adopted before its next take: choose less"
        )
    if len({island.name for island in islands}) < len(islands):
        raise ValueError(f"island names {[i.name for i in islands]} are not unique")
    coordinator = _Coordinator(params, plan, settings)
    members = [_Island(island, params, plan, settings) for island in islands]
    members.sort(key=lambda member: member.island.name)
    on_the_way: list[tuple[int, int, list[jax.Array]]] = []
    history = []
    step = 0

    def advance_to(target: int) -> None:
        nonlocal step
        while on_the_way and on_the_way[0][0] <= target:
            due, fragment, published = on_the_way.pop(0)
            for member in members:
                member.train(due - step)
                member.adopt(fragment, published, due)
            step = due
        for member in members:
            member.train(target - step)
        step = target

    # A fragment is adopted before it is taken again (tau < H), and fragments do not
    # depend on each other: it does not matter here which of a boundary's takes and
    # adoptions comes first.
    for tick in range(1, ticks + 1):
        advance_to(tick * steps_per_cycle // len(plan.fragments))
        fragment = (tick - 1) % len(plan.fragments)
        takes = [member.take(fragment, step) for member in members]
        published = coordinator.merge(fragment, takes)
        layout = PayloadLayout.of(
            get_codec(settings.codec_down), plan.fragments[fragment]
        )
        digest = digest_of(layout.pack(published))
        history.append(MergeRecord(tick, fragment, step, digest))
        on_the_way.append((step + tau, fragment, published))
    advance_to(step)
    local = {member.island.name: member.params for member in members}
    return RoundResult(coordinator.theta, coordinator.anchors, local, history)


class _Take(NamedTuple):
    weight: float
    encoded: list[jax.Array]
    uses: np.ndarray
    """By row of the whole table, per token."""


class _Island:
    """Parameters of one island, with base, anchor and residual of every fragment."""

    def __init__(
        self,
        island: RoundIsland,
        params: Mapping[str, Any],
        plan: FragmentPlan,
        settings: RoundSettings,
    ) -> None:
        self.island, self.carry, self.params = island, island.carry, dict(params)
        self.plan, self.settings = plan, settings
        self.up, self.down = (
            get_codec(settings.codec_up),
            get_codec(settings.codec_down),
        )
        self.anchors = _copy_pieces(params, plan)
        self.bases = [list(anchors) for anchors in self.anchors]
        self.residuals = [[jnp.zeros_like(a) for a in f] for f in self.anchors]
        self.counted_from = [0] * len(plan.fragments)
        self.used_from = [island.used(island.carry)] * len(plan.fragments)

    def train(self, steps: int) -> None:
        if steps:
            self.carry, self.params = self.island.step(self.carry, self.params, steps)

    def take(self, fragment: int, step: int) -> _Take:
        encoded = []
        for i, piece in enumerate(self.plan.fragments[fragment]):
            local = get_piece(self.params, piece)
            change = delta(self.anchors[fragment][i], local)
            residual = self.residuals[fragment][i]
            octets, residual = encode_with_feedback(self.up, change, residual)
            encoded.append(octets)
            self.bases[fragment][i] = local
            if self.settings.error_feedback:
                self.residuals[fragment][i] = residual
        steps = step - self.counted_from[fragment]
        self.counted_from[fragment] = step
        tokens = steps * self.island.tokens_per_step
        weighting = WEIGHTINGS.find(self.settings.weighting)
        used = self.island.used(self.carry)
        counts = (used - self.used_from[fragment]).astype(np.uint32)
        self.used_from[fragment] = used
        uses = decode_uses(np.asarray(encode_uses(counts))) / tokens
        return _Take(weight(weighting, tokens, steps), encoded, uses)

    def adopt(self, fragment: int, published: list[jax.Array], step: int) -> None:
        rule = ADOPT_RULES.find(self.settings.adopt)
        alpha = self.settings.blend_alpha
        for i, piece in enumerate(self.plan.fragments[fragment]):
            base, old = self.bases[fragment][i], self.anchors[fragment][i]
            anchor = apply_publish(self.down, old, published[i])
            local = adopt(rule, get_piece(self.params, piece), base, anchor, alpha)
            self.params = set_piece(self.params, piece, local)
            self.bases[fragment][i] = self.anchors[fragment][i] = anchor
        if rule.loses_steps:
            self.counted_from[fragment] = step
            self.used_from[fragment] = self.island.used(self.carry)


class _Coordinator:
    """Global parameters, anchors and outer state of every fragment."""

    def __init__(
        self, params: Mapping[str, Any], plan: FragmentPlan, settings: RoundSettings
    ) -> None:
        self.plan, self.settings = plan, settings
        self.up, self.down = (
            get_codec(settings.codec_up),
            get_codec(settings.codec_down),
        )
        self.tx = make_outer(settings.outer)
        self.theta = [tuple(pieces) for pieces in _copy_pieces(params, plan)]
        self.anchors = _copy_pieces(params, plan)
        self.states = [self.tx.init(theta) for theta in self.theta]

    def merge(self, fragment: int, takes: Sequence[_Take]) -> list[jax.Array]:
        pieces, before = self.plan.fragments[fragment], self.theta[fragment]
        merged = tuple(
            self._merge_piece(piece, [take.encoded[i] for take in takes], takes)
            for i, piece in enumerate(pieces)
        )
        unused = [
            ~np.any([piece.uses_of(take.uses) > 0 for take in takes], axis=0)
            if piece.by_use
            else np.zeros(piece.shape[:1], bool)
            for piece in pieces
        ]

        def kept(new: Any, old: Any) -> Any:
            """Put rows that nobody used back, where there is an array a piece."""
            if not _by_piece(new):
                return new
            return tuple(
                jnp.where(rows.reshape(-1, *(1,) * (here.ndim - 1)), there, here)
                for rows, here, there in zip(unused, new, old, strict=True)
            )

        def _by_piece(node: Any) -> bool:
            return type(node) is tuple and [
                getattr(x, "shape", None) for x in node
            ] == [piece.shape for piece in pieces]

        theta, state = outer_step(self.tx, before, self.states[fragment], merged)
        self.theta[fragment] = kept(theta, before)
        self.states[fragment] = jax.tree.map(
            kept, state, self.states[fragment], is_leaf=_by_piece
        )
        published = []
        for i, theta in enumerate(self.theta[fragment]):
            octets, anchor = publish(self.down, theta, self.anchors[fragment][i])
            published.append(octets)
            self.anchors[fragment][i] = anchor
        return published

    def _merge_piece(
        self, piece: Piece, encoded: Sequence[jax.Array], takes: Sequence[_Take]
    ) -> jax.Array:
        deltas = [self.up.decode(octets, piece.shape) for octets in encoded]
        rule = MERGE_RULES.find(self.settings.merge)
        weights, uses = [take.weight for take in takes], None
        if piece.by_use:
            uses = np.stack([piece.uses_of(take.uses) for take in takes])
        return merge_deltas(deltas, weights, rule_for(piece, rule), uses=uses)


def _copy_pieces(
    params: Mapping[str, Any], plan: FragmentPlan
) -> list[list[jax.Array]]:
    # Copies: the outer step donates its parameters.
    return [
        [jnp.array(np.asarray(get_piece(params, p)), jnp.float32) for p in fragment]
        for fragment in plan.fragments
    ]
