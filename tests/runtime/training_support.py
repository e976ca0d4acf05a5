"""Islands that train at a pace of their own, on threads of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from runtime_support import PATIENCE_S, make_config, with_run

from diloco_jax.config import Config
from diloco_jax.island.main import TrainingHost

CYCLE_STEPS, STEP_SECONDS = 6, 0.25


def slowed(config: Config, step_seconds: float = STEP_SECONDS) -> Config:
    """The config with steps that last so long on every island."""
    islands = {
        name: dataclasses.replace(island, step_seconds=step_seconds)
        for name, island in config.islands.items()
    }
    return dataclasses.replace(config, islands=islands)


def lasting(text: Path, training_s: float) -> Config:
    """A run whose two islands train for about so long, one of which is enough."""
    config = make_config(text, steps_per_cycle=CYCLE_STEPS, fragments=3, quorum=1)
    sequences = sum(island.batch_size for island in config.islands.values())
    steps = round(training_s / STEP_SECONDS)
    tokens = steps * sequences * config.run.sequence_length
    return slowed(with_run(config, total_tokens=tokens))


@contextlib.contextmanager
def trained(config: Config, address: str, folder: Path) -> Iterator[list[TrainingHost]]:
    """All islands train until the block or the run is over; none of them fails."""
    islands = [
        TrainingHost(config, name, address, folder / name) for name in config.islands
    ]
    failures: list[str] = []

    def live(island: TrainingHost) -> None:
        try:
            island.start()
            ending = island.loop.run()
            if ending.exit_code:
                failures.append(ending.text)
            island.stop(ending)
            island.close()
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=live, args=(island,)) for island in islands]
    for thread in threads:
        thread.start()
    try:
        yield islands
    finally:
        for island in islands:
            island.mailbox.end(0, "the test has seen enough", "stopped")
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures, failures
