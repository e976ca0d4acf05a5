"""A coordinator and islands on threads of this process, over real gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from diloco_jax.config import Config
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.island.decisions import ScriptedDecisions
from diloco_jax.island.main import Island
from diloco_jax.observability.tape import read_tape

PATIENCE_S = 60.0


@contextlib.contextmanager
def coordinator(config: Config, workdir: Path, *, init: bool = True) -> Iterator:
    """Serves until the block ends; the summary is written then."""
    service = Coordinator(config, workdir, init=init)
    service.start()
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.engine.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        service.conclude()
        service.close()


def run_scripted(config: Config, workdir: Path) -> list[dict]:
    """The whole run with every island on the oracle's script; returns the tape."""
    sync = config.run.sync
    with coordinator(config, workdir) as service:
        failures: list[str] = []
        # One after the other, so that all are there before the first tick.
        islands = [
            Island(config, name, service.address, workdir / name, 1)
            for name in config.islands
        ]
        ready = threading.Barrier(len(islands))

        def live(island: Island) -> None:
            script = ScriptedDecisions(
                island.mailbox,
                steps_per_cycle=sync.steps_per_cycle,
                fragments=sync.fragments,
                overlap_steps=sync.overlap_steps,
                patience_s=PATIENCE_S,
            )
            try:
                island.start(script)
                ready.wait(PATIENCE_S)
                ending = island.run()
                if ending.exit_code:
                    failures.append(ending.reason)
                island.stop(ending.reason)
                island.close()
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=live, args=(i,)) for i in islands]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE_S)
        assert not failures, failures
    return list(read_tape(workdir / "tape.jsonl"))
