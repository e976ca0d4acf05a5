"""A run with two workers on other machines, and the lead's side of the first one."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.coordinator.workers.outpost.dialing import Elsewhere
from diloco_jax.coordinator.workers.outpost.outpost import Outpost
from diloco_jax.protocol.holding import BeginWorker, Committed, RestoreFragments
from diloco_jax.protocol.values import Version
from diloco_jax.wire.certificates import make_certificates

NEW = Version(1, 5)


def make_keys(folder: Path) -> Path:
    """The certificates of such a run."""
    make_certificates(folder, [], 1, islands=["a"], workers=2)
    return folder


def two_outposts(certificates: Path) -> Config:
    """Its config."""
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    placement = Placement(
        workers=2,
        worker_addresses=addresses,
        certificates=str(certificates),
        outage_budget_s=1.0,
    )
    return Config(islands={"a": IslandConfig()}, placement=placement).validate()


def begin(workdir, **fields) -> BeginWorker:
    defaults = {
        "config": {},
        "workdir": str(workdir),
        "run_id": "r",
        "worker": 0,
        "fragments": (0, 2),
        "bind": "",
        "ticket_key": b"",
        "lead": 7,
    }
    return BeginWorker(**(defaults | fields))


def elsewhere(config, workdir, **fields) -> Elsewhere:
    return Elsewhere(begin(workdir, **fields), config, threading.Event())


def placed(config, **changes) -> Config:
    placement = dataclasses.replace(config.placement, **changes)
    return dataclasses.replace(config, placement=placement)


def asked(*fragments: int) -> RestoreFragments:
    return RestoreFragments(
        fragments=tuple(
            Committed(fragment=f, version=NEW, digests={}) for f in fragments
        )
    )


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Callable[..., Outpost]]:
    """Give a function that starts the outpost of a worker, and returns it."""
    with contextlib.ExitStack() as stack:

        def start(config: Config, index: int = 0, name: str = "there") -> Outpost:
            bind = config.placement.worker_addresses[index]
            made = Outpost(config, index, folder / name, bind)
            stack.callback(made.close)
            threading.Thread(target=made.serve, daemon=True).start()
            return made

        yield start
