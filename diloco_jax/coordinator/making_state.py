"""Make the state that a coordinator's life begins with, its holder and its log.

It is that of the run on this disk as far as it was durable, of a new run, or of a new
term. A new one is durable before any island asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator import origin, term
from diloco_jax.coordinator.gatherer import Gathered
from diloco_jax.coordinator.holders import Holders
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.state_snapshots import StateSnapshots
from diloco_jax.coordinator.workers.holder import WorkersHolder
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.model import Model, Params
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator.state import PolicyConfig, State


class MadeState(NamedTuple):
    """A state, with the holder of its fragments and the log of what follows."""

    state: State
    holder: StoreHolder | WorkersHolder
    log: durable.RecordLog


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateMaker:
    """Makes the state of one life. open_log: opens the log after that snapshot."""

    config: Config
    policy: PolicyConfig
    plan: FragmentPlan
    workdir: Path
    states: StateSnapshots
    holders: Holders
    tape: Tape
    open_log: Callable[[int], durable.RecordLog]

    def recovered(self) -> MadeState:
        """Return the state of the run on the disk, as far as it was durable."""
        folder = self.workdir / run_files.LOG
        recovered = origin.recover(self.policy, self.states, folder)
        holder = self.holders.restoring(recovered.state.term)
        restored = holder.restore(recovered.restore)
        origin.tell_recovered(self.config, recovered, restored, self.tape)
        # After the snapshot: a kill may have come between snapshot and log.
        log = self.open_log(recovered.snapshot)
        return MadeState(recovered.state, holder, log)

    def of_new_run(self, model: Model, given: Params | None) -> MadeState:
        """Return the state of a new run. given: see `origin.initialise`."""
        store, state = origin.initialise(
            self.config, self.policy, model, self.plan, self.tape, self.workdir, given
        )
        return self._durable(store, state, None)

    def of_new_term(self, gathered: Gathered, found: int | None) -> MadeState:
        """Return the state of a new term. found: number of a snapshot that is there, of
        an older run, as where snapshots go elsewhere."""
        if found is not None:
            self.states.require_own(found)
        store, state = term.begin(
            gathered, self.config, self.policy, self.plan, self.tape
        )
        return self._durable(store, state, found)

    def _durable(self, store: Store, state: State, found: int | None) -> MadeState:
        # After the log's snapshot: where a log is, the run has begun.
        after = -1 if found is None else found
        number = durable.next_number(self.workdir / run_files.LOG, after)
        versions = [fragment.version for fragment in state.fragments]
        holder = self.holders.beginning(store, versions, state.term)
        with self.states.beginning():
            self.states.save(number, state)
        log = self.open_log(number)
        log.forget(number)
        return MadeState(state, holder, log)
