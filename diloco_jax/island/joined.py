"""A train loop of the user's own as an island: `join`, then a boundary at each step.

It is the product's island with another loop: decisions, takes, adoptions, network and
ledger are the same code. The loop keeps its step, its moments and its data to itself.
It lends its parameters at a boundary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.data.reader import LeasedPositions
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import Faults
from diloco_jax.island.checkpoints import require_own, restored_state, saved_state
from diloco_jax.island.device.build import at_anchors, compile_programs
from diloco_jax.island.device.exchange import Exchange, LentBeside, Restored
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.host import Host
from diloco_jax.island.link import ask_config, ending_of
from diloco_jax.island.loop import Stepping
from diloco_jax.island.mailbox import NotHereError
from diloco_jax.island.watches import leave
from diloco_jax.island.world import ALONE, Hosts, HostsError, hosts_here
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Axes, Model, plain_axes
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.messages import Span, Version
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.errors import Refused, WireError


class IslandEndedError(RuntimeError):
    """The island ended before the run did: says why."""


def join(
    address: str,
    *,
    name: str,
    like: Any,
    tokens_per_step: int,
    incarnation: int,
    certificates: str | Path = "",
    axes: Axes | None = None,
    every: int = 1,
    insecure: bool = False,
    state: Mapping[str, Any] | None = None,
    own_data: bool = False,
) -> JoinedIsland:
    """Make this process, or its whole `jax.distributed` world, an island of the run
    that a coordinator serves.

    Every process of the world calls it with the same arguments, and later makes the
    same calls of the object that it returns.

    ```
    with join("coordinator:7000", name="v6e", like=params, ...) as island:
        params = island.params
        while not island.over:
            params, ... = step(params, ..., island.learning_rate)
            params = island.boundary(params)
    ```

    Args:
      address: HOST:PORT of the coordinator, whose config decides everything else.
      name: of the island; the run's config or `placement.admit` names it, or an
        operator let it in (`diloco admit`).
      like: the parameters, or abstract arrays with their shapes and shardings: any
        pytree of f32 arrays on a mesh of all processes. Their values count only if the
        run begins with those of this island (`--init from-island:NAME`).
      tokens_per_step: tokens of one step of the loop, over all its devices.
      incarnation: number of this attempt, from 1; higher than any before.
      certificates: folder with `ca.pem`, `island.NAME.pem` and `.key`.
      axes: names of the parameters' axes, as the run's model has them; None = no names.
      every: steps of the loop between two boundaries, for steps of milliseconds.
      insecure: allow a connection to other machines without TLS.
      state: what `state` of an earlier attempt returned, from the loop's checkpoint;
        the loop then goes on with that checkpoint's moments.
      own_data: the loop does not read at `positions`, but data of its own; tape and
        summary then say so.

    Raises:
      ConfigError: something does not fit the run; names the field, both values and the
        remedy.
      SecurityError, ConnectionLost: no coordinator that can be trusted answered, within
        ten minutes for one that is away and may come back.
    """
    if incarnation < 1:
        raise ConfigError(f"incarnation = {incarnation}: attempts are counted from 1")
    if every < 1:
        raise ConfigError(f"every = {every}; a boundary follows one step or more")
    way = Placement(certificates=str(certificates), insecure=insecure)
    config = ask_config(address, name, way)
    placement = dataclasses.replace(
        config.placement, certificates=way.certificates, insecure=insecure
    )
    hosts = hosts_here(f"diloco/{name}/{incarnation}/")
    island = _described(config, name, tokens_per_step * every, hosts.count)
    islands = {**config.islands, name: island}
    config = dataclasses.replace(config, placement=placement, islands=islands)
    host = JoinedHost(
        config, name, address, like, axes, incarnation, hosts, state, own_data=own_data
    )
    return JoinedIsland(host, every, restarted=incarnation > 1 and state is None)


class JoinedIsland:
    """An island whose train loop is the user's. Use it as a context manager.

    Leaving the block before the run is over is a goodbye that loses nothing, if the
    loop still has what the last `boundary` returned; without it, the steps since the
    last takes are lost. An exception in the block leaves at once.
    """

    def __init__(self, host: JoinedHost, every: int, *, restarted: bool) -> None:
        self._host, self._every = host, every
        self._ending: Ending | None = None
        self._calls = 0
        self._params: Any = None
        self.restarted = restarted
        """True if an earlier attempt was part of the run, and there is no state of it:
        fresh moments are due."""
        self.learning_rate = 0.0
        """Rate of the next step, from the run's schedule and its progress."""
        self.positions: np.ndarray = np.zeros(0, np.int64)
        """int64 [sequences of a step]: which rows of the run's data the next step is
        to use, for a loop whose data can be read by position; no island is given the
        same."""

    def __enter__(self) -> Self:
        """Join; return when the first step can be made.

        Raises IslandEndedError if the coordinator refuses the island, or ends it before
        it has joined; HostsError if another process of this world does not come; and
        any error of the wire.
        """
        try:
            self._meet()
            self._host.start()
            self._prepare()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            ended = self._ended_by(error)
            self._close(ended or Ending(EXIT_FAILED, text))
            if ended is not None:
                raise IslandEndedError(ended.text) from None  # It says the same.
            raise
        self._params = self._loop.hand_over()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._close(Ending(EXIT_FAILED, f"{type(error).__name__}: {error}"))
            return
        try:
            ending = self._ending or self._leave()
        except BaseException as left:
            self._close(Ending(EXIT_FAILED, f"{type(left).__name__}: {left}"))
            raise
        self._close(ending)

    @property
    def params(self) -> Any:
        """The parameters that the first step begins with, sharded as `like` is; later
        ones come from `boundary`."""
        return self._params

    @property
    def over(self) -> bool:
        """True once no step is to follow: the run has its tokens."""
        return self._ending is not None

    @property
    def final(self) -> Any:
        """The run's parameters, from the newest versions that this island has.

        After the end they are the flushed ones, as they were published
        (`sync.codec_down`). Raises IslandEndedError if the run is over and some last
        versions did not arrive.
        """
        over = self._ending is not None and self._ending.reason == "finished"
        if over and (lacking := self._loop.lacking()):
            raise IslandEndedError(
                f"the run is over, but its last versions of fragments {lacking} "
                f"did not come to this island; the coordinator's workdir has them, see "
                f"`diloco export`"
            )
        host = self._host
        params = at_anchors(host.plan, host.exchange, host.leaves.zeros())
        return host.leaves.as_tree(params)

    @property
    def step(self) -> int:
        """Number of boundaries so far."""
        return self._loop.done

    def state(self) -> dict[str, Any]:
        """Return what the loop's checkpoint is to have of the island, for `join` of the
        next attempt: a dict of arrays.

        It holds run, island, incarnation and steps, versions and outstanding takes of
        the fragments, and "residuals" where the run has `sync.error_feedback`: one f32
        array for each parameter, by name, with its shape and sharding. They are the
        caller's. Call it between two boundaries, on the loop's thread, on every host;
        and after a block that was left early, whose last takes may still be merged.
        """
        host, loop = self._host, self._loop
        return saved_state(
            host.exchange,
            host.leaves,
            host.identity,
            steps=loop.done,
            versions=loop.boundary.books.versions(),
            outstanding=loop.in_doubt(),
        )

    def boundary(
        self, params: Any, loss: Any = None, *, alongside: tuple[Any, ...] = ()
    ) -> Any:
        """Return the parameters for the next step, with what has come in adopted.

        Call it after every step, on the thread that launches the steps. It waits until
        at most one step is under way, and for nobody else. At the end it returns when
        the run is over.

        Args:
          params: the step's result, as `like` in structure, shapes and sharding; it is
            consumed.
          loss: a scalar of the step, for the run's metrics; it is read one step later.
          alongside: trees of the same structure, shapes and sharding, of any floating
            dtype, that follow the parameters: an average, a copy in bf16. What an
            adoption changes in the parameters it changes in them. They are consumed,
            and returned as (params, alongside).

        Raises:
          ValueError: `params` differ from `like`.
          IslandEndedError: the coordinator put the island out, or is gone for longer
            than an island waits.
        """
        if self.over:
            raise IslandEndedError(f"no step is to follow: {self._ending}")
        self._calls += 1
        if self._calls % self._every:
            return (params, alongside) if alongside else params
        self._loop.stepped(params, loss, alongside)
        self._params = None
        self._prepare()
        params, beside = self._loop.hand_over(), self._loop.hand_over_beside()
        self._loop.lend()
        return (params, beside) if alongside else params

    def _ended_by(self, error: BaseException) -> Ending | None:
        """Return how the coordinator ended the island, if that is why it did not start:
        by an answer, or on the control stream while it was joining."""
        if isinstance(error, Refused):
            return ending_of(error)
        if isinstance(error, WireError | HostsError | TimeoutError | IslandEndedError):
            return self._host.mailbox.ending
        return None

    def _meet(self) -> None:
        field = "placement.hosts_budget_s"
        budget_s = self._host.config.placement.hosts_budget_s
        try:
            self._host.hosts.meet("here", budget_s, lambda: False, field)
        except HostsError as error:
            raise HostsError(
                f"{error}; does every process call join with this name and incarnation?"
            ) from error

    def _prepare(self) -> None:
        """Prepare the next step, or note that there is none."""
        try:
            self._ending = self._loop.until_step()
        except (HostsError, NotHereError) as error:
            raise IslandEndedError(str(error)) from error
        if self._ending is None:
            self.learning_rate, self.positions = self._loop.begin_step()
        elif self._ending.exit_code != EXIT_DONE:
            raise IslandEndedError(self._ending.text)

    def _leave(self) -> Ending:
        """Have everything that is open taken and sent, and return how it ended."""
        host = self._host
        if not self._loop.take_back():
            # Nothing is left to take from; other hosts of the island see the same.
            return Ending(
                EXIT_DONE, "its train loop left the run within a step", "stopped"
            )
        if not host.follows:
            left = Ending(EXIT_DONE, "its train loop left the run", "stopped")
            leave(host.mailbox, host.deadlines.stop_s, left)
        while (ending := self._loop.until_step()) is None:
            pass  # It has not heard yet that it is to leave.
        return ending

    def _close(self, ending: Ending) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._host.close)
            self._host.stop(ending)

    @property
    def _loop(self) -> JoinedLoop:
        return self._host.loop


