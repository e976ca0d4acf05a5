"""What an island does between two steps, in one order everywhere.

Verdicts first, then adoptions and takes in the order of the adopt rule. The train
loop, the virtual islands of the simulator and replay all act through `Boundary`; what
differs is what stands behind `Arrays` and `Outgoing`.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from diloco_jax.core.choices import AdoptRule
from diloco_jax.island.mailbox import Arrival, Inbox
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.messages import TakeVerdict
from diloco_jax.protocol.values import Span

logger = logging.getLogger(__name__)


class Arrays(Protocol):
    """A model copy, as far as boundaries change it; see `replica.Replica`."""

    def take(self, fragment: int) -> Any:
        """The fragment's encoded delta."""

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Takes over a published fragment. keep: the last take is not in it, and stays
        in the local values."""

    def settle(self, fragment: int) -> None:
        """The outstanding take is merged."""

    def reopen(self, fragment: int) -> None:
        """As if the outstanding take had not been."""

    def drop(self, fragment: int) -> None:
        """The outstanding take is lost."""

    def reset(self, fragment: int) -> None:
        """The take is lost, and the local values go back to the anchor."""


class Outgoing(Protocol):
    """Where encoded deltas go; neither call waits."""

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        """Sends an encoded delta, and keeps it until `forget`."""

    def forget(self, fragment: int, tick: int) -> None:
        """The verdict on a take is final."""


class Data(Protocol):
    """`data.stream.LeasedStream`, or `data.positions.LeasedPositions`."""

    def grant(self, span: Span) -> None:
        """Adds positions after those granted before."""


class Boundary:
    """Acts on what came in, for one incarnation."""

    def __init__(
        self,
        books: Books,
        arrays: Arrays,
        data: Data,
        outgoing: Outgoing,
        rule: AdoptRule,
    ) -> None:
        self.books = books
        self.others_tokens = 0
        """Of the other islands, as of the last boundary."""
        self._arrays, self._data, self._outgoing = arrays, data, outgoing
        self._adopts_first = rule in ("keep", "rebase")
        self._late_takes: dict[int, int] = {}

    def act(self, inbox: Inbox, step: int) -> None:
        """Everything in `inbox`, at the boundary before `step`."""
        for span in inbox.grants:
            self.books.granted(span, step)
            self._data.grant(span)
        if inbox.others_tokens != self.others_tokens:
            self.others_tokens = inbox.others_tokens
            self.books.progress(self.others_tokens, step)
        if inbox.term:
            self._begin_term(step)
        # A refusal known before an adoption resets the base that it goes by.
        for verdict in inbox.verdicts:
            self._settle(verdict, step)
        takes = {**self._late_takes, **inbox.takes}
        self._late_takes = {}
        if self._adopts_first:
            self._adopt(inbox.arrivals, step)
            self._take(takes, step)
        else:
            self._take(takes, step)
            self._adopt(inbox.arrivals, step)

    def _begin_term(self, step: int) -> None:
        self._late_takes = {}
        for take in self.books.new_term(step):
            self._outgoing.forget(take.fragment, take.tick)
            self._arrays.drop(take.fragment)

    def _take(self, takes: dict[int, int], step: int) -> None:
        for fragment, tick in takes.items():
            if self.books.must_wait(fragment):
                self._late_takes[fragment] = tick
            elif self.books.take(fragment, tick, step) is not None:
                self._outgoing.put(fragment, tick, self._arrays.take(fragment))

    def _adopt(self, arrivals: tuple[Arrival, ...], step: int) -> None:
        for arrival in arrivals:
            adoption = self.books.adopt(arrival.fragment, arrival.version, step)
            if adoption != "none":
                self._arrays.adopt(arrival, keep=adoption == "kept")

    def _settle(self, verdict: TakeVerdict, step: int) -> None:
        fragment, tick = verdict.fragment, verdict.tick
        outcome = self.books.settle(
            fragment, tick, verdict.verdict, verdict.reason, step, verdict.version
        )
        if outcome == "none":
            return
        self._outgoing.forget(fragment, tick)
        if outcome == "settled":
            self._arrays.settle(fragment)
            return
        # A take without steps is no news: its island was asked twice within a step.
        logger.log(
            logging.DEBUG if verdict.reason == "empty" else logging.WARNING,
            "take of fragment %d at tick %d was refused (%s): its steps are %s",
            fragment,
            tick,
            verdict.reason,
            "open again" if outcome == "reopened" else "lost",
        )
        if outcome == "reopened":
            self._arrays.reopen(fragment)
        elif outcome == "dropped":
            self._arrays.drop(fragment)
        else:
            self._arrays.reset(fragment)
