"""Takes and adoptions on the device, and the model copies that they change.

Per piece it holds the anchor, the base, and with error feedback the residual. The base
is a copy of the local values at a take; it is kept until a version takes the delta's
place. The residual is kept before and after an outstanding take. All of them lie as the
piece does, in device or host memory. Parameters are donated to an adoption, which
changes them in place.

Parameters come and go as any pytree whose leaves are in the order of their names: the
nested dict by name, or the list of its leaves.

A boundary costs its thread a program for each piece, and an array for each result,
whatever their size. A loop of hundreds of small tensors would pay for these alone. So
small whole tensors of a fragment that are of one kind share their anchor, base and
residual, stacked, and one program. What comes and goes stays apart, piece by piece: the
bytes of messages and checkpoints do not depend on it.

A replica is the only holder of its train state: a step and an adoption donate its
arrays. If the train loop is the user's, that loop holds its own moments and lends the
parameters for the time of a boundary, with trees beside them: an average, or a copy in
bf16. An adoption moves the parameters in one step, which an average would follow only
slowly. So each piece of such a tree is moved by the same change, and keeps its distance
from the local values.

An island that evaluates the merged model while it trains has a copy of it too.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import (
    Box,
    Buffer,
    FragmentPlan,
    Part,
    PayloadLayout,
    Piece,
)
from diloco_jax.island.device.mesh import (
    Spreads,
    Tiles,
    abstract,
    parts_by_host,
    zeros,
)
from diloco_jax.island.device.programs import (
    Index,
    PiecePrograms,
    bits_shape,
    in_turn,
    land,
)
from diloco_jax.island.device.step import Trainer, TrainState, UseCounts
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.model import Metrics, Params
from diloco_jax.protocol.island.boundary import TakeOutcome
from diloco_jax.protocol.messages import Fields

SMALL = 2**16
"""Elements of the largest tensor that is stacked. An adoption makes such a leaf anew
instead of changing it in place."""
ROWS_MAX = 64
SPARE = 8
"""At most one row in so many is spare, over all stacks of a kind."""

Tree = TypeVar("Tree")
ByPiece = tuple[jax.Array, ...]


@dataclasses.dataclass(slots=True)
class PieceState:
    """A piece, or a stack of small ones: its arrays, and what programs are called
    with."""

    fragment: int
    numbers: tuple[int, ...]
    """Places of its pieces in the fragment, by row. If the fragment has too few, the
    last one is repeated: all stacks of a kind are alike, and compiled once."""
    leaves: tuple[int, ...]
    """Places of their leaves in the parameters."""
    programs: PiecePrograms
    index: Index
    anchor: Any = None
    base: Any = None
    """None: the anchor."""
    residual: Any = None
    """None without error feedback."""
    before: Any = None
    """Residual before the outstanding take."""

    @property
    def settled(self) -> Any:
        """Residual as if no take were outstanding."""
        return self.residual if self.before is None else self.before

    def of(self, by_piece: Sequence[Any]) -> tuple[Any, ...]:
        """Return its own part of values by piece of the fragment."""
        return tuple([by_piece[number] for number in self.numbers])

    def leaf(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return its own leaves of the parameters."""
        return tuple([leaves[place] for place in self.leaves])

    def write(self, leaves: list[Any], new: Iterable[Any]) -> None:
        """Replace its own leaves of the parameters."""
        for place, leaf in zip(self.leaves, new, strict=True):
            leaves[place] = leaf

    def put(self, leaves: list[Any], value: Any) -> None:
        """Write a value into its leaves of the parameters, which may be donated."""
        self.write(leaves, self.programs.put(self.leaf(leaves), self.index, value))

    def read(self, leaves: Sequence[Any]) -> Any:
        """Return a copy of its values in the parameters, laid out as its anchor."""
        return in_turn(self.programs.read(self.leaf(leaves), self.index))

    def take(self, leaves: Sequence[Any]) -> ByPiece:
        """Return the encoded delta by piece; keep its base and residual."""
        before = self.residual
        sent, self.residual, self.base = in_turn(
            self.programs.take(self.leaf(leaves), self.index, self.anchor, before)
        )
        self.before = before
        encoded: ByPiece = sent
        return encoded

    def adopt(
        self,
        leaves: list[Any],
        arrival: Arrival,
        alpha: jax.Array,
        *,
        keep: bool,
    ) -> None:
        """Adopt the arrived version in place; see `Exchange.adopt`."""
        programs, index, before = self.programs, self.index, self.anchor
        leaf = self.leaf(leaves)
        base = before if keep or self.base is None else self.base
        if arrival.anchor is not None:
            self.anchor = in_turn(programs.gather_anchor(self.of(arrival.anchor)))
        publishes = [self.of(publish) for publish in arrival.publishes]
        for publish in publishes[:-1]:
            encoded = programs.gathered(publish)
            self.anchor = in_turn(programs.advance(self.anchor, encoded))
        if publishes:
            encoded = programs.gathered(publishes[-1])
            leaf, self.anchor = in_turn(
                programs.arrive(leaf, index, base, self.anchor, encoded, alpha)
            )
        else:
            leaf = programs.adopt(leaf, index, base, self.anchor, alpha)
        self.write(leaves, leaf)
        if keep and self.base is not None:
            self.base = programs.move(self.base, before, self.anchor)
        else:
            self.base = None

    def apart(self, array: Any) -> ByPiece:
        """Return one of its arrays by piece, in f32: itself, or copies of the rows of a
        stack, which lie as leaves."""
        if self.programs.rows == 1:
            return (array,)
        rows: ByPiece = in_turn(self.programs.unstack(array))
        return rows

    def like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract arrays like those of `apart`."""
        programs = self.programs
        where = programs.piece if programs.rows == 1 else programs.leaf
        return (abstract(programs.shape, np.float32, where),) * programs.rows

    def together(self, by_piece: ByPiece) -> jax.Array:
        """Return `apart`'s argument from its result."""
        if self.programs.rows == 1:
            return by_piece[0]
        stack: jax.Array = in_turn(self.programs.read(by_piece, self.index))
        return stack


