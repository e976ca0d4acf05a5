"""A link between one island and the coordinator that can be cut, slowed, delayed and
made to corrupt bulk.

Control and bulk pass through it. A cut link keeps its connections and holds their
bytes, as a network does that drops packets; nothing needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time

from diloco_jax.wire import addresses

PIECE_BYTES = 1 << 16
IN_FLIGHT = 64
"""Pieces of one connection and direction that the link holds at most."""
LEAST_CORRUPT_BYTES = 1 << 12
"""Smallest piece that is corrupted: payload, while messages are shorter. They have no
checksum of their own on a link without TLS, and are left alone."""
DIAL_S = 5.0


class Direction:
    """One direction of a link: whether bytes pass, how fast and how late."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._open, self._bytes_per_s, self._delay_s = True, math.inf, 0.0
        self._corrupt = False
        self._free_at = [0.0, 0.0]
        """Monotonic times from which control and bulk have the link."""

    def set(
        self, *, opened: bool, bytes_per_s: float, delay_s: float, corrupt: bool
    ) -> None:
        """Change it, for all bytes that have not passed yet."""
        self._open, self._bytes_per_s, self._delay_s = opened, bytes_per_s, delay_s
        self._corrupt, self._free_at = corrupt, [0.0, 0.0]
        self._changed.set()
        self._changed = asyncio.Event()

    async def carry(self, came: float, octets: bytes, is_bulk: bool) -> bytes:
        """Return what arrives of bytes that came at this time, once they are through.

        If the direction changes meanwhile, they are due anew. Control does not wait
        behind bulk: queues of a network are fair.
        """
        while True:
            changed, left_s = self._changed, None
            if self._open:
                begins = max(self._free_at[is_bulk], came)
                self._free_at[is_bulk] = begins + len(octets) / self._bytes_per_s
                left_s = self._free_at[is_bulk] + self._delay_s - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                break
            came = time.monotonic()
        if self._corrupt and is_bulk and len(octets) >= LEAST_CORRUPT_BYTES:
            return octets[:-1] + bytes([octets[-1] ^ 1])
        return octets


class Relay:
    """Forwards what comes to `address` to the coordinator, and the bulk port too."""

    def __init__(
        self, to: str, bytes_per_s: float = math.inf, delay_s: float = 0.0
    ) -> None:
        """bytes_per_s, delay_s: of the whole link in each direction."""
        self._up, self._down = Direction(), Direction()
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self.address, bulk = addresses.reserve("127.0.0.1:0")
        self._ports = (
            (addresses.listen(self.address), to, False),
            (bulk, addresses.bulk_address(to), True),
        )
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.set()

    def set(
        self,
        *,
        up: bool = True,
        down: bool = True,
        bytes_per_s: float = math.inf,
        delay_s: float = 0.0,
        corrupt: bool = False,
    ) -> None:
        """Change the link; without arguments it is whole again."""
        rate = min(bytes_per_s, self._bytes_per_s)
        for way, opened in ((self._up, up), (self._down, down)):
            change = functools.partial(
                way.set,
                opened=opened,
                bytes_per_s=rate,
                delay_s=max(delay_s, self._delay_s),
                corrupt=corrupt,
            )
            self._loop.call_soon_threadsafe(change)

    def close(self) -> None:
        """End all connections, and accept no more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Serve both ports until `close`; then the runner cancels what goes on."""
        async with contextlib.AsyncExitStack() as servers:
            for listener, to, is_bulk in self._ports:
                dialled = addresses.parse_address(to)
                join = functools.partial(self._join, dialled, is_bulk)
                server = await asyncio.start_server(join, sock=listener)
                servers.callback(server.close)
            await self._closed.wait()

    async def _join(
        self,
        to: tuple[str, int],
        is_bulk: bool,
        near: asyncio.StreamReader,
        to_near: asyncio.StreamWriter,
    ) -> None:
        """Carry one connection until both directions have ended, or one is broken."""
        ends = [to_near]
        try:
            async with asyncio.timeout(DIAL_S):
                far, to_far = await asyncio.open_connection(*to)
            ends.append(to_far)
            async with asyncio.TaskGroup() as tasks:
                for source, sink, way in (
                    (near, to_far, self._up),
                    (far, to_near, self._down),
                ):
                    line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
                    tasks.create_task(_read(source, line))
                    tasks.create_task(_write(line, sink, way, is_bulk))
        except* OSError:
            pass
        finally:
            for end in ends:
                # What is left is for nobody if the link was closed.
                end.transport.abort() if self._closed.is_set() else end.close()


async def _read(
    source: asyncio.StreamReader, line: asyncio.Queue[tuple[float, bytes]]
) -> None:
    octets = b"?"
    while octets:
        octets = await source.read(PIECE_BYTES)
        await line.put((time.monotonic(), octets))


async def _write(
    line: asyncio.Queue[tuple[float, bytes]],
    sink: asyncio.StreamWriter,
    way: Direction,
    is_bulk: bool,
) -> None:
    octets = b"?"
    while octets:
        came, octets = await line.get()
        sink.write(await way.carry(came, octets, is_bulk))
        await sink.drain()
    sink.write_eof()
