"""An island's decision at one step boundary: one value without arrays.

Host 0 makes it from the messages it received. The other hosts, the tape's replay and
the simulator act on the same value. Arrays wait in the shell, by fragment and version.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import msgspec

from diloco_jax.protocol.messages import TakeRequest, TakeVerdict
from diloco_jax.protocol.reasons import EndReason
from diloco_jax.protocol.values import Span, Version


class Ending(NamedTuple):
    """Reason for the loop to end now: `text` for people, `reason` for the books."""

    exit_code: int
    text: str
    reason: EndReason = "failed"


class Adoption(NamedTuple):
    """A version that all hosts of the island have."""

    fragment: int
    version: Version


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything to act upon at one boundary."""

    takes: tuple[TakeRequest, ...] = ()
    """The newest take request for each fragment, with its own `after`."""
    adoptions: tuple[Adoption, ...] = ()
    verdicts: tuple[TakeVerdict, ...] = ()
    grants: tuple[Span, ...] = ()
    anchors: tuple[int, ...] = ()
    """Fragments whose anchors are to be sent."""
    term: int = 0
    """The new term, which begins new books; 0: no term began."""
    others_tokens: int = 0
    """Tokens of the other islands, and of this one's earlier incarnations."""
    heard: int = 0
    """Number of the coordinator's answers so far."""
    again: bool = False
    """Decide once more before the next step."""
    save: bool = False
    """Write a checkpoint of the state after this boundary."""
    stop: bool = False
    """The run has its tokens, or the island is about to leave: no more steps."""
    leaving: bool = False
    """The island is about to leave: write a checkpoint, and answer takes only."""
    finished: bool = False
    """The run is over."""
    ending: Ending | None = None
    """The loop must end."""

    def is_news(self, now: Decision) -> bool:
        """Tell whether it changes anything for an island that acted on `now` last."""
        return bool(
            self.takes
            or self.adoptions
            or self.verdicts
            or self.grants
            or self.anchors
            or self.term
            or (self.stop, self.leaving, self.finished, self.ending)
            != (now.stop, now.leaving, now.finished, now.ending)
        )


class Ahead:
    """Decisions that take effect `lead` boundaries later, when all hosts of the island
    have them."""

    def __init__(self, lead: int) -> None:
        self._decided = collections.deque([Decision()] * lead)
        self._now = Decision()

    def next(self, fresh: Decision) -> Decision:
        """Return the decision for this boundary, at which `fresh` is made."""
        self._decided.append(fresh)
        self._now = self._decided.popleft()
        return self._now

    @property
    def pending(self) -> bool:
        """True while a decision that changes anything is still to take effect."""
        return any(decision.is_news(self._now) for decision in self._decided)