def _described(
    config: Config, name: str, tokens_per_step: int, hosts: int
) -> IslandConfig:
    """Return the config of this island in the run.

    Raises ConfigError if the run does not have the island, or with other tokens or
    hosts.
    """
    length = config.run.sequence_length
    sequences, rest = divmod(tokens_per_step, length)
    if rest or sequences < 1:
        raise ConfigError(
            f"tokens_per_step = {tokens_per_step} of island {name!r} is no multiple of "
            f"the run's sequence_length = {length}, in which its data is counted"
        )
    island = config.islands.get(name)
    if island is None:
        # The coordinator knows whether it is let in: an operator may have admitted it.
        return IslandConfig(batch_size=sequences, hosts=hosts)
    if island.batch_size != sequences:
        raise ConfigError(
            f"tokens_per_step = {tokens_per_step}: that is {sequences} sequences of "
            f"{length}, but the run's config has islands.{name}.batch_size = "
            f"{island.batch_size}; make them the same"
        )
    if island.hosts != hosts:
        raise ConfigError(
            f"the run's config has islands.{name}.hosts = {island.hosts}, and this "
            f"jax.distributed world has {hosts} processes; make them the same"
        )
    return island


class JoinedHost(Host["JoinedLoop"]):
    """A host whose steps are a user's."""

    awaits_last = True

    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        like: Any,
        axes: Axes | None,
        incarnation: int = 1,
        hosts: Hosts = ALONE,
        state: Mapping[str, Any] | None = None,
        *,
        own_data: bool = False,
    ) -> None:
        """like, axes, state, own_data: as for `join`. Raise ConfigError if the
        parameters are not f32, or cannot be cut as the run cuts them; SecurityError.
        """
        self.leaves, self._like = LikeLeaves(like), like
        self.own_data, self._state = own_data, state
        seen = config.run.model.vision.layers and not config.run.model.factory
        by_use = config.run.sync.weights_by_use
        if by_use == "rows" or (by_use == "parts" and seen):
            raise ConfigError(
                f"sync.weights_by_use = {by_use!r} in the run's config, and a train "
                f"loop of yours does not say how often it used a row or a tower; begin "
                f"the run with sync.weights_by_use = 'none'"
            )
        shapes = self.leaves.like
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
        super().__init__(config, name, address, plan, incarnation, hosts)
        self.data: OwnData = OwnData(self.island.batch_size)

    def build(self, identity: Identity) -> Exchange:
        """Build takes and adoptions. Raise ConfigError for a state of another run."""
        self.identity, self._zeros = identity, self.leaves.zeros()
        memory = self.island.anchor_memory
        exchange = Exchange(self.plan, self.config.run.sync, self._zeros, memory)
        if self._state is not None:
            require_own(self._state, identity, exchange, len(self.plan.fragments))
        return exchange

    def compile(self) -> None:
        """Compile every take and adoption. No host runs any before all have compiled
        them, as for the product's own loop."""
        began = time.monotonic()
        compile_programs([*self.exchange.lower_all()], self.programs_left)
        self.meet_compiled()
        _first(self.leaves.smallest(self._zeros))
        self.compile_seconds = time.monotonic() - began

    def restore(self, versions: Sequence[Version]) -> Restored | None:
        """Return the part of `state` that holds at these versions."""
        if self._state is None:
            return None
        return restored_state(self._state, self.exchange, self.leaves, versions)

    def copy(
        self,
        anchors: dict[int, tuple[jax.Array, ...]] | None,
        restored: Restored | None,
    ) -> LentBeside:
        """Make the parameters that the loop is lent."""
        if anchors is None:
            self.exchange.start_from(self.leaves.first(self._like))
        self._like = None
        self.exchange.start(anchors or {}, restored.residuals if restored else None)
        zeros, self._zeros = self._zeros, {}
        params = at_anchors(self.plan, self.exchange, zeros)
        return LentBeside(self.exchange, jax.tree.leaves(params))

    def loop_of(self, shared: dict[str, Any], faults: Faults) -> JoinedLoop:
        """Make the boundaries."""
        return JoinedLoop(**shared, leaves=self.leaves)


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
        self._given: tuple[Any, list[Any]] | None = None
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
            self._lent = list(map(weakref.ref, params))
        except TypeError:
            return  # A number of the host has no weak references.
        self.replica.params, self._given = [], None

    def take_back(self) -> bool:
        """Take the lent parameters back. Return False if the loop has freed or donated
        them.
        """
        if self._lent:
            leaves = [lent() for lent in self._lent]
            if any(leaf is None or _is_gone(leaf) for leaf in leaves):
                return False
            self.replica.params = leaves
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
