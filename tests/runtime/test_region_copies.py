"""Three islands of one region: the coordinator sends each publish once.

What a donor costs that dies or lies is shown in virtual time (`test_bad_donors.py`).
"""

from __future__ import annotations

import dataclasses

from runtime_support import (
    PATIENCE_S,
    await_that,
    client,
    coordinator,
    make_config,
    with_run,
)
from training_support import trained

from diloco_jax import run_files
from diloco_jax.config import IslandConfig
from diloco_jax.observability.tape import read_tape

BEFORE, MERGES = 4, 8
"""Merges before copies are counted, and over which they are."""
MOST_COPIES = 1.05


def test_the_coordinator_sends_each_publish_once(text, tmp_path):
    config = with_run(
        make_config(text, quorum=2, steps_per_cycle=14, overlap_steps=12),
        total_tokens=10**9,
    )
    island = IslandConfig(batch_size=2, step_seconds=0.1, region="near")
    config = dataclasses.replace(config, islands=dict.fromkeys("abc", island))

    with (
        coordinator(config, tmp_path / "run") as service,
        client(service.address) as observer,
        trained(config, service.address, tmp_path),
    ):

        def sent(least: int) -> tuple[float, int]:
            """Bytes of publishes and merges, once there are so many merges."""
            await_that(lambda: observer.status(PATIENCE_S)["merges"] >= least)
            status = observer.status(PATIENCE_S)
            nbytes = sum(i["bytes_down"] for i in status["islands"].values())
            return nbytes, status["merges"]

        before, first = sent(BEFORE)
        after, last = sent(first + MERGES)
    tape = read_tape(tmp_path / "run" / run_files.TAPE)
    each = max(line["payload_bytes"] for line in tape if line["kind"] == "merged")
    # One that is under way at either end may count here or there.
    assert after - before <= MOST_COPIES * each * (last - first + 1)
