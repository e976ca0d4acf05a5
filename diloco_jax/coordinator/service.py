"""Answer calls to the coordinator: messages become events for the lead.

Calls come from many threads. The protocol decides what islands ask for. This file only
checks a peer's messages beyond their types, before anything is computed from them, and
turns away calls of another run, config, term or incarnation, before they cost anything.
A read of the lead's state is a read of one immutable value.

`AnchorSearch` answers them for a coordinator that searches the islands for anchors
before it lets anybody in. Calls become events of `protocol.coordinator.anchors`, which
decides. The holder of each fragment takes its anchor, keeps it on disk, and compares
the others' ballots. Islands train on and their control streams stay open; every other
call of theirs is answered "later".
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from diloco_jax import run_files
from diloco_jax.config import ConfigError, RunConfig, differences, shared_fields
from diloco_jax.coordinator import journal
from diloco_jax.coordinator.holding.fragment_snapshots import (
    KeptCycles,
    describe_cycles,
    mapped,
)
from diloco_jax.coordinator.holding.holder import FragmentHolder
from diloco_jax.coordinator.lead import (
    Engine,
    EngineThread,
    Lead,
    Log,
    Sessions,
    session_in_use,
)
from diloco_jax.coordinator.roster import Roster
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.files import json_number
from diloco_jax.models.build import other_model
from diloco_jax.observability.metrics import Metrics
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import (
    anchors,
    members,
    schedule,
    steering,
    takes,
)
from diloco_jax.protocol.coordinator.search import (
    Aim,
    FoundTerm,
    GiveUp,
    Offered,
)
from diloco_jax.protocol.coordinator.state import (
    Disconnected,
    KeepAsked,
    PolicyConfig,
    Said,
    SaidAhead,
    Timer,
    is_let_in,
)
from diloco_jax.protocol.holding import (
    AnchorCompared,
    AnchorKept,
    FromHolder,
    HolderTroubled,
    ToHolder,
)
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError, WireError
from diloco_jax.wire.peers import RateLimitedLog, require_run
from diloco_jax.wire.session import Handlers, Session

logger = logging.getLogger(__name__)

SHORTEST_MEDIAN_S = 1e-9
"""Shortest median of a step in seconds; the speed of a shorter step would not be
finite."""
INCARNATIONS_AHEAD = 600
"""Incarnations beyond the present unix second that are believed. Launchers count from
1, or in unix seconds and attempts, by clocks that are no more than minutes fast. A
thief of a key shuts the island's own process out for no longer than that."""
OF_NO_FRAGMENT = ("granted", "progress", "restored")


def check_hello(hello: messages.Hello) -> None:
    """Raise RemoteProtocolError if the numbers of a hello or their products are
    absurd."""
    _check_tokens(hello, hello.steps)
    for version in hello.versions:
        if version.term == 0:
            raise RemoteProtocolError(
                f"island {hello.island!r} has version {tuple(version)}, and terms "
                f"count from 1; start it again"
            )


def check_incarnation(hello: messages.Hello, last: int, unix: float) -> None:
    """Raise Refused if an incarnation is no plausible number of an attempt: it would
    shut out all later ones. last: the island's last one; unix: the present time in
    seconds."""
    most = max(last + 1, int(unix) + INCARNATIONS_AHEAD)
    if hello.incarnation > most:
        raise Refused(
            "incarnation",
            f"incarnation {hello.incarnation} of island {hello.island!r} is too high: "
            f"its last one is {last}, the unix time {int(unix)} at the coordinator, "
            f"and the limit {most}; start it with --incarnation {last + 1}, or set the "
            f"clock that is wrong",
        )


