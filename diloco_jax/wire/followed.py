"""The primary's end of a standby's stream. gRPC's thread sends; another one reads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import follow
from diloco_jax.wire.encoding import decoded
from diloco_jax.wire.errors import ConnectionLost, RemoteProtocolError, WireError
from diloco_jax.wire.threads import IdleWatch

logger = logging.getLogger(__name__)


class SentStream(Protocol):
    """Stream of messages to one standby."""

    error: WireError | None
    """The error with which the stream ends, if it ends with one."""

    def messages(self) -> Iterator[bytes]:
        """Yield encoded messages until the end."""

    def end(self, error: WireError | None = None) -> None:
        """End it, from any thread."""


class Followable(Protocol):
    """A primary that standbys may follow. Many threads call the methods at once."""

    def followed(
        self, request: follow.FollowRequest
    ) -> contextlib.AbstractContextManager[SentStream]:
        """Let a standby follow for the length of the block. May raise Refused or
        Busy."""

    def answered(self, outgoing: Any, number: int) -> None:
        """Take the answer of the standby that has this stream."""


def serve_standby(
    primary: Followable,
    requests: Iterator[bytes],
    context: Any,
    watch: IdleWatch,
    deadlines: Deadlines,
) -> Iterator[bytes]:
    """Yield what a standby is sent, until either end has had enough."""
    peer = context.peer()
    with watch.guard(deadlines.connect_s, context.cancel):
        raw = next(requests, None)
    if raw is None:
        raise ConnectionLost(f"{peer} opened a standby's stream and said nothing")
    request = _decoded(raw, peer)
    if not isinstance(request, follow.FollowRequest):
        raise RemoteProtocolError(
            f"first message from {peer} is {type(request).__name__}, expected "
            f"FollowRequest"
        )
    with primary.followed(request) as outgoing:
        if not context.add_callback(outgoing.end):
            return
        threading.Thread(
            target=_read,
            args=(primary, outgoing, requests, peer),
            name="diloco-standby",
            daemon=True,
        ).start()
        for message in outgoing.messages():
            with watch.guard(deadlines.idle_s, context.cancel):
                yield message
        if outgoing.error is not None:
            raise outgoing.error


def _read(
    primary: Followable, outgoing: SentStream, requests: Iterator[bytes], peer: str
) -> None:
    error: WireError | None = None
    try:
        for raw in requests:
            answer = _decoded(raw, peer)
            if not isinstance(answer, follow.Answered):
                raise RemoteProtocolError(f"{peer} asks to follow a second time")
            primary.answered(outgoing, answer.number)
    except grpc.RpcError:
        logger.info("the standby's stream from %s broke off", peer)
    except WireError as failure:
        logger.warning("%s", failure)
        error = failure
    finally:
        outgoing.end(error)


def _decoded(raw: bytes, peer: str) -> follow.FromStandby:
    message: follow.FromStandby = decoded(follow.from_standby, raw, peer)
    return message
