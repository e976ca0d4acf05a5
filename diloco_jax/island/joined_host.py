"""The parts of an island whose steps are made by a train loop of the user's.

That loop lends its parameters at boundaries, and reads the data itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import Config, ConfigError
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.data.batches import LeasedPositions
from diloco_jax.faults import Faults
from diloco_jax.island.device.build import at_anchors, compile_programs
from diloco_jax.island.device.exchange import Exchange, Listed
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.device.replica import LentBeside
from diloco_jax.island.hosts.world import Hosts
from diloco_jax.island.joined_state import require_own, restored_state, saved_state
from diloco_jax.island.mailbox import Decisions
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.island.parts import Parts
from diloco_jax.island.stepping import Stepping
from diloco_jax.island.timing import Timing
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Axes, Model, plain_axes
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Boundary
from diloco_jax.protocol.values import Span, Version
from diloco_jax.wire.bulk import Identity


class JoinedHost(Parts["JoinedLoop"]):
    """Everything of the island but its steps."""

    awaits_last = True

    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        like: Any,
        axes: Axes | None,
        state: Mapping[str, Any] | None = None,
        *,
        own_data: bool = False,
    ) -> None:
        """like, axes, state, own_data: as for `join`. Raise ConfigError if the
        parameters are not f32, or cannot be cut as the run cuts them; SecurityError.
        """
        self.leaves, self._like = LikeLeaves(like), like
        self.own_data = own_data
        shapes, self._state = self.leaves.like, state
        model = Model(
            lambda key: shapes,
            None,
            plain_axes(shapes) if axes is None else axes,
        )
        try:
            plan = build_plan(config.run, model)
        except ConfigError as error:
            raise ConfigError(
                f"like, of {len(jax.tree.leaves(shapes))} arrays, cannot be cut as the "
                f"run cuts its model ({error}); give parameters with the names and "
                f"shapes of the run's model"
            ) from error
        super().__init__(config, name, address, plan)

    def build(self, identity: Identity, hosts: Hosts | None) -> None:
        """Build takes and adoptions. Raise ConfigError for a state of another run."""
        self._hosts = hosts
        self._zeros = self.leaves.zeros()
        memory = self.island.anchor_memory
        exchange = Exchange(self.plan, self.config.run.sync, self._zeros, memory)
        self._connect(identity, exchange)
        if self._state is not None:
            fragments = len(self.plan.fragments)
            require_own(self._state, identity, exchange, fragments)

    def compile(self) -> None:
        """Run every take and adoption once. No host runs any before all have compiled
        them, as for the product's own loop."""
        began = time.monotonic()
        if self._hosts is not None:
            compile_programs(self._exchange.lower_all(self._zeros))
            self._meet_compiled()
        self._zeros = self._exchange.warm(self._zeros)
        _first(self.leaves.smallest(self._zeros))
        self.compile_seconds = time.monotonic() - began

    def loop(
        self, versions: list[Version], decisions: Decisions, faults: Faults
    ) -> JoinedLoop:
        """Begin at the anchors of these versions."""
        run, sequences = self.config.run, self.island.batch_size
        # A join moves tiles between hosts, which may have read for unequal times.
        self._meet_to_join("restored")
        restored = None
        if self._state is not None:
            restored = restored_state(
                self._state, self._exchange, self.leaves, versions
            )
        residuals = restored.residuals if restored else None
        if self.gives:
            self._exchange.start_from(self.leaves.first(self._like))
        else:
            self._exchange.start(self._anchors(versions), residuals)
        del self._like
        params = at_anchors(self.plan, self._exchange, self._zeros)
        del self._zeros
        self._meet_to_join("ready")
        self._offer(versions)
        lent, data = LentBeside(self._exchange, params), OwnData(sequences)
        books = Books(versions, ADOPT_RULES.find(run.sync.adopt))
        books.begin()
        if restored is not None:
            books.restored(restored.incarnation, restored.steps, restored.residuals)
        goal = goal_of(run, sequences)
        return JoinedLoop(
            config=self.config,
            name=self.name,
            replica=lent,
            boundary=Boundary(
                books,
                goal,
                arrays=lent,
                incoming=self.mailbox.arrivals,
                outgoing=self.sender,
                data=data,
            ),
            data=data,
            mailbox=self.mailbox,
            decisions=decisions,
            pace=Pace(run, goal, warm=restored is not None),
            timing=Timing(self.compile_seconds),
            send_anchor=self._send_anchor,
            permit=self.sender.permit,
            patience_s=self._data_s,
            leaves=self.leaves,
        )

    def state(self, loop: JoinedLoop) -> dict[str, Any]:
        """Return what `join` takes as `state`. All hosts call it."""
        books = loop.boundary.books
        return saved_state(
            self._exchange,
            self.leaves,
            self._identity,
            steps=loop.done,
            versions=books.versions(),
            outstanding=loop.in_doubt(),
        )

    def global_params(self) -> Any:
        """Return the anchors in the structure of `like`. All hosts call it."""
        params = at_anchors(self.plan, self._exchange, self.leaves.zeros())
        return self.leaves.as_tree(params)