def check_report(
    hello: messages.Hello, report: messages.Report, fragments: int
) -> None:
    """Raise RemoteProtocolError if a report's numbers are absurd, or if one of its
    records names a fragment that the run does not have. hello: the session's."""
    _check_tokens(hello, max(report.steps, report.measures.steps))
    if 0 < (median_s := report.measures.median_step_seconds) < SHORTEST_MEDIAN_S:
        raise RemoteProtocolError(
            f"island {hello.island!r} says that its steps take {median_s} s, no step "
            f"takes less than {SHORTEST_MEDIAN_S}; start it again"
        )
    for record in report.records:
        if record.fragment >= fragments or (
            record.fragment < 0 and record.kind not in OF_NO_FRAGMENT
        ):
            raise RemoteProtocolError(
                f"record {record.seq} ({record.kind}) of island {hello.island!r} is of "
                f"fragment {record.fragment}, the run has {fragments}; start the "
                f"island with the run's config.json"
            )


class Likeness:
    """Compare an island's config and model with those of the run."""

    def __init__(self, run: RunConfig, plan: FragmentPlan) -> None:
        self._shared, self._fingerprint = shared_fields(run), run.fingerprint()
        self._plan = plan.digest()

    def differences(self, hello: messages.Hello) -> list[str]:
        """List the differences as `field: ours here, theirs there`; empty if there are
        none.
        """
        if hello.fingerprint != self._fingerprint:
            prints = f"fingerprint: {self._fingerprint} here, {hello.fingerprint} there"
            return [*differences(self._shared, hello.run), prints]
        return other_model(self._plan, hello.plan)


def _check_tokens(hello: messages.Hello, steps: int) -> None:
    if steps * hello.tokens_per_step > messages.MAX_TOKENS:
        raise RemoteProtocolError(
            f"island {hello.island!r} has made {steps} steps of "
            f"{hello.tokens_per_step} tokens, the limit is {messages.MAX_TOKENS} "
            f"tokens; start it again"
        )


METRICS_EVERY_S = 1.0
DECIDED_WITHIN_S = 10.0
"""Longest wait of an operator's call until that is decided."""