def states_of(
    plan: FragmentPlan, sync: SyncConfig, params: Params, memory: AnchorMemory
) -> list[list[PieceState]]:
    """Return what the island holds, by fragment, without arrays. All its hosts get the
    same."""
    by_path = jax.tree_util.tree_leaves_with_path(params)
    places = {tuple(k.key for k in path): n for n, (path, _) in enumerate(by_path)}

    def programs_of(piece: Piece) -> PiecePrograms:
        leaf = by_path[places[piece.path]][1]
        return PiecePrograms.of(sync, piece, leaf, memory)

    groups: list[dict[Hashable, list[int]]] = []
    sizes: dict[Hashable, list[int]] = collections.defaultdict(list)
    for pieces in plan.fragments:
        found: dict[Hashable, list[int]] = collections.defaultdict(list)
        for number, piece in enumerate(pieces):
            whole = piece.layer < 0 and piece.bands is None
            alone = None if whole and piece.size <= SMALL else number
            found[programs_of(piece), alone].append(number)
        groups.append(found)
        for key, numbers in found.items():
            sizes[key].append(len(numbers))

    def states(fragment: int) -> Iterator[PieceState]:
        pieces = plan.fragments[fragment]
        for key, numbers in groups[fragment].items():
            rows = rows_of(sizes[key])
            for start in range(0, len(numbers), rows):
                some = numbers[start : start + rows]
                some += some[-1:] * (rows - len(some))
                programs = dataclasses.replace(programs_of(pieces[some[0]]), rows=rows)
                yield PieceState(
                    fragment,
                    tuple(some),
                    tuple(places[pieces[number].path] for number in some),
                    programs,
                    programs.index_of(pieces[some[0]]),
                )

    return [list(states(fragment)) for fragment in range(len(plan.fragments))]


