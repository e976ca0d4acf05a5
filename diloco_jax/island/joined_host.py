"""The parts of an island whose steps are the user's: parameters are lent, at
boundaries, and data is read by the loop itself."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_jax.config import Config, ConfigError
from diloco_jax.core.adopt import RULES as ADOPT_RULES
from diloco_jax.core.fragments import from_pieces
from diloco_jax.data.positions import LeasedPositions
from diloco_jax.faults import Faults
from diloco_jax.island.device.build import at_anchors
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.leaves import leaf_of
from diloco_jax.island.device.placing import zeros
from diloco_jax.island.device.replica import LentParams
from diloco_jax.island.hosts.world import Hosts
from diloco_jax.island.mailbox import Decisions
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.island.parts import Parts
from diloco_jax.island.stepping import DATA_POLL_S, Stepping
from diloco_jax.island.timing import Timing
from diloco_jax.models.model import Axes, Model, Params, named, plain_axes
from diloco_jax.models.plan import build_plan
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Boundary
from diloco_jax.protocol.values import Span, Version
from diloco_jax.wire.bulk import Identity

AXIS = "devices"
"""Mesh axis for arrays that lie on one device, and name no mesh."""


class JoinedHost(Parts["JoinedLoop"]):
    """Everything of the island but its steps."""

    def __init__(
        self, config: Config, name: str, address: str, like: Any, axes: Axes | None
    ) -> None:
        """like, axes: as for `join`. Raise ConfigError if the parameters are not f32,
        or cannot be cut as the run cuts them; SecurityError."""
        self._structure: Any = jax.tree.structure(like)
        leaves = jax.tree.leaves(like)
        self._like: Params = jax.tree.map(_abstract, _named(like))
        self._shapes = [leaf.shape for leaf in leaves]
        numbers = named(jax.tree.unflatten(self._structure, range(len(leaves))))
        paths = {
            number: tuple(key.key for key in path)
            for path, number in jax.tree_util.tree_leaves_with_path(numbers)
        }
        self._paths = [paths[number] for number in range(len(leaves))]
        """Names of the leaves, in the order of `like`."""
        self._smallest = min(
            self._paths, key=lambda path: leaf_of(self._like, path).size
        )
        model = Model(
            lambda key: self._like,
            None,
            plain_axes(self._like) if axes is None else axes,
        )
        super().__init__(config, name, address, build_plan(config.run, model))

    def build(self, identity: Identity, hosts: Hosts | None) -> None:
        """Build takes and adoptions."""
        self._zeros: Params = jax.tree.map(
            lambda x: zeros(x.shape, np.float32, x.sharding), self._like
        )
        memory = self.island.anchor_memory
        exchange = Exchange(self.plan, self.config.run.sync, self._zeros, memory)
        self._connect(identity, exchange)

    def compile(self) -> None:
        """Run every take and adoption once."""
        began = time.monotonic()
        self._zeros = self._exchange.warm(self._zeros)
        _first(leaf_of(self._zeros, self._smallest))
        self.compile_seconds = time.monotonic() - began

    def loop(
        self, versions: list[Version], decisions: Decisions, faults: Faults
    ) -> JoinedLoop:
        """Begin at the anchors of these versions."""
        run, sequences = self.config.run, self.island.batch_size
        self._exchange.start(self._anchors(versions))
        params, self._zeros = at_anchors(self.plan, self._exchange, self._zeros), {}
        lent, data = LentParams(self._exchange, params), OwnData(sequences)
        books = Books(versions, ADOPT_RULES.find(run.sync.adopt))
        books.begin()
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
            pace=Pace(run, goal),
            timing=Timing(self.compile_seconds),
            send_anchor=self._send_anchor,
            smallest=self._smallest,
        )

    def as_tree(self, params: Params) -> Any:
        """Return parameters in the structure of `like`."""
        leaves = [leaf_of(params, path) for path in self._paths]
        return jax.tree.unflatten(self._structure, leaves)

    def as_named(self, tree: Any) -> Params:
        """Return a step's result by the names of its leaves.

        Raises ValueError if it differs from `like` in structure, shape or dtype.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise ValueError(
                f"boundary was given {structure}, the island joined with "
                f"{self._structure}; give it the parameters alone, in that structure"
            )
        params: Params = {}
        for path, leaf, shape in zip(self._paths, leaves, self._shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != np.float32:
                raise ValueError(
                    f"{'/'.join(path)} is {leaf.dtype}{list(leaf.shape)} at the "
                    f"boundary, the island joined with float32{list(shape)}; "
                    f"parameters stay as they were"
                )
            node = params
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = leaf
        return params

    def global_params(self) -> Any:
        """Return the anchors in the structure of `like`."""
        anchors = {n: jnp.copy(a) for n, a in self._exchange.anchors().items()}
        return self.as_tree(from_pieces(self.plan, anchors))


@dataclasses.dataclass(kw_only=True)
class JoinedLoop(Stepping):
    """The boundaries of a loop that is the user's."""

    replica: LentParams
    data: OwnData
    smallest: tuple[str, ...]
    """Path of the smallest parameter, by which a step is known to be done."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._step = contextlib.ExitStack()
        self._loss: Any = None
        self._mark: Any = None
        """One element of what the step under way began with."""

    def begin_step(self) -> tuple[float, np.ndarray]:
        """Return the learning rate and the positions of the step that begins."""
        self._mark = _first(leaf_of(self.replica.params, self.smallest))
        self._step.enter_context(self.timing.step())
        return self.learning_rate(), self.data.draw()

    def stepped(self, params: Params, loss: Any) -> None:
        """Note the step, which need not be done on the device. Its parameters are lent
        until the next one begins."""
        # Adoptions are done, and with them the step before: a loop that waits for
        # nothing stays one step ahead.
        jax.block_until_ready(self._mark)  # type: ignore[no-untyped-call]
        self._read_metrics()
        self._step.close()
        self.done += 1
        self.replica.params, self._loss = params, loss

    def catch_up(self) -> list[int]:
        """Adopt what was published until the run's end; return the fragments of which
        it did not come while a coordinator that is done waits for its islands; all, if
        the island heard too late that the run is over."""
        if not self._seen.finished:
            return list(range(len(self.boundary.books.versions())))
        deadline = self.clock() + self._deadlines.stop_s
        while self.mailbox.lacking() and self.clock() < deadline:
            self.decisions.wait(DATA_POLL_S)
        self._at_boundary()
        return self.mailbox.lacking()

    def _read_metrics(self) -> None:
        if self._loss is not None:
            self.timing.loss(float(self._loss))
            self._loss = None


class OwnData:
    """Leased positions, of rows that the loop reads itself."""

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


def _named(like: Any) -> Params:
    try:
        return named(like)
    except ValueError as error:
        raise ConfigError(f"like: {error}") from error


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of a parameter; raise ConfigError if it cannot be
    one."""
    if leaf.dtype != np.float32:
        raise ConfigError(
            f"like has an array of {leaf.dtype}{list(leaf.shape)}; the parameters that "
            f"islands share are float32, and a loop casts them for its step"
        )
    lies = getattr(leaf, "sharding", None)
    if not isinstance(lies, NamedSharding):
        device = next(iter(lies.device_set)) if lies else jax.devices()[0]
        mesh = Mesh(np.array([device]), (AXIS,))
        lies = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    if not lies.is_fully_addressable:
        raise ConfigError(
            "like lies on devices of other processes; a loop that joins has one "
            "process, with all of its devices"
        )
    return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=lies)  # type: ignore[no-untyped-call]


@jax.jit
def _first(leaf: jax.Array) -> jax.Array:
    """Return a copy of an element: the leaf itself may be donated."""
    return jnp.ravel(leaf)[0]