@dataclasses.dataclass(kw_only=True)
class Service(Handlers):
    """The answers of the wire's server while the run goes on."""

    likeness: Likeness
    lead: Lead
    holder: FragmentHolder
    sessions: Sessions
    roster: Roster
    metrics: Metrics
    kept_cycles: KeptCycles
    shown: Callable[[], dict[str, Any]]
    """Returns what `diloco status` shows."""
    time_budget_s: float
    sources: Sequence[str] = ()
    """Names of a mixture's sources."""
    _written: dict[str, float] = dataclasses.field(default_factory=dict, init=False)
    """Time of the last line of metrics, by admitted island."""

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Accept a control stream that said hello."""
        check_hello(hello)
        known = self.lead.state.islands.get(hello.island)
        last = known.incarnation if known is not None else 0
        check_incarnation(hello, last, time.time())
        if lines := self.likeness.differences(hello):
            raise Refused(
                "config",
                f"island {hello.island!r} and the run differ in {'; '.join(lines)} "
                f"(here: the coordinator). Start the island with the run's "
                f"config.json, on the run's text (--data.paths), and with the run's "
                f"model",
            )
        lead = self.lead
        if how := members.how_ahead(lead.config, lead.state, hello):
            # Not refused, since the fault is at this end: the island goes on, and comes
            # again.
            lead.post(SaidAhead(island=hello.island, how=how))
            raise Busy(
                f"island {hello.island!r} is {how}, whose state is an old one; stop "
                f"this coordinator, and start the one that has the newest state"
            )
        for other in self.lead.state.islands.values():
            if other.session == hello.session and other.name != hello.island:
                raise Refused("session", session_in_use(hello))
        self.sessions.arrived(session)

        def introduce() -> None:
            self.lead.journal.note(
                journal.Hello(
                    island=hello.island,
                    incarnation=hello.incarnation,
                    config=hello.island_config,
                    environment=hello.environment,
                    peer=session.peer,
                )
            )

        self.lead.post(hello, introduce)
        # The roster follows the protocol's answer, which stands when this is called.
        peer = Disconnected(island=hello.island, session=hello.session)
        self.lead.post(None, lambda: self._let_in(hello, session), peer)

    def receive(self, session: Session, message: messages.AfterHello) -> None:
        """Take a report or a goodbye of an island, or its word about another one."""
        hello = session.hello
        if not self.sessions.serves(session):
            return
        said = Said(island=hello.island, session=hello.session, message=message)
        if isinstance(message, messages.Goodbye):
            self.lead.post(said, lambda: self.roster.left(hello.island, time.time()))
            return
        if isinstance(message, messages.DonorFailed):
            self.lead.post(said)
            return
        check_report(hello, message, self.lead.config.fragments)
        self.lead.post(said, lambda: self._measured(hello.island, message))

    def disconnect(self, session: Session) -> None:
        """Note that a control stream ended."""
        if self.sessions.gone(session):
            hello = session.hello
            self.lead.post(Disconnected(island=hello.island, session=hello.session))

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the memory for a stripe of a delta that is awaited.

        Raises Refused if the sender is not the island's current process, or if the
        delta is not awaited.
        """
        self._check(start)
        if start.version is not None:
            raise Refused(
                "anchor",
                f"this coordinator has its state, and did not ask for the anchor of "
                f"fragment {start.fragment}",
            )
        fragment = self.lead.state.fragments[start.fragment]
        if not takes.is_awaited(fragment, start.island, start.incarnation, start.tick):
            raise Refused(
                "not_awaited",
                f"the delta of fragment {start.fragment}, tick {start.tick}, of island "
                f"{start.island!r} is not waited for; the coordinator asks for "
                f"those that are to be sent again",
            )
        return self.holder.upload_begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; the last one makes the delta an event."""
        return self.holder.upload_end(start, place)

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        """Return published fragments for an island."""
        self._check(request)
        return self.holder.fetch(request)

    def status(self) -> dict[str, Any]:
        """Return what `diloco status` shows."""
        return self.shown()

    def keep(self, cycle: int) -> dict[str, Any]:
        """Have a cycle kept: the given one or, for 0, the earliest one that can be.

        Returns the number of the cycle (`cycle`), the names of its files (`files`, none
        until it is complete) and the share that is kept so far (`share`). Raises
        Refused for a cycle that is not kept and can no longer be.
        """
        now = schedule.present_cycle(self.lead.config, self.lead.state)
        if not cycle and now in self.kept_cycles.numbers():
            cycle = now
        if not cycle:
            self._decide(KeepAsked())
        state, kept = self.lead.state, self.kept_cycles.numbers()
        cycle = cycle or state.kept_cycle
        if cycle in kept:
            return {"cycle": cycle, "files": self.kept_cycles.files(cycle)}
        if not (state.keeping and state.kept_cycle == cycle):
            if not schedule.can_keep_cycle(state):
                raise Refused(
                    "cycle",
                    f"the run is {state.phase}: no cycle begins to be kept any more; "
                    f"kept are {describe_cycles(kept)}. Export its last version when "
                    f"it has ended",
                )
            if cycle == now:
                raise Refused(
                    "cycle",
                    f"cycle {cycle} has begun without being kept; kept are "
                    f"{describe_cycles(kept)}. Leave --cycle out, and the next one is",
                )
            raise Refused(
                "cycle",
                f"cycle {cycle} is not kept, and no other than the run's present one, "
                f"{now}, can be any more; kept are {describe_cycles(kept)}. Leave "
                f"--cycle out, or set placement.export_every (see `diloco status` for "
                f"alerts)",
            )
        lacking = len(state.unkept) / self.lead.config.fragments
        return {"cycle": cycle, "files": [], "share": 1 - lacking}

    def steer(self, order: messages.Steer) -> dict[str, Any]:
        """Change who takes part, as an operator wants it; durable when this returns.

        Returns the islands that operators have let in (`admitted`) and those in
        quarantine (`quarantined`). Raises Refused if it cannot be done.
        """
        lead = self.lead
        if wrong := steering.refusal(lead.config, lead.state, order):
            raise Refused("steer", wrong)
        self._decide(order)
        logger.info("an operator: %s island %s", order.how, order.island)
        islands = lead.state.islands.values()
        return {
            "admitted": list(lead.state.admitted),
            "quarantined": [island.name for island in islands if island.quarantined],
        }

    def profile(self, order: messages.ProfileOrder) -> dict[str, Any]:
        """Have an island trace some steps; see `Client.profile`."""
        state = self.lead.state
        if wrong := steering.trace_refusal(state, order):
            raise Refused("profile", wrong)
        logger.info("an operator: trace %d steps of %s", order.steps, order.island)
        request = messages.ProfileRequest(
            steps=order.steps,
            within_s=steering.trace_within_s(state, order, self.time_budget_s),
        )
        self.sessions.tell(state.islands[order.island].session, request)
        return {"folder": f"{run_files.PROFILES}/{order.island}-STEP"}

    def _decide(self, event: KeepAsked | messages.Steer) -> None:
        """Have an event decided, and its effects carried out."""
        decided = threading.Event()
        self.lead.post(event)
        self.lead.post(None, decided.set)
        if not decided.wait(DECIDED_WITHIN_S):
            raise Busy(
                "the coordinator is held up (see its alerts); it has this order, and "
                "carries it out once it goes on; look at its status then"
            )

    def kept(self, cycle: int, name: str) -> memoryview:
        """Return the bytes of a file of a kept cycle, where they lie."""
        path = self.kept_cycles.path(cycle, name)
        if path is None:
            raise Refused(
                "cycle",
                f"cycle {cycle} has no file {name!r}, or is not kept any more; kept "
                f"are {describe_cycles(self.kept_cycles.numbers())}; raise "
                f"placement.exports_kept",
            )
        return mapped(path)

    def _check(self, call: bulk.UploadStart | bulk.FetchRequest) -> None:
        config = self.lead.config
        require_run(call, config.run_id)
        if not 0 <= call.fragment < config.fragments:
            raise Refused(
                "fragment",
                f"there is no fragment {call.fragment}, the run has "
                f"{config.fragments}; island and coordinator disagree on "
                f"sync.fragments",
            )
        self._require_current(call)

    def _require_current(self, call: bulk.UploadStart | bulk.FetchRequest) -> None:
        """Raise Refused unless the island's current process calls."""
        state = self.lead.state
        island, term = state.islands.get(call.island), state.term
        if term > 1 and (island is None or island.incarnation < call.incarnation):
            # The island was in the run before this term, and its hello is on its way.
            raise Busy(
                f"incarnation {call.incarnation} of island {call.island!r} has not "
                f"said hello in term {term}; come again"
            )
        if island is None or island.incarnation != call.incarnation:
            current = "unknown" if island is None else f"{island.incarnation}"
            raise Refused(
                "fenced",
                f"incarnation {call.incarnation} of island {call.island!r} is not "
                f"current (that is {current}); stop this process",
            )
        if island.session != call.session:
            raise Refused(
                "fenced",
                f"incarnation {call.incarnation} of island {call.island!r} is another "
                f"process than the one that calls; stop this process",
            )
        if not is_let_in(self.lead.config, call.island, state.admitted):
            raise Refused(
                "removed",
                f"an operator removed island {call.island!r} from the run; stop this "
                f"process",
            )

    def _let_in(self, hello: messages.Hello, session: Session) -> None:
        if self.sessions.serves(session):
            before = hello.steps if hello.term > 0 else None
            self.roster.hello(
                hello,
                time.time(),
                steps_before=before,
                own_data=hello.environment.get(messages.OWN_DATA) is True,
            )

    def _measured(self, island: str, message: messages.Report) -> None:
        now, before = time.time(), self.roster.watched_by(island)
        known = self.lead.state.islands.get(island)
        asked = known.watched_cycle if known is not None else 0
        self.roster.report(island, message.measures, message.records, now, asked)
        if (watched := self.roster.watched_by(island)) != before:
            self.metrics.append({"kind": "merged_model", "time": now, **watched})
        if now - self._written.get(island, 0.0) < METRICS_EVERY_S:
            return
        self._written[island] = now
        measures = message.measures
        line = {
            "kind": "island",
            "time": now,
            "island": island,
            "phase": message.phase,
            "step": message.steps,
            "loss": json_number(measures.loss),
            "loss_by_source": self._by_source(measures),
            "adoption_loss": json_number(measures.adoption_loss),
            "eval_loss": json_number(measures.eval_loss),
            "learning_rate": measures.learning_rate,
            "median_step_seconds": measures.median_step_seconds,
            "stalled_seconds": measures.stalled_seconds,
            "data_seconds": measures.data_seconds,
            "skipped_steps": measures.skipped_steps,
            "tokens_predicted": measures.tokens_predicted or None,
            "bytes_up": measures.bytes_up,
            "bytes_down": measures.bytes_down,
            "microseconds_up": measures.microseconds_up,
            "transfers_failed": measures.transfers_failed,
            **({"trial": measures.trial} if measures.trial else {}),
        }
        self.metrics.append(line)
        self.roster.failures.metrics(line)

    def _by_source(self, measures: messages.Measures) -> dict[str, Any] | None:
        """Return the loss of each source of a mixture; None if it is none."""
        losses = measures.losses_by_source
        if not losses or len(losses) != len(self.sources):
            return None
        return dict(zip(self.sources, map(json_number, losses), strict=True))


