"""Dial the address that islands are given, from where it is served.

Islands wait long for a coordinator that may still come. So a wrong interface, a port
that is not forwarded, or the address of another run is said here, at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from diloco_jax.config import ConfigError, Placement
from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.wire.addresses import bulk_address
from diloco_jax.wire.client import Client
from diloco_jax.wire.dialing import Connections
from diloco_jax.wire.errors import WireError
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def dialled(
    placement: Placement, run_id: str, tls: TlsFiles | None, bound: str
) -> Iterator[None]:
    """Dial `placement.advertise` beside the block, if it is set, and log whether this
    run answers there. bound: HOST:PORT that is served."""
    ending = threading.Event()
    thread = threading.Thread(
        target=_judge,
        args=(placement, run_id, tls, bound, ending),
        name="own-address",
        daemon=True,
    )
    if placement.advertise:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        if placement.advertise:
            thread.join(placement.deadlines.connect_s)


def _judge(
    placement: Placement,
    run_id: str,
    tls: TlsFiles | None,
    bound: str,
    ending: threading.Event,
) -> None:
    """Try for `pin_s`: a name or what forwards the ports may come a little later."""
    deadlines, address = placement.deadlines, placement.advertise
    until, pauses = time.monotonic() + deadlines.pin_s, Backoff(deadlines)
    while not ending.is_set():
        trouble = obstacle(address, run_id, tls, deadlines, insecure=placement.insecure)
        if not trouble:
            logger.info("this run answers at %s, as islands dial it", address)
            return
        if time.monotonic() >= until:
            logger.warning(
                "this coordinator is bound to %s, and does not reach itself at %s, "
                "placement.advertise, which islands dial: %s. Unless islands are at "
                "another side of a network that forwards it to them alone, correct "
                "placement.advertise, or forward it and the next port to %s and the "
                "next",
                bound,
                address,
                trouble,
                bound,
            )
            return
        ending.wait(pauses.next_s())


def obstacle(
    address: str,
    run_id: str,
    tls: TlsFiles | None,
    deadlines: Deadlines,
    *,
    insecure: bool,
) -> str:
    """Return why an island that dials this address would not come to the run; empty if
    it would."""
    try:
        client = Client(
            address, tls=tls, deadlines=deadlines, bulk_channels=1, insecure=insecure
        )
        with contextlib.closing(client):
            found = client.status(deadlines.connect_s).get("run_id")
        if found != run_id:
            return f"run {found!r} answers there, and this one is {run_id!r}"
        bulk = Connections(bulk_address(address), tls, deadlines, 1)
        bulk.take().close()
    except (WireError, ConfigError) as error:
        return str(error)
    return ""
