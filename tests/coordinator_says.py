"""Short forms of what a coordinator says, to a `Mailbox` or a `Conversation`."""

from __future__ import annotations

from typing import Any

from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Span, Version

MERGED = Version(1, 1)


def take(told: Any, fragment: int, tick: int, after: int = 0) -> None:
    told.receive(messages.TakeRequest(fragment=fragment, tick=tick, after=after))


def verdict(
    fragment: int = 0,
    tick: int = 1,
    verdict: str = "merged",
    reason: str = "",
    version: Version = MERGED,
) -> messages.TakeVerdict:
    return messages.TakeVerdict(
        fragment=fragment, tick=tick, verdict=verdict, reason=reason, version=version
    )


def judge(told: Any, *facts: Any) -> None:
    told.receive(verdict(*facts))


def grant(told: Any, span: Span, offset: int = 0) -> None:
    told.receive(messages.Granted(span=span, offset=offset))


def progress(
    told: Any,
    others_tokens: int = 0,
    *,
    own_tokens: int = 0,
    records_through: int = 0,
    next_position: int = 0,
) -> None:
    told.receive(
        messages.Progress(
            tokens=others_tokens + own_tokens,
            own_tokens=own_tokens,
            records_through=records_through,
            next_position=next_position,
        )
    )


def welcome(told: Any, term: int = 1, versions: tuple[Version, ...] = ()) -> Any:
    return told.receive(
        messages.Welcome(
            run_id="r",
            term=term,
            resumed=False,
            versions=versions,
            anew=(0, 1) if term > 1 else (),
        )
    )


def anchor(told: Any, fragment: int) -> None:
    told.receive(messages.AnchorRequest(fragment=fragment))


def stop(told: Any) -> None:
    told.receive(messages.Stop())


def finished(told: Any) -> None:
    told.receive(messages.Finished())


def may_leave(told: Any) -> None:
    told.receive(messages.MayLeave())
