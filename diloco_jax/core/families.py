"""The open families of a config: what a member of each must be, and the names of those
that the package has. It reads without JAX.

Merge rules are of three kinds; a member of the family is one of them.

- `WeightedSum` sees weights and lengths alone: memory does not grow with the islands,
  and deltas are decoded a few tiles at a time.
- `Elementwise` sees the same elements of all deltas, a block of them at a time.
- `Whole` sees all deltas of a piece, uncut, and may keep a state.

All their methods are pure functions of arrays that `jax.jit` can trace, but for those
of a `WeightedSum`, which takes numbers. Weights are shares: they are not negative, and
their sum is 1. A rule need not inherit from these classes, which only hold the defaults
of most rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from diloco_jax.core.members import Family

if TYPE_CHECKING:
    import jax
    import optax

    from diloco_jax.core.tiles import ArrayLike


class Weighting(Protocol):
    """The weight of a delta in a merge: a function."""

    def __call__(self, tokens: int, steps: int) -> float:
        """Return the weight of a delta with that many tokens and steps, both at least
        1. It must be finite and above 0; only ratios of weights matter."""


WEIGHTINGS: Family[Weighting] = Family(
    kind="weighting",
    table={
        "tokens": "diloco_jax.core.merging:tokens",
        "tokens_times_rate": "diloco_jax.core.merging:tokens_times_rate",
        "uniform": "diloco_jax.core.merging:uniform",
    },
    checker="diloco_jax.core.contracts:check_weighting",
)


Shape = tuple[int, ...]
State = Any
"""A pytree of arrays that a rule keeps for a piece from merge to merge."""


class Described(Protocol):
    """The facts that every rule states about itself."""

    needs: Literal["sum", "elementwise", "whole"]
    by_element: bool = False
    """True if an element of the merged delta depends on that element of the deltas
    alone. A tensor that is larger than a fragment is then merged in bands."""
    keeps_length: bool = False
    """True if a merged delta is as long as the deltas, however little they agree; the
    presets of the outer optimizer depend on it."""
    keeps_equal: bool = True
    """True if equal deltas are merged to that same delta."""
    embeddings_by_mean: bool = True
    """True if pieces with a vocabulary axis, and experts, are merged by the weighted
    mean."""
    flush_by_mean: bool = True
    """True if the last merge of a run merges all pieces by the weighted mean."""
    extra_copies: int = 0
    """Number of f32 arrays of a piece's size that a merge needs besides the deltas, for
    `diloco plan`."""


class WeightedSum(Described, Protocol):
    """A rule that merges deltas d into scale * sum(factor d), and keeps no state.

    `squares` are |d|^2, one per delta.
    """

    needs: Literal["sum"] = "sum"

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the factor of each delta in the sum."""

    def scale(
        self, weights: Sequence[float], squares: Sequence[float], square: float
    ) -> float | None:
        """Return the factor of the sum; None if the weighted mean is to be taken
        instead.

        square: |sum(factor d)|^2.
        """
        return 1.0

    def direction_square(self, square: float) -> float | None:
        """Return |sum of w unit(d)|^2 if it follows from `square`, |sum(factor d)|^2;
        else None.
        """
        return None


class Elementwise(Described, Protocol):
    """Merges blocks of `M` deltas; keeps no state."""

    needs: Literal["elementwise"] = "elementwise"
    by_element: bool = True

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array
    ) -> jax.Array:
        """Merge f32[M, ...], f32[M] -> f32[...], times `share`."""


class Whole(Described, Protocol):
    """Merges whole pieces of `M` deltas; may keep a state for each piece."""

    needs: Literal["whole"] = "whole"

    def start(self, shape: Shape) -> State:
        """Return the state before the first merge of a run or a term."""
        return ()

    def recovered(self, state: State, change: ArrayLike) -> State:
        """Return the state after a merge of which only the published change is known,
        as after a crash.
        """
        return state

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """Merge f32[M, *shape], f32[M] -> (`share` times the merged delta f32[shape],
        the state for the next merge)."""


MergeRule = WeightedSum | Elementwise | Whole


MERGE_RULES: Family[MergeRule] = Family(
    kind="merge rule",
    table={
        "rda": "diloco_jax.core.merging:RDA",
        "mean": "diloco_jax.core.merging:MEAN",
        "clipped_mean": "diloco_jax.core.merging:CLIPPED_MEAN",
        "trimmed_mean": "diloco_jax.core.merging:TRIMMED_MEAN",
    },
    checker="diloco_jax.core.contracts:check_merge_rule",
)