def rows_of(counts: Sequence[int]) -> int:
    """Return the rows of a kind's stacks: the most that leave few of them spare; 1: no
    stacks. counts: the kind's pieces by fragment."""
    total = sum(counts)
    for rows in range(min(max(counts), ROWS_MAX), 1, -1):
        if SPARE * sum(-count % rows for count in counts) <= total:
            return rows
    return 1


class Exchange:
    """Anchors, bases and residuals of all fragments of one island.

    params: the parameters by name, or abstract arrays that lie like them: nested dict
    of f32 on the island's mesh. memory: where anchors, bases and residuals lie. uses:
    counts them; None: pieces have no counts.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        sync: SyncConfig,
        params: Params,
        memory: AnchorMemory = "device",
        uses: UseCounts | None = None,
    ) -> None:
        self._plan, self.uses = plan, uses
        self._loses_steps = ADOPT_RULES.find(sync.adopt).loses_steps
        self.feeds_back = sync.error_feedback
        """True if there are residuals."""
        up = get_codec(sync.codec_up)
        self.layouts_up = tuple(PayloadLayout.of_delta(up, p) for p in plan.fragments)
        self.layouts_down = _layouts(plan, sync.codec_down)
        self.layouts_whole = _layouts(plan, "f32")
        self._states = states_of(plan, sync, params, memory)
        alpha = np.float32(sync.blend_alpha)
        self._alpha = self._states[0][0].programs.number(alpha)
        if self.feeds_back:
            for state in self._all():
                shape, lies = state.programs.values_shape, state.programs.piece
                state.residual = zeros(shape, np.float32, lies)

    # ---- the path of the data ---------------------------------------------------

    def take(self, fragment: int, params: Any) -> ByPiece:
        """Return the fragment's encoded delta by piece, and then its counts of use.

        Only one take of a fragment may be without a verdict (`judge`).
        """
        leaves = jax.tree.leaves(params)
        taken: ByPiece = self._by_piece(fragment, lambda state: state.take(leaves))
        return taken if self.uses is None else (*taken, *self.uses.take(fragment))

    def part_down(self, fragment: int) -> Part:
        """Return the part that this host fetches of a publish of the fragment, and of
        its anchor."""
        if jax.process_count() == 1:
            return ()
        return parts_by_host(self.spreads(fragment))[jax.process_index()]

    def spreads(self, fragment: int) -> Spreads:
        """Return how the fragment's pieces are spread over the island's hosts."""

        def by_piece(state: PieceState) -> Any:
            programs = state.programs
            return ((programs.spread, programs.grid),) * programs.rows

        spreads: Spreads = self._by_piece(fragment, by_piece)
        return spreads

    def put_publish(self, fragment: int, octets: Buffer) -> ByPiece:
        """Put this host's part of one encoded publish on its devices, by piece. Any
        thread may call it: `adopt` moves the tiles to the devices that need them.

        octets: the bytes of `part_down`.
        """
        layout = self.layouts_down[fragment]
        boxes = layout.split(octets, self.part_down(fragment))
        shapes = [placed.encoded_shape for placed in layout.placed]
        return self._land(fragment, boxes, shapes, np.uint8)

    def put_anchor(self, fragment: int, octets: Buffer) -> ByPiece:
        """Put this host's part of A_v in full on its devices, by piece, as the bits of
        f32 tiles. Any thread may call it, as `put_publish`.

        octets: the f32 tiles of `part_down`, box by box.

        Raises:
          ValueError: they have another length.
        """
        layout = self.layouts_whole[fragment]
        boxes = [
            (box, tiles.view(np.uint32))
            for box, tiles in layout.split(octets, self.part_down(fragment))
        ]
        shapes = [bits_shape(placed.piece.grid) for placed in layout.placed]
        return self._land(fragment, boxes, shapes, np.uint32)

    def _land(
        self,
        fragment: int,
        boxes: Sequence[tuple[Box, npt.NDArray[Any]]],
        shapes: Sequence[tuple[int, ...]],
        dtype: npt.DTypeLike,
    ) -> ByPiece:
        spreads, host = self.spreads(fragment), jax.process_index()
        found: list[dict[tuple[int, Tiles], npt.NDArray[Any]]] = [{} for _ in spreads]
        for box, value in boxes:
            if value.size:
                tiles = (box.start, box.stop)
                spread, _ = spreads[box.piece]
                row = spread.row_of(host, tiles) if spread.moved else 0
                found[box.piece][row, tiles] = value
        return tuple(
            land(spread, shape, dtype, here)
            for (spread, _), shape, here in zip(spreads, shapes, found, strict=True)
        )

    def anchor_bytes(self, fragment: int) -> int:
        """Return the length in bytes that `put_anchor` takes."""
        return self.layouts_whole[fragment].part_bytes(self.part_down(fragment))

    def adopt(self, arrival: Arrival, params: Tree, *, keep: bool = False) -> Tree:
        """Return the parameters with the arrived version adopted. `params` is donated.

        keep: the last take is not in that version, and stays in the parameters.
        """
        leaves, structure = jax.tree.flatten(in_turn(params))
        for state in self._states[arrival.fragment]:
            state.adopt(leaves, arrival, self._alpha, keep=keep)
        if self._loses_steps and self.uses is not None:
            self.uses.restart(arrival.fragment)
        adopted: Tree = jax.tree.unflatten(structure, leaves)
        return adopted

    def judge(self, fragment: int, outcome: TakeOutcome, params: Tree) -> Tree:
        """Carry out the verdict on the outstanding take; return the parameters, which a
        reset donates.

        Of a take that is settled, what its encoding lost is in the residual for good.
        Otherwise the residual is again the one from before the take. One that is
        reopened is undone: the fragment's base is the old anchor again. So it is by a
        reset, which makes the local values those of the anchor.
        """
        undone, reset = outcome in ("reopened", "reset"), outcome == "reset"
        for state in self._states[fragment]:
            if outcome != "settled":
                state.residual = state.settled
            state.before = None
            if undone:
                state.base = None
        if undone and self.uses is not None:
            self.uses.reopen(fragment)
            if reset:
                self.uses.restart(fragment)
        return self.at_anchor(fragment, params) if reset else params

    def at_anchor(self, fragment: int, params: Tree) -> Tree:
        """Return the parameters with the fragment at its anchor. `params` is
        donated."""
        return _put(params, ((s, s.anchor) for s in self._states[fragment]))

    # ---- for a coordinator that lost its state ----------------------------------

    def anchor(self, fragment: int) -> ByPiece:
        """Return the fragment's anchor by piece, in f32 tiles."""
        tiles: ByPiece = self._by_piece(
            fragment, lambda state: in_turn(state.programs.whole(state.anchor))
        )
        return tiles

    # ---- joining ----------------------------------------------------------------

    def gather(self, fragment: int, anchor: ByPiece) -> ByPiece:
        """Return an anchor of `put_anchor` as it is held. All hosts call it, for
        fragment after fragment in one order."""
        return tuple(
            in_turn(state.programs.gather_anchor(state.of(anchor)))
            for state in self._states[fragment]
        )

    def start(
        self,
        anchors: dict[int, ByPiece],
        residuals: Mapping[int, ByPiece] | None = None,
    ) -> None:
        """Start with these anchors of `put_anchor`, by fragment, and with residuals by
        fragment, as they are held, where these are not zero.

        All hosts call it. `anchors` is emptied, so that no anchor is there twice.
        """
        for fragment in sorted(anchors):
            gathered = self.gather(fragment, anchors.pop(fragment))
            for state, anchor in zip(self._states[fragment], gathered, strict=True):
                state.anchor = anchor
        for fragment, arrays in (residuals or {}).items():
            for state, residual in zip(self._states[fragment], arrays, strict=True):
                state.residual = residual

    def start_from(self, params: Any) -> None:
        """Start with anchors of these values, which are copied: the run's first ones.
        All hosts call it."""
        leaves = jax.tree.leaves(params)
        for state in self._all():
            state.anchor = state.read(leaves)

    # ---- checkpoints ------------------------------------------------------------

    def trees(self) -> dict[str, list[ByPiece]]:
        """Return, with error feedback, the residuals as if no take were outstanding, by
        fragment and piece; not to be donated."""
        if not self.feeds_back:
            return {}
        return {"residuals": self._pieces(lambda state: state.apart(state.settled))}

    def residuals(self, params: Tree) -> Tree:
        """Return the residuals of `trees`, laid out and arranged as the parameters are;
        `params`, laid out alike, are donated.
        """
        return _put(params, ((state, state.settled) for state in self._all()))

    def like_residuals(self) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """Return abstract arrays like the residuals of `trees`."""
        return self._pieces(PieceState.like)

    def together(self, fragment: int, pieces: Sequence[jax.Array]) -> ByPiece:
        """Return arrays of `like_residuals` as they are held. All hosts call it."""
        return tuple(s.together(s.of(pieces)) for s in self._states[fragment])

    def values(self, fragment: int, params: Any) -> ByPiece:
        """Return the fragment's values in a tree that lies as the parameters do, as
        arrays are held: what `residuals` returned, or local values."""
        leaves = jax.tree.leaves(params)
        return tuple(state.read(leaves) for state in self._states[fragment])

    # ---- programs ---------------------------------------------------------------

    def lower_all(self) -> Iterator[jax.stages.Lowered]:
        """Lower all programs, one after the other, to be compiled."""
        for state in self.one_of_each():
            yield from map(state.programs.lower, state.programs.names)
        if self.uses is not None:
            yield from self.uses.lower_all()

    def held(self, fragment: int) -> Sequence[PieceState]:
        """Return what is held of the fragment; the caller changes nothing in it."""
        return self._states[fragment]

    def one_of_each(self) -> list[PieceState]:
        """Return one of each kind of piece or stack."""
        return list({state.programs: state for state in self._all()}.values())

    def _by_piece(self, fragment: int, values: Callable[[PieceState], Any]) -> Any:
        """Return what the function has by piece of each state."""
        found: list[Any] = [None] * len(self._plan.fragments[fragment])
        for state in self._states[fragment]:
            for number, value in zip(state.numbers, values(state), strict=True):
                found[number] = value
        return tuple(found)

    def _pieces(self, values: Callable[[PieceState], Any]) -> list[tuple[Any, ...]]:
        """Return what the function has by piece, fragment by fragment."""
        return [self._by_piece(f, values) for f in range(len(self._states))]

    def _all(self) -> Iterator[PieceState]:
        return itertools.chain.from_iterable(self._states)


