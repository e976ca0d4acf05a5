"""One member of a ring that sums vectors of all members (all-reduce), over TCP.

Rabenseifner's two passes: each member sends (N - 1) / N of the vector to its right
neighbour to be summed, and as much of the sums. Values travel as bf16 or f32 and are
added in f32. It is what data-parallel training waits for at every step, and synchronous
DiLoCo at every outer step.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

PORT = 7400
PATIENCE_S = 600.0
Vector = npt.NDArray[Any]


class Ring:
    """A member's two connections. All members call the same methods in turn."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        self.rank, self.size = rank, len(addresses)
        listener = socket.create_server((addresses[rank], PORT))
        listener.settimeout(PATIENCE_S)
        right = addresses[(rank + 1) % self.size]
        self._right = _dial(right)
        self._left, _ = listener.accept()
        for one in (self._right, self._left):
            one.settimeout(PATIENCE_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def all_reduce(self, vector: Vector, dtype: Any) -> Vector:
        """Return the sum of all members' vectors (f32 [n]), sent as `dtype`."""
        parts = np.array_split(vector.astype(np.float32), self.size)
        for turn in range(self.size - 1):
            there = (self.rank - turn) % self.size
            here = (self.rank - turn - 1) % self.size
            parts[here] += self._exchange(parts[there].astype(dtype), len(parts[here]))
        mine = (self.rank + 1) % self.size
        parts[mine] = parts[mine].astype(dtype).astype(np.float32)
        for turn in range(self.size - 1):
            there = (self.rank - turn + 1) % self.size
            here = (self.rank - turn) % self.size
            parts[here] = self._exchange(parts[there].astype(dtype), len(parts[here]))
        return np.concatenate(parts)

    def _exchange(self, sent: Vector, length: int) -> Vector:
        """Send to the right while as many values as asked for come from the left;
        return those as f32."""
        got = np.empty(length, sent.dtype)
        sender = threading.Thread(
            target=self._right.sendall, args=(sent.view(np.uint8).data,)
        )
        sender.start()
        view, filled = got.view(np.uint8).data, 0
        while filled < len(view):
            count = self._left.recv_into(view[filled:])
            if not count:
                raise ConnectionError("the left neighbour has ended")
            filled += count
        sender.join()
        return got.astype(np.float32)


def _dial(address: str) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, PORT), PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def member(
    rank: int, parameters: int, addresses: list[str], step_s: float, rounds: int
) -> dict[str, list[float]]:
    """Be a member of a ring. Return seconds by kind: `bf16`, steps of `step_s`
    with a sum in bf16 after each; `f32`, one sum in f32.

    Args:
      rank: place of this member in the ring.
      parameters: values of the vector.
      addresses: one for each member.
    """
    ring = Ring(rank, addresses)
    vector = np.random.default_rng(rank).standard_normal(parameters, np.float32)
    ring.all_reduce(vector[:1024], np.float32)  # All have begun.
    found: dict[str, list[float]] = {"bf16": [], "f32": []}
    for _ in range(rounds):
        began = time.monotonic()
        time.sleep(step_s)
        ring.all_reduce(vector, ml_dtypes.bfloat16)
        found["bf16"].append(time.monotonic() - began)
    began = time.monotonic()
    ring.all_reduce(vector, np.float32)
    found["f32"].append(time.monotonic() - began)
    return found
