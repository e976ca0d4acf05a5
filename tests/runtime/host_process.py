"""One host of an island, watched: notes its parameters after every adoption, and at
the end its traffic.

CONFIG NAME COORDINATOR WORKDIR WORLD INDEX scripted|cut|ends|SEED. With a seed,
everything that this host does is late by random milliseconds, and host 1 compiles
longest. "cut" is scripted, and the mesh cuts every piece that it can, inside its tiles
too. "ends" is a seed: the island is to end before host 0 waits for host 1 to compile.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

SLOW_END_S = 5.0
"""In which jax aborts a process whose world has ended without it."""
PATIENCE_S = 240.0
"""Another island, or the other host, may be compiling."""


def main(
    config_path: str,
    name: str,
    coordinator: str,
    workdir: str,
    world: str,
    index: str,
    how: str,
) -> int:
    from diloco_jax.before_jax import prepare_island
    from diloco_jax.config.loading import read_config_json

    config = read_config_json(Path(config_path))
    prepare_island(config.island(name))
    from diloco_jax.island import main as island_main
    from diloco_jax.island.world import WorldAddress
    from diloco_jax.process import setup_logging

    setup_logging()
    note_adoptions(Path(workdir) / f"{name}.{index}.adopted")
    note_traffic(Path(workdir) / f"{name}.{index}.traffic")
    if how in ("scripted", "cut"):
        script(config, Path(workdir), name)
        if how == "cut":
            from diloco_jax.island.device import mesh

            mesh.LARGE = 0
    else:
        be_late(random.Random(f"{how}/{index}"))
        end_last(int(index))
        compile_last(Path(workdir) / name, int(index), ends=how == "ends")
    return island_main.run(
        config,
        name,
        coordinator,
        Path(workdir) / f"{name}.{index}",
        1,
        WorldAddress(address=world, index=int(index)),
    )


def note_adoptions(path: Path) -> None:
    """Appends fragment, version and a digest of the parameters that this host has."""
    import jax
    import numpy as np

    from diloco_jax.island.device.exchange import Replica

    adopt = Replica.adopt

    def noted(self, arrival, *, keep):
        adopt(self, arrival, keep=keep)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            shards = {str(s.index): s.data for s in leaf.addressable_shards}
            for shard in sorted(shards):
                digest.update(np.asarray(shards[shard]).tobytes())
        with path.open("a") as file:
            version = tuple(arrival.version)
            print(arrival.fragment, version, digest.hexdigest(), file=file)

    Replica.adopt = noted


def note_traffic(path: Path) -> None:
    """Writes what this host sent and received, as JSON, and in FILE.fetched each fetch:
    fragment, number of publishes (0: the anchor), bytes on the wire."""
    from diloco_jax.island.main import TrainingHost
    from diloco_jax.wire.transfers import Transfers

    close, fetch = TrainingHost.close, Transfers.fetch
    fetches: list[tuple[int, int, int]] = []

    def fetched(self, request, **options):
        found = fetch(self, request, **options)
        fetches.append((request.fragment, found.count, found.wire_bytes))
        return found

    def noted(self):
        path.write_text(json.dumps(self.mailbox.counted()[0]))
        path.with_suffix(".fetched").write_text(json.dumps(fetches))
        close(self)

    Transfers.fetch, TrainingHost.close = fetched, noted


def be_late(rng: random.Random) -> None:
    """Delays decisions, fetches and uploads of this host."""
    from diloco_jax.island import hosts, transfers

    def late(kind, method):
        real = getattr(kind, method)

        def delayed(self, *args, **kwargs):
            time.sleep(rng.random() * 0.05)
            return real(self, *args, **kwargs)

        setattr(kind, method, delayed)

    late(transfers.Fetcher, "fetch")
    late(transfers.Sender, "_send")
    late(hosts.FollowDecisions, "at")
    late(hosts.SharedDecisions, "at")


def end_last(index: int) -> None:
    """Host 1 is still there when host 0 has ended."""
    from diloco_jax.island import main as island_main

    leave = island_main.leave_at_once

    def leaves(exit_code):
        time.sleep(index * SLOW_END_S)
        leave(exit_code)

    island_main.leave_at_once = leaves


def compile_last(mark: Path, index: int, *, ends: bool) -> None:
    """Host 1 has not compiled before host 0 has waited for it; host 0 fails if it
    executes anything before that. ends: as for "ends"."""
    from diloco_jax.island import main as island_main
    from diloco_jax.island.device.step import Trainer
    from diloco_jax.island.host import Host
    from diloco_jax.island.world import Hosts

    waits, compiled = mark.with_suffix(".0.waits"), mark.with_suffix(".1.compiled")
    compile_ahead = island_main.compile_ahead
    meet, begin, own_meet = Hosts.meet, Trainer.init_inner, Host._meet

    def compiles(*args):
        compile_ahead(*args)
        deadline = time.monotonic() + PATIENCE_S
        while not waits.exists():
            assert time.monotonic() < deadline, "host 0 does not wait for host 1"
            time.sleep(0.01)
        compiled.touch()

    def meets(self, what, timeout_s, given_up, field):
        def goes_on():
            waits.touch()
            return given_up()

        meet(self, what, timeout_s, goes_on, field)

    def meets_ended(self, *args):
        deadline = time.monotonic() + PATIENCE_S
        while self.mailbox.ending is None:
            assert time.monotonic() < deadline, "nobody ends it"
            time.sleep(0.01)
        own_meet(self, *args)

    def begins(self, params):
        assert compiled.exists(), "host 0 does not wait until host 1 has compiled"
        return begin(self, params)

    if index == 0:
        Hosts.meet, Trainer.init_inner = meets, begins
        if ends:
            Host._meet = meets_ended
    else:
        island_main.compile_ahead = compiles


def script(config, folder: Path, name: str) -> None:
    """The oracle's script decides, as in `runtime_support.run_scripted`. No island
    trains before all are there: which rows one is lent depends on who asks first."""
    from scripted import ScriptedDecisions

    from diloco_jax.island.host import Host

    start, sync = Host.start, config.run.sync

    def scripted(self):
        decisions = ScriptedDecisions(
            self.mailbox,
            steps_per_cycle=sync.steps_per_cycle,
            fragments=sync.fragments,
            overlap_steps=sync.overlap_steps,
            patience_s=PATIENCE_S,
        )
        start(self, decisions)
        if self.follows:
            return
        (folder / f"{name}.started").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not all((folder / f"{n}.started").exists() for n in config.islands):
            assert time.monotonic() < deadline, "not all islands start"
            time.sleep(0.01)

    Host.start = scripted


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
