"""The hello of a real island: config, model and batch size are its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from diloco_jax.config import Config
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.island.main import LeadingHost
from diloco_jax.protocol.island.reporting import Status

PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


def test_it_says_what_the_island_is() -> None:
    config = Config()
    island = SimpleNamespace(
        _config=config,
        _name="a",
        _incarnation=3,
        _session="s",
        _host=SimpleNamespace(island=config.island("a"), plan=PLAN, own_data=False),
    )
    hello = LeadingHost._hello(cast(Any, island), Status(run_id="r", steps=7))
    assert (hello.run_id, hello.island, hello.incarnation) == ("r", "a", 3)
    assert (hello.session, hello.steps) == ("s", 7)
    assert hello.fingerprint == config.run.fingerprint()
    assert hello.plan == PLAN.digest()
    assert hello.environment["own_data"] is False
    batch_size = config.island("a").batch_size
    assert hello.sequences_per_step == batch_size
    assert hello.tokens_per_step == batch_size * config.run.sequence_length
