"""Arrays of all seeds and islands of a laboratory, and the programs that change them.

An island's programs are those of `island/device/`, mapped over two more axes: `S`
seeds, `M` islands; they work on one device. Pieces of an anchor lie in the order of
their tiles: `n` tiles with `e` elements. The coordinator's `Store` is the product's.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import ConfigError
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.fragment_merge import Squares, is_fit, length
from diloco_jax.core.fragments import Buffer, Params
from diloco_jax.island.device.exchange import ByPiece, Exchange
from diloco_jax.island.device.programs import PiecePrograms
from diloco_jax.island.device.step import Trainer
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.bodies import NOTED

HELD = ("anchor", "base", "residual", "before")
"""What an exchange holds of each piece."""


def over_runs(function: Any, islands: Any = 0, seeds: Any = 0) -> Any:
    """Map a function over [S, M]. islands, seeds: `in_axes` of each."""
    return jax.vmap(jax.vmap(function, in_axes=islands), in_axes=seeds)


class MappedExchange(Exchange):
    """Takes and adoptions of all islands and seeds."""

    def begin(self, anchors: Sequence[Any], shape: tuple[int, int]) -> None:
        """Begin at these anchors, by fragment and piece, f32[S, n, e]. shape: (S,
        M)."""
        for pieces, states, values in zip(
            self._plan.fragments, self._states, anchors, strict=True
        ):
            own = [
                jax.vmap(piece.grid.from_tiles)(value)
                for piece, value in zip(pieces, values, strict=True)
            ]
            for state in states:
                some = state.of(own)
                value = some[0] if state.programs.rows == 1 else jnp.stack(some, 1)
                every = (*shape, *value.shape[1:])
                state.anchor = jnp.array(jnp.broadcast_to(value[:, None], every))
                if state.residual is not None:
                    state.residual = jnp.zeros(every, value.dtype)
                programs: Any = _programs(state.programs)
                state.programs = programs

    def arrays(self) -> list[list[Any]]:
        """Return what is held of each piece, `HELD`; None where there is none."""
        return [[getattr(state, name) for name in HELD] for state in self._all()]

    def restore(self, arrays: Sequence[Sequence[Any]]) -> None:
        """Go on with what `arrays` returned."""
        for state, held in zip(self._all(), arrays, strict=True):
            for name, value in zip(HELD, held, strict=True):
                setattr(state, name, None if value is None else placed(value))


class MappedPrograms:
    """`PiecePrograms` of all islands and seeds; a publish is that of a seed."""

    def __init__(self, own: PiecePrograms) -> None:
        self.rows, self.spread, self.grid = own.rows, own.spread, own.grid
        kept = (0,) if own.rows == 1 else ()

        def mapped(name: str, *islands: Any, seeds: Any = None, donates: bool) -> Any:
            function = over_runs(getattr(own, name), islands, seeds or islands)
            return jax.jit(function, donate_argnums=kept if donates else ())

        self.take = mapped("take", 0, None, 0, 0, donates=False)
        self.arrive = mapped(
            "arrive",
            *(0, None, 0, 0, None, None),
            seeds=(0, None, 0, 0, 0, None),
            donates=True,
        )
        self.advance = mapped("advance", 0, None, seeds=(0, 0), donates=False)
        self.move = mapped("move", 0, 0, 0, donates=False)
        self.put = mapped("put", 0, None, 0, donates=True)

    def gathered(self, landed: Any) -> Any:
        """Return a publish, which is where it is needed."""
        return landed


_programs = functools.lru_cache(maxsize=256)(MappedPrograms)


@functools.lru_cache(maxsize=32)
def compiled_steps(trainer: Trainer) -> Any:
    """Compile steps of all islands and seeds, one after the other."""

    def steps(state: Any, batches: Any, rates: Any, frozen: Any) -> Any:
        update = over_runs(trainer.update, (0, 0, 0, None), (0, 0, None, None))

        def step(state: Any, given: Any) -> Any:
            state, metrics = update(state, *given, frozen)
            return state, jnp.stack([metrics[name] for name in NOTED])

        return jax.lax.scan(step, state, (batches, rates))

    return jax.jit(steps, donate_argnums=0)


class SeedMerges:
    """The coordinator's fragments: a `Store` of each seed."""

    def __init__(
        self,
        exchange: MappedExchange,
        islands: Sequence[str],
        stores: Mapping[int, Store],
        delta_bound: float,
    ) -> None:
        """islands: their names, sorted. stores: by seed."""
        self._exchange, self._names, self._bound = exchange, islands, delta_bound
        self._stores, self._seeds = list(stores.values()), list(stores)
        self._fragments = range(len(self._stores[0].plan.fragments))
        self._taken: dict[int, Sequence[Any]] = {}
        """Encoded deltas of the last take by piece, uint8[S, M, ...], by fragment."""
        self._published: dict[int, dict[int, list[Buffer]]] = {
            fragment: {} for fragment in self._fragments
        }
        """Publishes of all seeds that are not adopted, by fragment and version."""
        self.norms: list[list[float]] = []
        """Lengths of merged deltas by merge and seed."""

    def anchors(self) -> list[list[npt.NDArray[Any]]]:
        """Return the anchors by fragment and piece, f32[S, n, e]."""
        return [
            [
                np.stack(own)
                for own in zip(
                    *(store.arrays(fragment)["anchor"] for store in self._stores),
                    strict=True,
                )
            ]
            for fragment in self._fragments
        ]

    def receive(self, fragment: int, encoded: Sequence[jax.Array]) -> None:
        """Take in the deltas of all islands, by piece; nobody waits for them here."""
        for array in encoded:
            array.copy_to_host_async()
        self._taken[fragment] = encoded

    def fetch(self, fragment: int, version: int) -> tuple[ByPiece, ...]:
        """Return the publishes up to a version, oldest first; once."""
        waiting, put = self._published[fragment], self._exchange.put_publish
        found = [waiting.pop(v) for v in sorted(waiting) if v <= version]
        return tuple(
            tuple(
                map(
                    jnp.stack,
                    zip(*(put(fragment, own) for own in payloads), strict=True),
                )
            )
            for payloads in found
        )

    def params(self, seed: int) -> Params:
        """Return Theta of a seed, by its index."""
        return self._stores[seed].params()

    def merge(self, order: Merge) -> None:
        """Merge the last deltas of a fragment, and publish."""
        fragment = order.fragment
        layout = self._stores[0].layouts_up[fragment]
        taken = [np.asarray(piece) for piece in self._taken[fragment]]
        norms: list[float] = []
        publishes: list[Buffer] = []
        for index, store in enumerate(self._stores):
            payloads = [
                np.frombuffer(layout.pack([t[index, m] for t in taken]), np.uint8)
                for m in range(len(self._names))
            ]
            squares = [store.squares(fragment, payload) for payload in payloads]
            self._require_fit(self._seeds[index], fragment, squares)
            merged = store.merge(
                fragment,
                order.contributions,
                payloads,
                squares,
                share=order.share,
                final=order.final,
            )
            store.commit(fragment, order.version, merged)
            norms.append(merged.norm)
            publishes.append(merged.payload)
        self._published[fragment][order.version.number] = publishes
        self.norms.append(norms)

    def _require_fit(
        self, seed: int, fragment: int, squares: Sequence[Squares]
    ) -> None:
        """Raise ConfigError if a run might refuse a delta."""
        lengths = list(map(length, squares))
        usual = statistics.median_high(lengths)
        most = self._bound * usual or math.inf
        for name, own, here in zip(self._names, squares, lengths, strict=True):
            if not is_fit(own) or here > most:
                raise ConfigError(
                    f"seed {seed}: a delta of islands.{name} for fragment "
                    f"{fragment} has length {here:g}, the median is {usual:g} and "
                    f"sync.delta_bound {self._bound:g}, so a run may "
                    f"refuse it; lower inner.learning_rate, or use emulate"
                )

    # ---- to be kept -----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all arrays that change."""
        return {
            "fragments": [
                [store.arrays(fragment) for fragment in self._fragments]
                for store in self._stores
            ],
            "versions": np.array(self._stores[0].versions()),
            "taken": {f: list(map(np.asarray, own)) for f, own in self._taken.items()},
            "published": {
                fragment: {
                    number: [np.frombuffer(own, np.uint8) for own in payloads]
                    for number, payloads in versions.items()
                }
                for fragment, versions in self._published.items()
            },
            "norms": np.array(self.norms),
        }

    def restore(self, found: dict[str, Any]) -> None:
        """Go on with what `state` returned; keys may be texts."""
        versions = [Version(*map(int, version)) for version in found["versions"]]
        for store, fragments in zip(self._stores, found["fragments"], strict=True):
            for fragment, arrays in enumerate(fragments):
                store.load(fragment, arrays, versions[fragment])
        self._taken = {int(f): own for f, own in found["taken"].items()}
        self._published = {
            int(f): {int(v): own for v, own in versions.items()}
            for f, versions in found["published"].items()
        }
        self.norms = found["norms"].tolist()


def placed(tree: Any, like: Any = None) -> Any:
    """Return copies of host arrays on the device; with the structure of `like`, if it
    is given."""
    if like is not None:
        tree = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
