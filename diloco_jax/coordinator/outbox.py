"""Effects that are messages to one island, as the wire's messages."""

from __future__ import annotations

from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.events import (
    AskResend,
    AskTake,
    Grant,
    LetGo,
    Progress,
    Publish,
    StopStepping,
    TellVerdict,
)

Tell = AskTake | AskResend | TellVerdict | Grant | Progress | StopStepping | LetGo


def message(effect: Tell) -> messages.FromCoordinator:
    """What its island is told."""
    match effect:
        case AskTake(fragment=fragment, tick=tick, after=after):
            return messages.TakeRequest(fragment=fragment, tick=tick, after=after)
        case AskResend(fragment=fragment, tick=tick):
            return messages.ResendRequest(fragment=fragment, tick=tick)
        case TellVerdict():
            return messages.TakeVerdict(
                fragment=effect.fragment,
                tick=effect.tick,
                verdict=effect.verdict,
                reason=effect.reason,
                version=effect.version,
            )
        case Grant(span=span, offset=offset):
            return messages.Granted(span=span, offset=offset)
        case Progress():
            return messages.Progress(
                tokens=effect.tokens,
                own_tokens=effect.own_tokens,
                records_through=effect.records_through,
                next_position=effect.next_position,
            )
        case StopStepping():
            return messages.Stop()
        case LetGo():
            return messages.MayLeave()


def published(effect: Publish, island: str) -> messages.Published:
    """What one island is told of a new version, its verdict included."""
    tick, verdict, reason = effect.verdicts.get(island, (-1, "none", ""))
    return messages.Published(
        fragment=effect.fragment,
        version=effect.version,
        tick=tick,
        verdict=verdict,
        reason=reason,
    )
