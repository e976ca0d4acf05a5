"""Processes beside the coordinator of `hostile_door.py`: the honest islands, attackers
with the key of island a, and one that burns as much CPU."""

from __future__ import annotations

import collections
import contextlib
import json
import random
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace
from synthetic import Deltas, SyntheticIsland, train

from diloco_jax import config as settings
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import Hello, Welcome
from diloco_jax.wire import addresses, bulk, peers
from diloco_jax.wire.bulk import BulkConnection
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import LocalProtocolError, Refused, WireError
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.wire.transfers import Transfers
from diloco_jax.workdir import read_config

ATTACKER = "a"
DIALS_PER_S, HELD, THREADS, REPLY_S = 110, 1000, 64, 0.05
STEP_S, CLAIMED_S = 0.1, 9e8
DIAL_S, TELL_S = 120.0, 5.0


def be_process(how: str, workdir: str, address: str, *words: str) -> int:
    """Be the honest islands, an attacker, or one that burns CPU."""
    config = read_config(Path(workdir))
    if how == "islands":
        return be_islands(config, address, words[0].split(","), Path(words[1]))
    if how == "fetches":
        flood(config, address)
        return 0
    if how in ("lookahead", "slow"):
        claim(config, address, how)
        return 0
    ends = time.monotonic() + float(words[1])
    if how == "burn":
        burn(float(words[0]), ends)
    else:
        attack(config, address, how, random.Random(words[0]), ends)
    return 0


def be_islands(
    config: settings.Config, address: str, names: list[str], said: Path
) -> int:
    """Be islands, and write how long each of their fetches takes."""
    fetch, lines = Transfers.fetch, said.open("a", buffering=1)

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return fetch(*arguments, **named)
        finally:
            lines.write(json.dumps((time.time(), time.monotonic() - began)) + "\n")

    with mock.patch.object(Transfers, "fetch", timed):
        islands = [made(SyntheticIsland, config, address, name) for name in names]
        return int(train(islands, STEP_S)["exit_code"])


def made(
    kind: type[SyntheticIsland], config: settings.Config, address: str, name: str
) -> Any:
    """Return an island of this kind."""
    plan = build_plan(config.run, build(config.run))
    return kind(config, name, address, plan, Deltas(config, plan))


def burn(cores: float, ends: float) -> None:
    """Take this share of a core."""
    while (now := time.monotonic()) < ends:
        while time.monotonic() < now + min(cores, 1.0) / 50:
            pass
        time.sleep(max(0.0, now + 0.02 - time.monotonic()))


def stolen(config: settings.Config) -> TlsFiles:
    """Return the key of island a."""
    folder = Path(config.placement.certificates)
    return TlsFiles.load(folder, peers.island(ATTACKER))


def attack(
    config: settings.Config, address: str, how: str, rng: random.Random, ends: float
) -> None:
    """Dial the bulk port with the key of island a, and say how often it was let in."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    target = addresses.parse_address(addresses.bulk_address(address))
    context, said = stolen(config).client_context(), collections.Counter[str]()
    held: collections.deque[socket.socket] = collections.deque(maxlen=HELD)
    due = told = time.monotonic()
    while (now := time.monotonic()) < ends:
        try:
            plain = socket.create_connection(target, DIAL_S)
            connection = context.wrap_socket(plain, server_hostname=target[0])
            said["shaken hands"] += 1
            if how == "garbage":
                with connection:
                    garble(connection, rng)
            else:
                held.append(connection)  # The oldest one is closed as it leaves.
                connection.sendall(b"D" if how == "one byte" else b"DLM")
        except (OSError, WireError) as error:
            said[type(error).__name__] += 1
        if now > told + TELL_S:
            told = now
            print(dict(said), flush=True)
        due = max(due + 1 / DIALS_PER_S, now - 1)
        time.sleep(max(0.0, due - time.monotonic()))


def garble(connection: socket.socket, rng: random.Random) -> None:
    """Send what is no request, and hear what the coordinator says to that."""
    raw = rng.randbytes(rng.randrange(64, 2000))
    if rng.random() < 0.5:  # A message as it should be, around nonsense.
        raw = bulk.message_header(len(raw)) + raw
    connection.sendall(raw)
    connection.settimeout(REPLY_S)
    BulkConnection(connection, "coordinator").receive(bulk.bulk_reply)


def flood(config: settings.Config, address: str) -> None:
    """Be island a, and fetch again and again what it has fetched last."""
    waits = config.placement.deadlines
    client = Client(address, tls=stolen(config), deadlines=waits, bulk_channels=THREADS)
    fetch, last = Transfers.fetch, list[bulk.FetchRequest]()
    begun = threading.Event()

    def watched(transfers: Any, request: bulk.FetchRequest, **named: Any) -> Any:
        last[:] = [request]
        begun.set()
        return fetch(transfers, request, **named)

    def again() -> None:
        begun.wait()
        while True:
            whole = replace(last[0], have=None)
            with contextlib.suppress(WireError):
                fetch(client.transfers, whole, max_bytes=1 << 30, within_s=0.01)

    with mock.patch.object(Transfers, "fetch", watched):
        for _ in range(THREADS):
            threading.Thread(target=again, daemon=True).start()
        train([made(SyntheticIsland, config, address, ATTACKER)], STEP_S)


class Claiming(SyntheticIsland):
    """Island a, which says what makes others wait for it."""

    lookahead, claimed_s = 0, STEP_S

    def find_lookahead(self) -> None:
        """Find the largest lookahead with which it is let in."""
        for self.lookahead in (2**16, 2):
            with contextlib.suppress(Refused, LocalProtocolError):
                if isinstance(self._link._open(), Welcome):
                    break
        print("says a lookahead of", self.lookahead, flush=True)

    def _hello(self, status: Status) -> Hello:
        said = super()._hello(status)
        return replace(said, lookahead=self.lookahead, step_seconds=self.claimed_s)

    def _post(self) -> None:
        self._step_s = self.claimed_s
        super()._post()


def claim(config: settings.Config, address: str, how: str) -> None:
    """Be island a, which makes others wait by its lookahead, or by its steps."""
    island = made(Claiming, config, address, ATTACKER)
    if how == "slow":
        island.lookahead, island.claimed_s = 2, CLAIMED_S
    else:
        island.find_lookahead()
    try:
        print(train([island], STEP_S), flush=True)
    except Refused as refused:
        print(refused.code, refused.message, flush=True)
