"""The coordinator's lead: the engine of the service, and everything that it is
given."""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.coordinator import notes
from diloco_jax.coordinator.engine import Engine
from diloco_jax.coordinator.holder import StoreHolder
from diloco_jax.coordinator.inbox import Inbox
from diloco_jax.coordinator.journal import Journal
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.publishes import Publishes
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.coordinator.store import Store
from diloco_jax.coordinator.thread import EngineThread
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.events import (
    DeltaArrived,
    Disconnected,
    Event,
    Said,
    Timer,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Hello


class Lead(EngineThread[State, Event]):
    """Decide for one run. Merges are computed on a thread of their own."""

    def __init__(
        self,
        config: PolicyConfig,
        state: State,
        *,
        store: Store,
        inbox: Inbox,
        publishes: Publishes,
        log: RecordLog,
        tape: Tape,
        metrics: Metrics,
        sessions: Sessions,
        faults: Faults,
        slow_s: float,
        housekeeping: Callable[[Lead], None],
    ) -> None:
        """slow_s: see `Journal`. housekeeping: called on the engine's thread at least
        twice a second."""
        self.config = config
        self._holder = StoreHolder(
            store,
            inbox,
            publishes,
            metrics,
            self.post,
            self.fail,
            lambda note: self.journal.note(note),
            lambda text: self.journal.alert(text),
        )
        self.journal = Journal(
            log,
            tape,
            faults=faults,
            merges=sum(fragment.merges for fragment in state.fragments),
            slow_s=slow_s,
        )
        engine: Engine[State, Event] = Engine(
            decide.step,
            config,
            state,
            log=self.journal,
            sender=sessions,
            holder=self._holder,
        )
        super().__init__(
            engine,
            decide.next_deadline,
            Timer(),
            self._peer,
            lambda: housekeeping(self),
        )

    @property
    def finished(self) -> bool:
        """True once the run is over."""
        return self.state.phase == "done"

    def _peer(self, event: Event | None) -> Disconnected | None:
        match event:
            case Hello() | Said() | Disconnected():
                return Disconnected(island=event.island, session=event.session)
            case DeltaArrived():
                island = self.state.islands.get(event.island)
                current = island is not None and island.incarnation == event.incarnation
                session = island.session if island is not None and current else ""
                return Disconnected(island=event.island, session=session)
        return None

    def run(self) -> None:
        """Decide until `stop`, see EngineThread; compile what merges need at the same
        time."""
        self._holder.warm_up(lambda: self.journal.note(notes.Compiled()))
        try:
            super().run()
        finally:
            self._holder.close()
