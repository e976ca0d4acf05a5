"""Whether a worker that has outlived its lead can go on with the next one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from diloco_jax.protocol.holding import BeginWorker, encode, to_worker

BEGIN = BeginWorker(
    config={
        "run": {"seed": 1},
        "placement": {"bind": "127.0.0.1:0", "advertise": "", "workers": 2},
    },
    workdir="run",
    run_id="r",
    worker=1,
    fragments=(1, 3),
    bind="127.0.0.1:0",
    ticket_key=b"first",
)


def with_placement(**fields: Any) -> dict[str, Any]:
    placement = {**BEGIN.config["placement"], **fields}
    return {**BEGIN.config, "placement": placement}


def test_it_goes_on_with_a_lead_that_serves_elsewhere_with_another_key() -> None:
    """`diloco run` gives a coordinator that it starts again the port of the first."""
    config = with_placement(bind="127.0.0.1:7077", advertise="host:7077")
    later = replace(
        BEGIN, config=config, bind="127.0.0.1:7080", ticket_key=b"second", lead=2
    )
    assert BEGIN.is_like(later)
    assert BEGIN.is_like(to_worker(encode(later)))


@pytest.mark.parametrize(
    "changes",
    [
        {"fragments": (1,)},
        {"worker": 0},
        {"run_id": "other"},
        {"config": with_placement(workers=3)},
        {"config": {**BEGIN.config, "run": {"seed": 2}}},
    ],
)
def test_it_does_not_with_one_that_wants_another_worker(changes) -> None:
    assert not BEGIN.is_like(replace(BEGIN, **changes))