Alpha: TypeAlias = "jax.Array | float"


class AdoptRule(Protocol):
    """A way for an island to adopt a published piece."""

    adopts_first: bool = True
    """True if a boundary with both adopts a fragment before taking it."""
    keeps_pending: bool = False
    """True if a version known to lack the last delta moves local and base alike
    (`moved`), so that the island keeps its own delta until a version contains it. Costs
    a base for every fragment whose delta is late."""
    loses_steps: bool = False
    """True if an adoption undoes the steps since the take, so that the next delta does
    not hold them."""

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """Return the piece's new local values, f32[shape].

        Args:
          local: the island's values now.
          base: the island's values at its last take, or the anchor adopted since.
          anchor: the version to adopt.
          alpha: `sync.blend_alpha`.
        """


ADOPT_RULES: Family[AdoptRule] = Family(
    kind="adopt rule",
    table={
        "keep": "diloco_jax.core.changes:KEEP",
        "rebase": "diloco_jax.core.changes:REBASE",
        "overwrite": "diloco_jax.core.changes:OVERWRITE",
        "blend": "diloco_jax.core.changes:BLEND",
    },
    checker="diloco_jax.core.contracts:check_adopt_rule",
)


class TileCodec(Protocol):
    """How a tile is encoded. All arrays end in the axis of one tile.

    Every machine must decode the same bits, fused with other operations or not: use
    only products that are exact in f32, and no sums.
    """

    def tile_bytes(self, elements: int) -> int:
        """Return the bytes of an encoded tile with that many elements."""

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Encode f32[..., elements], free of subnormals -> uint8[..., tile_bytes]."""

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Decode uint8[..., tile_bytes] -> f32[..., elements], free of subnormals."""

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return the largest change of each element, f32[..., elements]; for tests."""


CODECS: Family[TileCodec] = Family(
    kind="codec",
    table={
        "f32": "diloco_jax.core.codecs:F32",
        "bf16": "diloco_jax.core.codecs:BF16",
        "int8": "diloco_jax.core.codecs:INT8",
        "int4": "diloco_jax.core.codecs:INT4",
        "int2": "diloco_jax.core.codecs:INT2",
    },
    checker="diloco_jax.core.contracts:check_codec",
)


Arrays: TypeAlias = "tuple[jax.Array, ...]"
"""One f32 array per piece of a fragment."""


class OuterOptimizer(Protocol):
    """A function, or a callable object, that makes an optax optimizer of merged deltas.

    With `elementwise = True` it treats each element by itself, and a fragment is
    updated a few tiles at a time. Otherwise it is given the whole fragment, each piece
    in its own shape, which takes more time and memory. An optimizer whose step
    determines its merged delta may have `delta_of(updates, state, momentum)`, which
    returns the delta from which it makes these updates in that state: it keeps its
    state through a crash of the coordinator up to the last merge.
    `native_step` names the step of `core/tiles.py` that computes an optimizer of the
    package.
    """

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer at learning rate 1; its updates are added to the
        parameters. momentum: `outer.momentum`, which it may ignore."""


OUTER_OPTIMIZERS: Family[OuterOptimizer] = Family(
    kind="outer optimizer",
    table={
        "sgd": "diloco_jax.core.outer:SGD",
        "nesterov": "diloco_jax.core.outer:NESTEROV",
    },
    checker="diloco_jax.core.contracts:check_outer_optimizer",
    otherwise="diloco_jax.core.outer:find_outer",
)


class InnerOptimizer(Protocol):
    """A function that makes an optax optimizer of gradients, as those of optax do. Of
    `b1`, `b2`, `mu_dtype`, and `weight_decay` with `mask`, it is given what it takes;
    what else it takes has a default, which `inner.arguments` may change."""

    def __call__(self, learning_rate: float) -> optax.GradientTransformation:
        """Make the optimizer, whose updates are in proportion to the learning rate."""


INNER_OPTIMIZERS: Family[InnerOptimizer] = Family(
    kind="inner optimizer",
    table={
        "adamw": "optax:adamw",
        "lion": "optax:lion",
        "sgd": "optax:sgd",
        "muon": "optax.contrib:muon",
    },
    checker="diloco_jax.core.contracts:check_inner_optimizer",
    otherwise="diloco_jax.core.inner:find_inner",
)
