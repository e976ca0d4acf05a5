"""An island asks its coordinator for what it does not know before it builds."""

import dataclasses
import time
from contextlib import contextmanager

import pytest

from diloco_jax.config import Config, ModelConfig, Placement, RunConfig
from diloco_jax.deadlines import Deadlines
from diloco_jax.island import main
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.wire.server import Server

MODEL = ModelConfig(qk_norm=True, weights="hf:/nowhere/here")


def of_model(model: ModelConfig, time_budget_s: float = 60.0) -> Config:
    placement = Placement(
        time_budget_s=time_budget_s, outage_budget_s=0.25, compile_budget_s=0.5
    )
    return Config(run=RunConfig(model=model, seed=7), placement=placement)


@contextmanager
def serving(config: Config, bind: str = "127.0.0.1:0"):
    """The address of a coordinator of which only the config is asked."""
    server = Server(
        bind,
        None,
        tls=None,
        deadlines=Deadlines(60.0),
        max_islands=1,
        max_hosts=1,
        bulk_channels=1,
        config=dataclasses.asdict(config),
    )
    try:
        yield server.start()
    finally:
        server.stop(0.0)


def test_the_model_of_weights_is_the_coordinators():
    own = of_model(ModelConfig(num_layers=9))
    with serving(of_model(MODEL)) as address:
        told = main.with_model_of_run(own, "a", address)
    assert told.run.model == MODEL
    assert dataclasses.replace(told, run=own.run) == own


def test_without_weights_the_config_is_the_islands_own():
    """So that a mistaken model is refused, at the hello."""
    own = of_model(ModelConfig(num_layers=9))
    with serving(of_model(ModelConfig())) as address:
        assert main.with_model_of_run(own, "a", address) == own


@pytest.mark.parametrize(
    "model", [ModelConfig(weights="hf:/own"), ModelConfig(factory="a.b:c")]
)
def test_who_names_weights_or_a_factory_asks_nobody(model):
    own = of_model(model)
    assert main.with_model_of_run(own, "a", "127.0.0.1:1") == own


def test_a_coordinator_that_does_not_come_is_named(caplog):
    """After the time in which its machine may have started."""
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        main.with_model_of_run(of_model(ModelConfig(), 1.0), "a", "127.0.0.1:1")
    assert time.monotonic() - began >= 0.5
    (told,) = [r.getMessage() for r in caplog.records if "waits for" in r.getMessage()]
    assert told.startswith("waits for the coordinator, for 0 s of at most 0: 127.0.0.1")


def test_a_coordinator_that_comes_later_is_waited_for(monkeypatch):
    calls, pauses = [], []
    monkeypatch.setattr(main.time, "sleep", pauses.append)
    theirs = dataclasses.asdict(of_model(MODEL))

    def answer(client, timeout_s):
        calls.append(timeout_s)
        if len(calls) <= 3:
            raise ConnectionLost("not there yet")
        return theirs

    monkeypatch.setattr(main.Client, "config", answer)
    own = dataclasses.replace(
        of_model(ModelConfig()), placement=Placement(time_budget_s=300.0)
    )
    assert main.with_model_of_run(own, "a", "127.0.0.1:1").run.model == MODEL
    assert pauses == [0.5, 1.0, 2.0], "it is often the first of the two"
