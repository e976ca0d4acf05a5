"""What the coordinator says, put where it belongs: mailbox, data, bulk work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from diloco_jax.island.mailbox import Mailbox
from diloco_jax.policy.events import Span, Version
from diloco_jax.wire.messages import (
    Finished,
    FromCoordinator,
    Granted,
    Progress,
    Published,
    ResendRequest,
    Stop,
    TakeRequest,
    TakeVerdict,
)


class Data(Protocol):
    """What is needed of `data.stream.LeasedStream` or `data.positions`."""

    @property
    def granted(self) -> int:
        """Sequences granted so far."""

    def grant(self, offset: int, span: Span) -> None:
        """Adds positions; ignores those that it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """Where bulk work goes: methods of the receiver and the sender."""

    want: Callable[[int, Version], None]
    resend: Callable[[int, int], None]


class Inbound:
    """Dispatches the messages to one incarnation; on one thread at a time."""

    def __init__(self, mailbox: Mailbox, data: Data, targets: Targets) -> None:
        self._mailbox, self._data, self._targets = mailbox, data, targets
        self._own_tokens_before: int | None = None

    def dispatch(self, message: FromCoordinator) -> None:
        """One message, in the order received."""
        mailbox = self._mailbox
        match message:
            case TakeRequest():
                mailbox.request_take(message.fragment, message.tick)
            case ResendRequest():
                self._targets.resend(message.fragment, message.tick)
            case Published():
                # The verdict first: a refusal resets the base before the adoption.
                if message.verdict != "none":
                    mailbox.judge(
                        TakeVerdict(
                            fragment=message.fragment,
                            tick=message.tick,
                            verdict=message.verdict,
                            reason=message.reason,
                            version=message.version,
                        )
                    )
                self._targets.want(message.fragment, message.version)
            case TakeVerdict():
                mailbox.judge(message)
                self._targets.want(message.fragment, message.version)
            case Granted():
                before = self._data.granted
                self._data.grant(message.offset, message.span)
                if self._data.granted > before:
                    mailbox.grant(message.span)
            case Progress():
                # The first one answers a report without steps: it counts the tokens
                # of this island's earlier incarnations, which are others' from here.
                if self._own_tokens_before is None:
                    self._own_tokens_before = message.own_tokens
                own = message.own_tokens - self._own_tokens_before
                mailbox.progress(message.tokens - own, message.records_through)
            case Stop():
                mailbox.stop()
            case Finished():
                mailbox.finish()
