"""Network namespaces of a benchmark, each behind a link of its own (Linux, root).

A namespace for the coordinator holds a bridge. Each island's namespace is joined to it
by a pair of virtual interfaces, whose ends both let through a given rate: a token
bucket for either direction.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

HUB_ADDRESS = "10.77.0.1"
BURST_BYTES = 4096
"""Least bytes that a token bucket lets through at once; two frames of Ethernet."""
BURST_S = 0.01
QUEUE_S = 0.05
"""Seconds that a packet waits in a link's queue at most. Acknowledgements wait there
too, behind what the other direction sends."""


class NoLinksError(Exception):
    """Namespaces cannot be made here."""


class Links:
    """Namespaces by name, as `links` makes them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._prefix = f"wan{os.getpid()}"

    def within(self, name: str) -> list[str]:
        """Return the begin of a command line that runs the rest in a namespace. name:
        an island's, or "coordinator"."""
        return ["ip", "netns", "exec", self._space(name)]

    def address(self, name: str) -> str:
        """Return the IP address of an island."""
        return f"10.77.0.{self._names.index(name) + 2}"

    def limit(self, bits_per_s: float | None) -> None:
        """Let all links carry that many bits a second in either direction; None: as
        many as the machine can."""
        for name in self._names:
            for space, device in ((name, "wan"), ("coordinator", self._device(name))):
                # None was set before the first limit.
                with contextlib.suppress(subprocess.CalledProcessError):
                    self._tc(space, "del", device)
                if bits_per_s is not None:
                    burst = max(BURST_BYTES, int(bits_per_s / 8 * BURST_S))
                    shape = ["tbf", "rate", f"{int(bits_per_s)}bit"]
                    shape += ["burst", str(burst), "latency", f"{QUEUE_S:g}s"]
                    self._tc(space, "add", device, *shape)

    def make(self) -> None:
        """Make everything, without limits."""
        hub = self._space("coordinator")
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "name", "hub", "type", "bridge")
        _ip("-n", hub, "address", "add", f"{HUB_ADDRESS}/24", "dev", "hub")
        _ip("-n", hub, "link", "set", "hub", "up")
        for name in self._names:
            space, device = self._space(name), self._device(name)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            pair = ["type", "veth", "peer", "name", device, "netns", hub]
            _ip("-n", space, "link", "add", "name", "wan", *pair)
            _ip("-n", hub, "link", "set", device, "master", "hub", "up")
            address = f"{self.address(name)}/24"
            _ip("-n", space, "address", "add", address, "dev", "wan")
            _ip("-n", space, "link", "set", "wan", "up")

    def remove(self) -> None:
        """Remove what there is of it."""
        for name in (*self._names, "coordinator"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self._space(name))

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _device(self, name: str) -> str:
        return f"link{self._names.index(name)}"

    def _tc(self, space: str, verb: str, device: str, *shape: str) -> None:
        command = ["tc", "qdisc", verb, "dev", device, "root", *shape]
        _run([*self.within(space), *command])


@contextlib.contextmanager
def links(names: Sequence[str]) -> Iterator[Links]:
    """Namespaces for these islands, removed with the block; raises NoLinksError where
    they cannot be made."""
    made = Links(names)
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", None) or error
            raise NoLinksError(
                f"no network namespaces ({told}): they need Linux, root and iproute2"
            ) from error
        yield made
    finally:
        made.remove()


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