def _put(params: Tree, values: Iterable[tuple[PieceState, Any]]) -> Tree:
    """Return the parameters, which are donated, with pieces set to these values."""
    leaves, structure = jax.tree.flatten(params)
    for state, value in values:
        state.put(leaves, value)
    put: Tree = jax.tree.unflatten(structure, leaves)
    return put


def _layouts(plan: FragmentPlan, codec: str) -> tuple[PayloadLayout, ...]:
    return tuple(PayloadLayout.of(get_codec(codec), p) for p in plan.fragments)


class LentParams:
    """`boundary.Arrays` with real arrays: parameters and their anchors."""

    def __init__(self, exchange: Exchange, params: Any) -> None:
        """params: as an exchange takes them."""
        self._exchange = exchange
        self.params = params
        """Local parameters, until the next step or adoption."""
        self.adoptions = 0
        """Fragments taken over so far."""

    def take(self, fragment: int) -> ByPiece:
        """Return the fragment's encoded delta by piece."""
        return self._exchange.take(fragment, self.params)

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Take over a published fragment in place."""
        self.params = self._exchange.adopt(arrival, self.params, keep=keep)
        self.adoptions += 1

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        """Carry out the verdict on the outstanding take."""
        self.params = self._exchange.judge(fragment, outcome, self.params)


class Replica(LentParams):
    """Parameters with their moments, and the inner step between boundaries."""

    def __init__(self, trainer: Trainer, exchange: Exchange, state: TrainState) -> None:
        super().__init__(exchange, state.params)
        self._trainer, self._moments = trainer, state.opt_state

    def trees(self) -> dict[str, Any]:
        """Return the arrays that a checkpoint holds, until the next step or
        adoption."""
        return {**self._exchange.trees(), "moments": jax.tree.leaves(self._moments)}

    def step(self, batch: Any, learning_rate: float) -> Metrics:
        """Run one inner step on a batch of host arrays; return before it is done."""
        placed = self._trainer.put_batch(batch)
        state = TrainState(self.params, self._moments)
        state, metrics = self._trainer.step(state, placed, learning_rate)
        self.params, self._moments = state
        if self._exchange.uses is not None:
            self._exchange.uses.step(batch, placed, metrics)
        return metrics

    def spoil(self, factor: float) -> None:
        """Multiply all parameters, as a fault that was asked for does."""
        self.params = jax.tree.map(lambda value: value * factor, self.params)


class Restored(NamedTuple):
    """Part of a checkpoint that a returned island begins with."""

    incarnation: int
    """Incarnation that wrote the checkpoint."""
    steps: int
    """Steps of that incarnation that its moments have seen."""
    moments: Any
    """State of the inner optimizer."""
    residuals: dict[int, Any]
    """Residuals by fragment, as they are held; in a host's memory, as an anchor."""
    unheard: Sequence[Fields] = ()
    """See `Record.unheard`."""