class AfterEndHandlers(Handlers):
    """The answers of the wire's server once the run is over.

    A slice may have waited for its machines for longer than the run took. An island
    that finds nobody would try again, on machines that cost; one that is told ends with
    0.
    """

    def __init__(self, lead: Lead, status: dict[str, Any]) -> None:
        """lead: of the ended run. status: what `diloco status` shows from here on."""
        self._config, self._state, self._status = lead.config, lead.state, status

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Raise Refused, as the protocol says it."""
        check_hello(hello)
        refusal = members.entry_refusal(self._config, self._state, hello)
        assert refusal is not None  # Nobody is let into a run that is over.
        raise Refused(refusal.code, refusal.message)

    def status(self) -> dict[str, Any]:
        """Return the status at the end."""
        return self._status

    def refuse(self) -> NoReturn:
        """Refuse any call of an ended run."""
        raise Refused(
            "finished",
            "the run is over; its results are in the coordinator's workdir, from which "
            "`diloco export WORKDIR DIR` reads",
        )


# ---- before the run has its state ------------------------------------------------


class Searched(NamedTuple):
    """The end of a search, and the holder that has the anchors."""

    found: FoundTerm
    holder: FragmentHolder
    unheard: Sequence[FromHolder]
    """The holder's messages that are for the lead, and what people have to see."""


