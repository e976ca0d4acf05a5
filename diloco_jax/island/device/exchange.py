"""Takes and adoptions on the device: the island's end of the data's path.

Per piece it holds the anchor, the base, and with error feedback the residual. The base
is a copy of the local values at a take; it is kept until a version takes the delta's
place. The residual is kept before and after an outstanding take. All of them lie as the
piece does, in device or host memory. Parameters are donated to an adoption, which
changes them in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.codecs.codec import get_codec
from diloco_jax.core.fragments import FragmentPlan, Params, Piece
from diloco_jax.core.payload import Buffer, Part, PayloadLayout, tiles_of
from diloco_jax.island.arrivals import Arrival
from diloco_jax.island.device.kinds import alike, index_of, kind_of
from diloco_jax.island.device.placing import Region, abstract, assemble, needed, zeros


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
            sent, after, self._bases[piece] = self._kinds[piece].take(
                leaf, index_of(piece), anchor, before
            )
            if before is not None:
                self._residuals_before[piece] = before
                self._residuals[piece] = after
            sent.copy_to_host_async()
            encoded.append(sent)
        return tuple(encoded)

    def part_down(self, fragment: int) -> Part:
        """Return the part that this host needs of a publish of the fragment, and of its
        anchor."""
        kinds = [self._kinds[piece].encoded for piece in self._plan.fragments[fragment]]
        shapes = [p.encoded_shape for p in self.layouts_down[fragment].placed]
        return needed(list(zip(kinds, shapes, strict=True)))

    def put_publish(self, fragment: int, octets: Buffer) -> tuple[jax.Array, ...]:
        """Put one encoded publish by piece on the device. Any thread may call it.

        octets: the bytes of `part_down`.
        """
        layout = self.layouts_down[fragment]
        regions: list[list[Region]] = [[] for _ in layout.placed]
        for box, tiles in layout.split(octets, self.part_down(fragment)):
            whole_tiles = slice(0, tiles.shape[-1])
            regions[box.piece].append(((*tiles_of(box), whole_tiles), tiles))
        return tuple(
            assemble(p.encoded_shape, self._kinds[p.piece].encoded, found)
            for p, found in zip(layout.placed, regions, strict=True)
        )

    def put_anchor(self, fragment: int, octets: Buffer) -> tuple[jax.Array, ...]:
        """Put A_v in full by piece on the device. Any thread may call it.

        octets: the f32 values of `part_down`, box by box.

        Raises:
          ValueError: they have another length.
        """
        layout = self.layouts_down[fragment]
        regions: list[list[Region]] = [[] for _ in layout.placed]
        for box, values in layout.split_values(octets, self.part_down(fragment)):
            regions[box.piece].append((layout.elements(box), values))
        return tuple(
            assemble(p.piece.shape, self._kinds[p.piece].piece, found)
            for p, found in zip(layout.placed, regions, strict=True)
        )

    def anchor_bytes(self, fragment: int) -> int:
        """Return the length in bytes that `put_anchor` takes."""
        return self.layouts_down[fragment].values_bytes(self.part_down(fragment))

    def adopt(self, arrival: Arrival, params: Params, *, keep: bool = False) -> Params:
        """Return the parameters with the arrived version adopted. `params` is donated.

        keep: the last take is not in that version, and stays in the parameters.
        """
        for i, piece in enumerate(self._plan.fragments[arrival.fragment]):
            kind, before = self._kinds[piece], self._anchors[piece]
            base = self._bases.pop(piece, before)
            anchor = before if arrival.anchor is None else arrival.anchor[i]
            for publish in arrival.publishes:
                anchor = kind.advance(anchor, publish[i])
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
            sent = self._kinds[piece].whole(self._anchors[piece])
            sent.copy_to_host_async()
            encoded.append(sent)
        return tuple(encoded)

    # ---- joining ----------------------------------------------------------------

    def start(
        self,
        anchors: Mapping[int, tuple[jax.Array, ...]],
        residuals: Mapping[int, tuple[jax.Array, ...]] | None = None,
    ) -> None:
        """Start with these anchors, by fragment and piece, and with residuals where
        these are not zero."""
        kept = residuals or {}
        for given, held in ((anchors, self._anchors), (kept, self._residuals)):
            for fragment, arrays in given.items():
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
            _, _, local = kind.take(leaf, index, anchor, self._residuals.get(piece))
            kind.advance(anchor, published)
            kind.whole(anchor)
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
            lowered.append(kind.lower_whole(piece))
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