class WatchedModel:
    """A copy of the anchors of one cycle, laid out as the local parameters are."""

    def __init__(self, exchange: Exchange, like: Params, dtype: str) -> None:
        """like: the local parameters, or arrays that lie alike. dtype: the compute
        dtype."""
        self._exchange = exchange
        self.params: Params = jax.tree.map(
            lambda leaf: zeros(leaf.shape, jnp.dtype(dtype), leaf.sharding), like
        )

    def copy(self, fragment: int) -> None:
        """Copy the fragment's anchor into the parameters. All hosts of the island call
        it.
        """
        self.params = self._exchange.at_anchor(fragment, in_turn(self.params))

    def lower_all(self) -> Iterator[jax.stages.Lowered]:
        """Lower what `copy` executes, to be compiled."""
        dtype = jax.tree.leaves(self.params)[0].dtype
        for state in self._exchange.one_of_each():
            yield state.programs.lower("put", dtype)


class LentBeside(LentParams):
    """Parameters and the trees beside them; an adoption changes all alike."""

    def __init__(self, exchange: Exchange, params: list[Any]) -> None:
        """params: the leaves of the parameters, in the order of their names."""
        super().__init__(exchange, params)
        self.beside: list[list[Any]] = []
        """Leaves of trees whose leaves lie as the parameters do, of any floating
        dtype."""

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Take over a published fragment in place."""
        adopt = super().adopt
        self._together(arrival.fragment, lambda: adopt(arrival, keep=keep))

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        """Carry out the verdict on the outstanding take."""
        judge = super().judge
        if outcome == "reset":
            self._together(fragment, lambda: judge(fragment, outcome))
        else:
            judge(fragment, outcome)

    def warm(self) -> None:
        """Compile the programs that move the present trees; leave these as they are."""
        for fragment in {state.fragment for state in self._exchange.one_of_each()}:
            self._together(fragment, lambda: None)

    def _together(self, fragment: int, change: Callable[[], None]) -> None:
        """Move the fragment of every tree as `change` moves the local values."""
        if not self.beside:
            change()
            return
        before = self._exchange.values(fragment, self.params)
        change()
        for leaves in self.beside:
            for state, old in zip(self._exchange.held(fragment), before, strict=True):
                own, local = state.leaf(leaves), state.leaf(self.params)
                moved = state.programs.follow(own, state.index, old, local)
                state.write(leaves, moved)
