"""Device -> host -> wire: the thread that sends deltas.

A delta is kept until its verdict is final, so that it can be sent again when the
coordinator lost it. One per fragment at most, so a model's worth of encoded bytes is
the bound.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from diloco_jax.core.payload import Buffer, Part, PayloadLayout
from diloco_jax.deadlines import Deadlines
from diloco_jax.exit_codes import EXIT_FAILED
from diloco_jax.island.identity import Identity
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.placing import held
from diloco_jax.wire.errors import Refused, WireError
from diloco_jax.wire.messages import UploadStart

logger = logging.getLogger(__name__)


class Uploads(Protocol):
    """What the sender needs of a `wire.Client`."""

    def upload(self, start: UploadStart, payload: Any) -> int:
        """Sends a payload; returns the bytes on the wire."""
        ...


@dataclasses.dataclass
class _Parcel:
    fragment: int
    tick: int
    arrays: tuple[Any, ...]
    """Encoded pieces on the device, until they are packed."""
    part: Part = ()
    payload: Buffer | None = None
    due: bool = True


class Sender:
    """One thread. `put`, `resend` and `forget` never wait for it."""

    def __init__(
        self,
        client: Uploads,
        identity: Identity,
        layouts: Sequence[PayloadLayout],
        mailbox: Mailbox,
        deadlines: Deadlines,
    ) -> None:
        self._client = client
        self._identity = identity
        self._layouts = layouts
        self._mailbox = mailbox
        self._deadlines = deadlines
        self._parcels: dict[int, _Parcel] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, fragment: int, tick: int, encoded: tuple[Any, ...]) -> None:
        """Sends a delta: its encoded pieces, uint8[*grid, tile_bytes] each."""
        with self._changed:
            self._parcels[fragment] = _Parcel(fragment, tick, encoded)
            self._changed.notify_all()

    def resend(self, fragment: int, tick: int) -> None:
        """Sends the delta of this take once more, if it is still here."""
        with self._changed:
            parcel = self._parcels.get(fragment)
            if parcel is not None and parcel.tick == tick:
                parcel.due = True
                self._changed.notify_all()

    def forget(self, fragment: int, tick: int) -> None:
        """The verdict on this take is final."""
        with self._changed:
            parcel = self._parcels.get(fragment)
            if parcel is not None and parcel.tick == tick:
                del self._parcels[fragment]

    def close(self, timeout_s: float) -> None:
        """Ends the thread; what is being sent may go on until the process ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (parcel := self._next()) is not None:
                self._send(parcel)
        except Exception as error:
            logger.exception("the sender failed")
            self._mailbox.end(EXIT_FAILED, f"the sender failed: {error!r}")

    def _next(self) -> _Parcel | None:
        """The oldest delta to be sent; None when closing."""

        def due() -> list[_Parcel]:
            return [p for p in self._parcels.values() if p.due]

        with self._changed:
            while not self._closing:
                if parcels := due():
                    parcel = min(parcels, key=lambda p: p.tick)
                    parcel.due = False
                    return parcel
                self._changed.wait(self._deadlines.budget_s)
            return None

    def _send(self, parcel: _Parcel) -> None:
        if parcel.payload is None:
            # Waits for the device, which is why it is done here and not in the loop.
            self._pack(parcel)
        assert parcel.payload is not None
        if not parcel.payload:
            return  # Other hosts of the island hold all of it.
        start = UploadStart(
            **self._identity.fields(),
            fragment=parcel.fragment,
            tick=parcel.tick,
            offset=0,
            length=len(parcel.payload),
            total=len(parcel.payload),
            part=parcel.part,
        )
        pause_s = self._deadlines.retry_min_s
        while True:
            try:
                nbytes = self._client.upload(start, parcel.payload)
            except Refused as refused:
                # The verdict, or a request to send again, comes as a message.
                logger.warning(
                    "delta of fragment %d, tick %d refused (%s): %s",
                    parcel.fragment,
                    parcel.tick,
                    refused.code,
                    refused.message,
                )
                return
            except WireError as error:
                logger.debug("delta of tick %d not sent: %s", parcel.tick, error)
                if not self._pause(parcel, pause_s):
                    return
                pause_s = min(2 * pause_s, self._deadlines.retry_max_s)
            else:
                self._mailbox.count(bytes_up=nbytes)
                return

    def _pack(self, parcel: _Parcel) -> None:
        if all(array.is_fully_addressable for array in parcel.arrays):
            arrays = [np.asarray(array) for array in parcel.arrays]
            parcel.payload = self._layouts[parcel.fragment].pack(arrays)
        else:
            shards = held(parcel.arrays)
            parcel.part = tuple(box for box, _ in shards)
            parcel.payload = b"".join(np.asarray(data).tobytes() for _, data in shards)
        parcel.arrays = ()

    def _pause(self, parcel: _Parcel, pause_s: float) -> bool:
        """Whether the parcel is still wanted after a pause."""

        def unwanted() -> bool:
            return self._closing or self._parcels.get(parcel.fragment) is not parcel

        with self._changed:
            return not self._changed.wait_for(unwanted, pause_s)
