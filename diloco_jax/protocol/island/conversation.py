"""What the coordinator says, put where it belongs: mailbox and bulk work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.messages import (
    AnchorRequest,
    Finished,
    FromCoordinator,
    Granted,
    MayLeave,
    Progress,
    Published,
    ResendRequest,
    Stop,
    TakeRequest,
    TakeVerdict,
)
from diloco_jax.protocol.values import Span, Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """Where bulk work goes: methods of the receiver and the sender."""

    want: Callable[[int, Version], None]
    resend: Callable[[int, int], None]


class Inbound:
    """Dispatches the messages to one incarnation; on one thread at a time."""

    def __init__(self, mailbox: Mailbox, targets: Targets) -> None:
        self.granted = 0
        """Sequences granted so far."""
        self._mailbox, self._targets = mailbox, targets

    def dispatch(self, message: FromCoordinator) -> None:
        """One message, in the order received."""
        mailbox = self._mailbox
        match message:
            case TakeRequest():
                mailbox.request_take(message.fragment, message.tick, message.after)
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
                self._grant(message.offset, message.span)
            case Progress():
                others = message.tokens - message.own_tokens
                mailbox.progress(others, message.records_through)
                mailbox.heard(message.tokens, message.next_position)
            case AnchorRequest():
                mailbox.request_anchor(message.fragment)
            case Stop():
                mailbox.stop()
            case MayLeave():
                mailbox.let_go()
            case Finished():
                mailbox.finish()

    def _grant(self, offset: int, span: Span) -> None:
        """What is known already is skipped: a grant may be repeated.

        Raises ValueError if grants before this one are missing.
        """
        if offset > self.granted:
            raise ValueError(
                f"data was granted from sequence {offset} on, but only "
                f"{self.granted} are here; a grant is missing, ask again from "
                f"{self.granted}"
            )
        fresh = Span(span.start + self.granted - offset, span.stop)
        if fresh.start < fresh.stop:
            self.granted += fresh.stop - fresh.start
            self._mailbox.grant(fresh)
