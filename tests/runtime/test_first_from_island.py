"""A run that begins with the parameters of one of its islands."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from runtime_support import PATIENCE_S, make_config, placed

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.island.main import TrainingHost
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import read_tape
from diloco_jax.weights.first import first_params, require_repeatable, started_from

pytestmark = pytest.mark.dist


def test_an_island_of_the_products_own_gives_what_its_model_draws(text, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    config = placed(
        make_config(text, cycles=1, quorum=1), first_from="b", bind=address
    ).validate()
    service = Coordinator(config, tmp_path, init=True)
    thread = threading.Thread(target=lambda: (service.start(), service.run()))
    thread.start()
    try:
        island = TrainingHost(config, "b", address, tmp_path / "b")
        island.start()
        ending = island.loop.run()
        island.stop(ending)
        island.close()
        assert ending.exit_code == 0, ending
    finally:
        thread.join(PATIENCE_S)
        service.close()
    run, first = config.run, next(iter(read_tape(tmp_path / "tape.jsonl")))
    drawn = first_params(run, build(run))
    digest = Store(run, build_plan(run, build(run)), drawn, 1.0).digest()
    assert (first["first_from"], first["parameters_digest"]) == ("b", digest)
    assert island.mailbox.counted()[0]["bytes_join"] == 0, "it has them already"


def test_a_source_that_cannot_give_is_refused_by_name():
    config = Config(islands={"fast": IslandConfig(), "slow": IslandConfig()})
    begun = started_from(config, "from-island:fast").validate()
    assert begun.placement.first_from == "fast"
    assert begun.run.fingerprint() == config.run.fingerprint()
    with pytest.raises(ConfigError, match=r"no such island .did you mean 'fast'"):
        started_from(config, "from-island:fst").validate()
    with pytest.raises(ConfigError, match="write hf:DIR"):
        started_from(config, "from-islands:fast")
    model = dataclasses.replace(config.run.model, weights="hf:/somewhere")
    run = dataclasses.replace(config.run, model=model)
    with pytest.raises(ConfigError, match=r"model\.weights = 'hf:/somewhere'"):
        started_from(dataclasses.replace(config, run=run), "from-island:fast")
    with pytest.raises(ConfigError, match="replay has only what is drawn or in files"):
        require_repeatable(begun.placement, "replay")