class SearchError(WireError):
    """Islands did not come, or two differ: the next process asks again, once islands or
    a person have changed that."""


class AskedToEnd(Exception):  # noqa: N818
    """The process was asked to end while it searched. Islands train on, and the next
    process begins the search anew."""


class AnchorSearch(Handlers, Log):
    """The answers of the wire's server until `search` returns."""

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        plan: FragmentPlan,
        aim: Aim,
        holder_of: Callable[[str, int], FragmentHolder],
        asked_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        """config: with a run id if it is known. holder_of: returns the holder of the
        run's fragments, given its id and the term that begins. It is called once most
        islands are of one run: until then nothing is written. asked_to_end: once it is
        true, the search ends."""
        self._likeness = Likeness(run, plan)
        self._config, self._holder_of = config, holder_of
        self._sessions, self._lines = Sessions(), RateLimitedLog()
        self._holder: FragmentHolder | None = None
        self._found: FoundTerm | None = None
        self._unheard: list[FromHolder] = []
        self._alerts: list[str] = []
        """The last ones, oldest first."""
        engine = Engine(
            anchors.step,
            config,
            anchors.begin(config, aim, time.monotonic()),
            sessions=self._sessions,
            log=self,
            holder=self,
            over=self._over,
        )
        self._thread = EngineThread(
            engine, anchors.next_deadline, Timer(), self._keep_house
        )
        self._asked_to_end = asked_to_end

    def search(self) -> Searched:
        """Wait for islands until a deadline, and for their anchors.

        Raises SearchError, or ConfigError for what no island has, that say why there
        will be no term; AskedToEnd.
        """
        logger.warning("%s", self._waits)
        self._thread.run()
        if self._found is None:
            raise AskedToEnd(f"ending, asked to: {self._waits}")
        assert self._holder is not None
        self._unheard += [HolderTroubled(text=text) for text in self._alerts]
        return Searched(self._found, self._holder, self._unheard)

    # ---- calls of islands, on many threads ----------------------------------------

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Take the offer of an island that connects."""
        check_hello(hello)
        check_incarnation(hello, 0, time.time())
        admitted = self._thread.state.aim.admitted
        if unknown := members.unknown(self._config, hello.island, admitted):
            raise Refused("unknown_island", unknown)
        self._sessions.arrived(session)
        differences = tuple(self._likeness.differences(hello))
        self._thread.post(Offered(hello=hello, differences=differences))

    def receive(self, session: Session, message: messages.AfterHello) -> None:
        """Note a sign of life; a report comes again in the new term, and a goodbye ends
        the stream."""
        hello = session.hello
        if isinstance(message, messages.Report):
            said = Said(island=hello.island, session=hello.session, message=message)
            self._thread.post(said)

    def disconnect(self, session: Session) -> None:
        """Note that a control stream ended."""
        hello = session.hello
        if self._sessions.gone(session):
            lost = Disconnected(island=hello.island, session=hello.session)
            self._thread.post(lost)

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of an anchor's stripe, if the anchor was asked for."""
        member, holder = self._thread.state.members.get(start.island), self._holder
        if (
            start.version is None
            or holder is None
            or member is None
            or member.offer.incarnation != start.incarnation
            or member.offer.session != start.session
        ):
            raise Refused("gathering", f"{self._waits}; this one was not asked for")
        return holder.upload_begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; the last one makes the anchor an event."""
        assert self._holder is not None
        return self._holder.upload_end(start, place)

    def refuse(self) -> NoReturn:
        """Answer Busy: there is nothing to fetch, keep or change yet."""
        raise Busy(f"{self._waits}; come again")

    def status(self) -> dict[str, Any]:
        """Return what `diloco status` shows."""
        state = self._thread.state
        return {
            "run_id": "",
            "phase": "gathering",
            "tokens": 0,
            "total_tokens": self._config.total_tokens,
            "progress": 0.0,
            "merges": 0,
            "goodput": 0.0,
            "alerts": [self._waits, *anchors.notices(state), *self._alerts],
            "versions": [],
            "islands": {
                name: {
                    "state": "offering" if member.connected else "absent",
                    "incarnation": member.offer.incarnation,
                }
                for name, member in sorted(state.members.items())
            },
        }

    def _keep_house(self) -> None:
        if self._asked_to_end():
            self._thread.stop()

    @property
    def _waits(self) -> str:
        """Describe the wait, for people."""
        return anchors.waits_for(self._thread.state)

    # ---- what was decided, on one thread -------------------------------------------

    def alert(self, text: str, island: str = "") -> None:
        """See `lead.Log`. There is no tape yet."""
        # Two processes of one island may come in turn, each with another config.
        self._lines.log(logger, logging.WARNING, "what people should see", text)
        if text not in anchors.notices(self._thread.state):  # Those may pass.
            self._alerts = [*self._alerts, text][-journal.ALERTS_KEPT :]

    def hold(self, message: ToHolder) -> None:
        """Pass a message to the holder; see `lead.Holder`."""
        if self._holder is None:
            state = self._thread.state
            self._holder = self._holder_of(state.run_id, state.term)
            self._holder.answer(self._heard, self._thread.fail)
            self._sessions.completed = self._holder.completed
        self._holder.hold(message)

    def _over(self, end: FoundTerm | GiveUp) -> None:
        if isinstance(end, FoundTerm):
            self._found = end
            self._thread.stop()
        else:
            kind = ConfigError if end.unfit else SearchError
            self._thread.fail(kind(end.message))

    def _heard(self, message: FromHolder) -> None:
        if isinstance(message, AnchorKept | AnchorCompared):
            self._thread.post(message)
        else:
            self._unheard.append(message)
            if isinstance(message, HolderTroubled):
                logger.warning("%s", message.text)
