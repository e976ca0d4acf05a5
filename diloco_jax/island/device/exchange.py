"""Takes and adoptions on the device: the island's end of the data's path.

Per piece it holds the anchor, the base, and with error feedback the residual. The base
is a copy of the local values at a take; it is kept until a version takes the delta's
place. The residual is kept before and after an outstanding take. All of them lie as the
piece does, in device or host memory. Parameters are donated to an adoption, which
changes them in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.codecs.codec import get_codec
from diloco_jax.core.fragments import FragmentPlan, Params, Piece
from diloco_jax.core.payload import Box, Buffer, Part, PayloadLayout
from diloco_jax.island.device.kinds import alike, bits_shape, index_of, kind_of
from diloco_jax.island.device.placing import abstract, in_turn, land, zeros
from diloco_jax.island.device.spread import Spreads, Tiles, parts_by_host
from diloco_jax.island.mailbox import Arrival


class Exchange:
    """Anchors, bases and residuals of all fragments of one island.

    params: the local parameters, or arrays that lie like them: nested dict of f32 on
    the island's mesh. memory: where anchors, bases and residuals lie.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        sync: SyncConfig,
        params: Params,
        memory: AnchorMemory = "device",
    ) -> None:
        self._plan = plan
        self._sync = sync
        self.layouts_up = _layouts(plan, sync.codec_up)
        self.layouts_down = _layouts(plan, sync.codec_down)
        self.layouts_whole = _layouts(plan, "f32")
        self._kinds = {
            p: kind_of(sync, p, _leaf(params, p.path), memory) for p in plan.pieces
        }
        self._anchors: dict[Piece, jax.Array] = {}
        self._bases: dict[Piece, jax.Array] = {}
        self._residuals: dict[Piece, jax.Array] = {}
        self._residuals_before: dict[Piece, jax.Array] = {}
        if sync.error_feedback:
            self._residuals = {
                p: zeros(p.shape, np.float32, kind.piece)
                for p, kind in self._kinds.items()
            }

    # ---- the path of the data ---------------------------------------------------

    def take(self, fragment: int, params: Params) -> tuple[jax.Array, ...]:
        """Return the fragment's encoded delta by piece, on its way to the host.

        Only one take of a fragment may be without `settle`, `reopen` or `drop`.
        """
        encoded = []
        for piece in self._plan.fragments[fragment]:
            leaf, anchor = _leaf(params, piece.path), self._anchors[piece]
            before = self._residuals.get(piece)
            sent, after, self._bases[piece] = in_turn(
                self._kinds[piece].take(leaf, index_of(piece), anchor, before)
            )
            if before is not None:
                self._residuals_before[piece] = before
                self._residuals[piece] = after
            sent.copy_to_host_async()
            encoded.append(sent)
        return tuple(encoded)

    def part_down(self, fragment: int) -> Part:
        """Return the part that this host fetches of a publish of the fragment, and of
        its anchor."""
        parts = parts_by_host(self.spreads(fragment))
        return parts[jax.process_index()] if len(parts) > 1 else ()

    def spreads(self, fragment: int) -> Spreads:
        """Return how the fragment's pieces are spread over the island's hosts."""
        pieces = self._plan.fragments[fragment]
        return [(self._kinds[piece].spread, piece.shape) for piece in pieces]

    def put_publish(self, fragment: int, octets: Buffer) -> tuple[jax.Array, ...]:
        """Put this host's part of one encoded publish on its devices, by piece. Any
        thread may call it: `adopt` moves the tiles to the devices that need them.

        octets: the bytes of `part_down`.
        """
        layout = self.layouts_down[fragment]
        boxes = layout.split(octets, self.part_down(fragment))
        shapes = [placed.encoded_shape for placed in layout.placed]
        return self._land(fragment, boxes, shapes, np.uint8)

    def put_anchor(self, fragment: int, octets: Buffer) -> tuple[jax.Array, ...]:
        """Put this host's part of A_v in full on its devices, by piece, as the bits of
        f32 tiles. Any thread may call it, as `put_publish`.

        octets: the f32 tiles of `part_down`, box by box.

        Raises:
          ValueError: they have another length.
        """
        layout = self.layouts_down[fragment]
        boxes = [
            (box, tiles.view(np.uint32))
            for box, tiles in layout.split_values(octets, self.part_down(fragment))
        ]
        shapes = [bits_shape(placed.piece.shape) for placed in layout.placed]
        return self._land(fragment, boxes, shapes, np.uint32)

    def _land(
        self,
        fragment: int,
        boxes: Sequence[tuple[Box, npt.NDArray[Any]]],
        shapes: Sequence[tuple[int, ...]],
        dtype: npt.DTypeLike,
    ) -> tuple[jax.Array, ...]:
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
        return self.layouts_down[fragment].values_bytes(self.part_down(fragment))

    def adopt(self, arrival: Arrival, params: Params, *, keep: bool = False) -> Params:
        """Return the parameters with the arrived version adopted. `params` is donated.

        keep: the last take is not in that version, and stays in the parameters.
        """
        in_turn(params)
        for i, piece in enumerate(self._plan.fragments[arrival.fragment]):
            kind, before = self._kinds[piece], self._anchors[piece]
            base = self._bases.pop(piece, before)
            anchor = before
            if arrival.anchor is not None:
                anchor = in_turn(kind.gather_anchor(arrival.anchor[i]))
            for publish in arrival.publishes:
                encoded = in_turn(kind.gathered(publish[i]))
                anchor = in_turn(kind.advance(anchor, encoded))
            if keep:
                self._bases[piece] = kind.move(base, before, anchor)
                base = before
            leaf = kind.adopt(
                _leaf(params, piece.path), index_of(piece), base, anchor, self._alpha
            )
            self._anchors[piece] = anchor
            params = _with_leaf(params, piece.path, leaf)
        return params

    # ---- what becomes of a take -------------------------------------------------

    def settle(self, fragment: int) -> None:
        """Settle a merged take: what its encoding lost is in the residual for good."""
        for piece in self._plan.fragments[fragment]:
            self._residuals_before.pop(piece, None)

    def drop(self, fragment: int) -> None:
        """Drop a lost take: the residual is what it was before."""
        for piece in self._plan.fragments[fragment]:
            if piece in self._residuals_before:
                self._residuals[piece] = self._residuals_before.pop(piece)

    def reopen(self, fragment: int) -> None:
        """Reopen the fragment as if the take had not been: the base is the old anchor
        again."""
        self.drop(fragment)
        for piece in self._plan.fragments[fragment]:
            self._bases.pop(piece, None)

    def reset(self, fragment: int, params: Params) -> Params:
        """Drop a lost take, and reset the local values to the anchor. `params` is
        donated."""
        self.reopen(fragment)
        for piece in self._plan.fragments[fragment]:
            anchor = self._anchors[piece]
            leaf = _leaf(params, piece.path)
            leaf = self._kinds[piece].reset(leaf, index_of(piece), anchor)
            params = _with_leaf(params, piece.path, leaf)
        return params

    # ---- for a coordinator that lost its state ----------------------------------

    def anchor(self, fragment: int) -> tuple[jax.Array, ...]:
        """Return the fragment's anchor by piece, in f32 tiles, on its way to the
        host."""
        encoded = []
        for piece in self._plan.fragments[fragment]:
            sent = in_turn(self._kinds[piece].whole(self._anchors[piece]))
            sent.copy_to_host_async()
            encoded.append(sent)
        return tuple(encoded)

    # ---- joining ----------------------------------------------------------------

    def gather(
        self, fragment: int, anchor: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return an anchor of `put_anchor` as it lies, by piece. All hosts call it, for
        fragment after fragment in one order."""
        pieces = self._plan.fragments[fragment]
        return tuple(
            in_turn(self._kinds[p].gather_anchor(a))
            for p, a in zip(pieces, anchor, strict=True)
        )

    def start(
        self,
        anchors: dict[int, tuple[jax.Array, ...]],
        residuals: Mapping[int, tuple[jax.Array, ...]] | None = None,
    ) -> None:
        """Start with these anchors of `put_anchor`, by fragment, and with residuals by
        fragment and piece where these are not zero.

        All hosts call it. `anchors` is emptied, so that no anchor is there twice.
        """
        for fragment in sorted(anchors):
            self._hold(
                self._anchors, fragment, self.gather(fragment, anchors.pop(fragment))
            )
        for fragment, arrays in (residuals or {}).items():
            self._hold(self._residuals, fragment, arrays)

    def _hold(
        self, held: dict[Piece, jax.Array], fragment: int, arrays: tuple[jax.Array, ...]
    ) -> None:
        held.update(zip(self._plan.fragments[fragment], arrays, strict=True))

    # ---- checkpoints ------------------------------------------------------------

    def trees(self) -> dict[str, list[tuple[jax.Array, ...]]]:
        """Return the anchors, and with error feedback the residuals as if no take were
        outstanding, by fragment and piece; not to be donated."""
        fragments = self._plan.fragments
        trees = {"anchors": [tuple(self._anchors[p] for p in f) for f in fragments]}
        if self._sync.error_feedback:
            settled = {**self._residuals, **self._residuals_before}
            trees["residuals"] = [tuple(settled[p] for p in f) for f in fragments]
        return trees

    def like_residuals(self) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """Return abstract arrays that lie as all residuals do."""
        return [
            tuple(abstract(p.shape, np.float32, self._kinds[p].piece) for p in f)
            for f in self._plan.fragments
        ]

    def anchors(self) -> dict[str, jax.Array]:
        """Return the anchors by piece name; not to be donated."""
        return {piece.name: anchor for piece, anchor in self._anchors.items()}

    def warm(self, params: Params) -> Params:
        """Compile everything on `params`, which is donated and comes back unchanged.

        It leaves no anchors behind: call `start` afterwards.
        """
        codec = get_codec(self._sync.codec_down)
        for piece in self._one_of_each(params):
            kind, leaf = self._kinds[piece], _leaf(params, piece.path)
            index = index_of(piece)
            anchor = zeros(piece.shape, np.float32, kind.piece)
            shape = codec.encoded_shape(piece.shape)
            published = zeros(shape, np.uint8, kind.encoded)
            _, _, local = in_turn(
                kind.take(leaf, index, anchor, self._residuals.get(piece))
            )
            in_turn(kind.advance(anchor, published))
            in_turn(kind.whole(anchor))
            landing, landed = kind.spread.landing, kind.spread.landed_shape
            in_turn(kind.gathered(zeros(landed(shape), np.uint8, landing)))
            bits = zeros(landed(bits_shape(piece.shape)), np.uint32, landing)
            in_turn(kind.gather_anchor(bits))
            kind.move(anchor, anchor, anchor)
            leaf = kind.adopt(leaf, index, anchor, anchor, self._alpha)
            params = _with_leaf(params, piece.path, kind.reset(leaf, index, local))
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        return params

    def lower_all(self, params: Params) -> list[jax.stages.Lowered]:
        """Lower what `warm` executes, without arrays, to be compiled; `params` stay."""
        lowered: list[jax.stages.Lowered] = []
        for piece in self._one_of_each(params):
            leaf = _leaf(params, piece.path)
            assert isinstance(leaf.sharding, NamedSharding)
            like = abstract(leaf.shape, leaf.dtype, leaf.sharding)
            kind = self._kinds[piece]
            lowered += kind.lower(self._sync, piece, like).values()
            lowered += kind.lower_whole(piece).values()
        return lowered

    def _one_of_each(self, params: Params) -> list[Piece]:
        """Return one piece of each kind of tensor."""
        found: dict[tuple[Any, ...], Piece] = {}
        for piece in self._kinds:
            leaf = _leaf(params, piece.path)
            found.setdefault((leaf.shape, leaf.sharding, *alike(piece)), piece)
        return list(found.values())

    @property
    def _alpha(self) -> np.float32:
        return np.float32(self._sync.blend_alpha)


def _leaf(params: Params, path: tuple[str, ...]) -> jax.Array:
    node: Any = params
    for key in path:
        node = node[key]
    leaf: jax.Array = node
    return leaf


def _with_leaf(params: Params, path: tuple[str, ...], leaf: jax.Array) -> Params:
    key, *rest = path
    value = _with_leaf(params[key], tuple(rest), leaf) if rest else leaf
    return {**params, key: value}


def _layouts(plan: FragmentPlan, codec: str) -> tuple[PayloadLayout, ...]:
    return tuple(PayloadLayout.of(get_codec(codec), p) for p in plan.fragments)