@dataclasses.dataclass(kw_only=True)
class JoinedLoop(Stepping):
    """The boundaries of a train loop that belongs to the user."""

    replica: LentBeside
    data: OwnData
    leaves: LikeLeaves

    def __post_init__(self) -> None:
        super().__post_init__()
        self._step = contextlib.ExitStack()
        self._loss: Any = None
        self._given: tuple[Any, Listed] | None = None
        """The step's result, as a tree and as leaves."""
        self._lent: list[weakref.ref[Any]] = []
        self._mark: Any = None
        """One element of what the step under way began with, if the step before has no
        loss to wait for."""

    def begin_step(self) -> tuple[float, np.ndarray]:
        """Return the learning rate and the positions of the step that begins."""
        if not isinstance(self._loss, jax.Array):
            self._mark = _first(self.leaves.smallest(self.replica.params))
        self._step.enter_context(self.timing.step())
        return self.learning_rate(), self.data.draw()

    def hand_over(self) -> Any:
        """Return the parameters, which belong to the user's loop until `stepped`."""
        params = self.replica.params
        if self._given is not None and self._given[1] is params:
            return self._given[0]  # Nothing was adopted.
        return self.leaves.as_tree(params)

    def lend(self) -> None:
        """Drop the references to the parameters that were handed over.

        The user's loop then holds the only ones, and can free them or donate them to a
        step.
        """
        params = self.replica.params
        try:
            self._lent = list(map(weakref.ref, params.leaves))
        except TypeError:
            return  # A number of the host has no weak references.
        self.replica.params, self._given = Listed([], params.places), None

    def take_back(self) -> bool:
        """Take the lent parameters back. Return False if the loop has freed or donated
        them.
        """
        if self._lent:
            leaves = [lent() for lent in self._lent]
            if any(leaf is None or _is_gone(leaf) for leaf in leaves):
                return False
            self.replica.params = Listed(leaves, self.replica.params.places)
        self.replica.beside = []
        return True

    def hand_over_beside(self) -> tuple[Any, ...]:
        """Return the trees beside the parameters, which belong to the user's loop until
        `stepped`.
        """
        return tuple(map(self.leaves.as_tree, self.replica.beside))

    def stepped(self, params: Any, loss: Any, alongside: Sequence[Any] = ()) -> None:
        """Note that the user's loop has dispatched a step; the device may still be
        computing it.

        The step's parameters, and the trees beside them, belong to the island until the
        next step begins. Raises ValueError if they differ from those that were handed
        over in structure, shapes or sharding.
        """
        listed = self.leaves.as_listed(params)
        beside = [self.leaves.as_beside(tree) for tree in alongside]
        # The step before is done: a loop that waits for nothing stays one step ahead.
        self._read_metrics()
        if self._mark is not None:
            jax.block_until_ready(self._mark)  # type: ignore[no-untyped-call]
            self._mark = None
        self._step.close()
        self.done += 1
        self.replica.params, self._loss = listed, loss
        self._given, self._lent = (params, listed), []
        new = len(beside) != len(self.replica.beside)
        self.replica.beside = beside
        if new:
            self.replica.warm()

    def lacking(self) -> list[int]:
        """Return the fragments whose last versions have not arrived at the end of the
        run.

        These are all fragments if the island never heard that the run is over.
        """
        if self._seen.finished:
            return list(self._seen.lacking)
        return list(range(len(self.boundary.books.versions())))

    def _read_metrics(self) -> None:
        if self._loss is not None:
            self.timing.loss(float(self._loss))
            self._loss = None


class OwnData:
    """Leased positions of rows that the user's loop reads itself."""

    def __init__(self, sequences_per_step: int) -> None:
        self._positions, self._per_step = LeasedPositions(), sequences_per_step

    @property
    def ready(self) -> bool:
        """True if the leases fill another step."""
        return self._positions.granted - self._positions.drawn >= self._per_step

    @property
    def consumed(self) -> int:
        """Number of positions handed out so far."""
        return self._positions.drawn

    def grant(self, span: Span) -> None:
        """Add positions [start, stop) after those granted before."""
        self._positions.grant(span)

    def draw(self) -> np.ndarray:
        """Return the positions of the next step, which is `ready`."""
        drawn = self._positions.draw(self._per_step)
        assert drawn is not None
        return drawn


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


@jax.jit
def _first(leaf: jax.Array) -> jax.Array:
    """Return a copy of an element: the leaf itself may be donated."""
    return jnp.ravel(leaf)[0]
