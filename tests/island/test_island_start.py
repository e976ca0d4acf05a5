"""An island asks its coordinator for what it does not know before it builds, says what
it is, and has its environment before it imports jax."""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager

import pytest

from diloco_jax import before_jax
from diloco_jax.before_jax import prepare_island
from diloco_jax.config import Config, IslandConfig, ModelConfig, Placement, RunConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.config.resolving import LONG, SHORT
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.island import link, main
from diloco_jax.island.host import introduction
from diloco_jax.protocol.island import reporting
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.wire.server import Server

MODEL = ModelConfig(qk_norm=True, weights="hf:/nowhere/here")


def of_model(model: ModelConfig, time_budget_s: float = 60.0) -> Config:
    placement = Placement(
        time_budget_s=time_budget_s, outage_budget_s=0.25, compile_budget_s=0.5
    )
    run = RunConfig(model=model, seed=7, sync=LONG, outer=SHORT)
    return Config(run=run, placement=placement)


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


def test_what_was_chosen_as_the_run_began_is_taken_from_it():
    """Its tokens and weights may say otherwise here."""
    own = of_model(ModelConfig(factory="a.b:c")).replace("sync.steps_per_cycle", None)
    with serving(of_model(MODEL)) as address:
        told = main.with_model_of_run(own, "a", address)
    assert told == own.replace("sync.steps_per_cycle", LONG.cycle)


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
    monkeypatch.setattr(link.time, "sleep", pauses.append)
    theirs = dataclasses.asdict(of_model(MODEL))

    def answer(client, timeout_s):
        calls.append(timeout_s)
        if len(calls) <= 3:
            raise ConnectionLost("not there yet")
        return theirs

    monkeypatch.setattr(link.Client, "config", answer)
    own = dataclasses.replace(
        of_model(ModelConfig()), placement=Placement(time_budget_s=300.0)
    )
    assert main.with_model_of_run(own, "a", "127.0.0.1:1").run.model == MODEL
    assert pauses == [0.5, 1.0, 2.0], "it is often the first of the two"


PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


def test_it_says_what_the_island_is() -> None:
    config = Config()
    who = introduction(config, "a", PLAN, 3, "s", own_data=False)
    hello = reporting.hello(who, Status(run_id="r", steps=7))
    assert (hello.run_id, hello.island, hello.incarnation) == ("r", "a", 3)
    assert (hello.session, hello.steps) == ("s", 7)
    assert hello.fingerprint == config.run.fingerprint()
    assert hello.plan == PLAN.digest()
    assert hello.environment["own_data"] is False
    batch_size = config.island("a").batch_size
    assert hello.sequences_per_step == batch_size
    assert hello.tokens_per_step == batch_size * config.run.sequence_length


@pytest.fixture
def told(monkeypatch):
    """The generations whose flags libtpu was told, in order."""
    generations = []
    monkeypatch.setattr(
        before_jax,
        "set_libtpu_flags",
        lambda generation, _: generations.append(generation),
    )
    return generations


def test_libtpu_is_told_the_flags_of_the_islands_topology(told, tmp_path):
    tpu(tmp_path, "0x006f")
    island = IslandConfig(topology="v5p:2x2x2", mesh_fsdp=8, batch_size=8, hosts=2)
    prepare_island(island, environment := {}, tmp_path)
    assert told == ["v5p"]
    assert environment["XLA_FLAGS"].endswith("device_count=4")


def test_without_a_topology_the_flags_are_those_of_the_tpus_here(told, tmp_path):
    prepare_island(IslandConfig(), {}, tmp_path)
    tpu(tmp_path, "0x006f")
    prepare_island(IslandConfig(), {}, tmp_path)
    tpu(tmp_path, "0x0042")
    prepare_island(IslandConfig(), {}, tmp_path)
    assert told == ["", "v6e", ""]


def tpu(root, device):
    """Has one card of Google's in a machine."""
    folder = root / "sys/bus/pci/devices/0000:00:05.0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vendor").write_text("0x1ae0\n")
    (folder / "device").write_text(f"{device}\n")
