"""Islands of several host processes: real processes, real `jax.distributed` worlds."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from hosts_support import (
    TIMEOUT_S,
    fetched_bytes,
    hosts,
    patient_config,
    run_processes,
)
from runtime_support import (
    answer,
    await_message,
    await_state,
    client,
    coordinator,
    hello,
    placed,
    report,
    run_scripted,
    with_run,
)
from tiny import SEQUENCE_LENGTH

from diloco_jax.config import Config, IslandConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.models import transformer
from diloco_jax.models.build import build_plan
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages

pytestmark = pytest.mark.dist


def flat(params, prefix: str = "") -> dict[str, np.ndarray]:
    found = {}
    for name, value in params.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[prefix + name] = np.asarray(value)
    return found


def test_hosts_of_an_island_have_the_same_bits_after_every_adoption(text, tmp_path):
    config = patient_config(text, codec_up="int8", codec_down="int8", quorum=1)
    config = with_run(config, total_tokens=48 * 4 * SEQUENCE_LENGTH)
    # Both hosts have all parameters: "data" lies across them.
    pair = IslandConfig(
        batch_size=4, hosts=2, mesh_data=2, mesh_fsdp=2, step_seconds=0.1
    )
    config = dataclasses.replace(config, islands={"pair": pair}).validate()
    config = placed(config, watch_every=2)
    run_processes(config, tmp_path, how="7")
    first, second = (
        (tmp_path / f"pair.{index}.adopted").read_text().splitlines()
        for index in range(2)
    )
    assert first == second
    assert len(first) >= 6
    assert len({line.split()[-1] for line in first}) == len(first)
    # Both evaluated the merged model: it is a collective of them.
    lines = read_metrics(tmp_path / "run")
    curve = [m for m in lines if m["kind"] == "merged_model"]
    assert len(curve) >= 2
    assert all(m["cycle"] % 2 == 0 and 2 < m["eval_loss"] < 7 for m in curve)


def test_meshes_and_hosts_change_nothing_but_rounding(text, tmp_path):
    """f32 on every wire, scripted: three unlike islands against three of one device."""
    config = patient_config(text, codec_up="f32", codec_down="f32")
    sync = dataclasses.replace(config.run.sync, quorum=3)
    config = with_run(config, sync=sync, total_tokens=4 * 4 * 12 * SEQUENCE_LENGTH)
    unlike = {
        "a": IslandConfig(batch_size=4, hosts=2, mesh_fsdp=4),
        "b": IslandConfig(batch_size=4, mesh_fsdp=2, mesh_tensor=2),
        "c": IslandConfig(batch_size=4),
    }
    (tmp_path / "unlike").mkdir()
    unlike_config = dataclasses.replace(config, islands=unlike).validate()
    found = flat(run_processes(unlike_config, tmp_path / "unlike", how="scripted"))
    check_traffic(unlike_config, tmp_path / "unlike")
    alike = dict.fromkeys(unlike, IslandConfig(batch_size=4))
    alike_config = dataclasses.replace(config, islands=alike).validate()
    run_scripted(alike_config, tmp_path / "alike")
    with coordinator(
        alike_config, tmp_path / "alike", init=False, killed=True
    ) as service:
        expected = flat(service.holder.store.params())
    for name, value in expected.items():
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error <= 1e-4, f"{name} differs by {error}"


ISLANDS = {
    "bands": IslandConfig(batch_size=4, hosts=2, mesh_fsdp=4),
    "copies": IslandConfig(batch_size=4, hosts=2, mesh_data=2),
}
"""Hosts that cut every piece inside its tiles, some of which are bands of one tile; and
hosts that all have all parameters."""


def test_every_byte_crosses_the_link_of_an_island_once(text, tmp_path):
    """Its bytes are those of each fragment's payload, with some around each host's
    part."""
    sync = {"fragments": 8, "steps_per_cycle": 8, "quorum": 2}
    config = patient_config(text, codec_up="int8", codec_down="int8")
    sync = dataclasses.replace(config.run.sync, **sync)
    config = with_run(config, sync=sync, total_tokens=2 * 4 * 18 * SEQUENCE_LENGTH)
    config = dataclasses.replace(config, islands=ISLANDS).validate()
    plan = build_plan(config.run, transformer.build(config.run.model))
    assert any(piece.bands for piece in plan.pieces)
    run_processes(config, tmp_path, how="cut")
    adopted = {path.read_text() for path in tmp_path.glob("copies.*.adopted")}
    assert len(adopted) == 1, "hosts have the same bits"
    for name, island in ISLANDS.items():
        found = fetched_bytes(tmp_path, name, island.hosts)
        for fragment, pieces in enumerate(plan.fragments):
            layout = PayloadLayout.of(get_codec("int8"), pieces)
            anchor, publish = 4 * plan.sizes[fragment], layout.total_bytes
            assert anchor <= found[fragment, 0] <= 1.05 * anchor + 200
            assert publish <= found[fragment, 1] <= 1.05 * publish + 200


def check_traffic(config: Config, folder: Path) -> None:
    """A host of `a` fetches a half of everything. f32 is every codec here."""
    model = transformer.build(config.run.model)
    whole = 4 * build_plan(config.run, model).total
    islands = json.loads((folder / "run" / "summary.json").read_bytes())["islands"]
    hosts = [
        json.loads((folder / f"a.{index}.traffic").read_bytes()) for index in range(2)
    ]
    for traffic in hosts:
        assert 0.45 * whole < traffic["bytes_join"] < 0.55 * whole
        # The last publishes may come too late for some: not to a byte.
        assert traffic["bytes_down"] < 0.6 * islands["c"]["bytes_down"]
    assert whole < islands["c"]["bytes_join"] < 1.1 * whole
    sums = {kind: sum(traffic[kind] for traffic in hosts) for kind in hosts[0]}
    assert islands["a"]["bytes_join"] == sums["bytes_join"]
    assert whole <= sums["bytes_join"] <= 1.05 * whole + 400, "each byte once"
    for kind in ("bytes_up", "bytes_down", "bytes_join"):
        value = sums[kind]
        assert 0.8 * value <= islands["a"][kind] <= value
    assert sums["bytes_up"] == pytest.approx(islands["c"]["bytes_up"], rel=0.15)


# ---- hosts that cannot go on ---------------------------------------------------------


@pytest.fixture
def two(text) -> Config:
    """A config of which an island has two hosts."""
    pair = IslandConfig(batch_size=4, hosts=2, mesh_fsdp=2)
    islands = {"pair": pair, "b": IslandConfig()}
    return dataclasses.replace(patient_config(text), islands=islands).validate()


@pytest.mark.parametrize("code", [0, 3])
def test_hosts_end_together_though_one_of_them_still_compiles(two, tmp_path, code):
    """One is asked to end; or the coordinator hears of another process of the name."""
    with (
        coordinator(two, tmp_path / "run") as service,
        hosts(two, ["pair"], service.address, tmp_path, "ends") as children,
        client(service.address) as network,
    ):
        await_state(service, lambda state: "pair" in state.islands, TIMEOUT_S)
        if code:
            network.open_control(hello(two, "pair", incarnation=2, lookahead=2))
        else:
            children["pair.0"].send_signal(signal.SIGTERM)
        codes = [child.wait(TIMEOUT_S) for child in children.values()]
        logs = [(tmp_path / f"pair.{index}.log").read_text() for index in range(2)]
        assert codes == [code, code], logs


def test_an_island_of_two_hosts_leaves_what_is_open_when_one_has_notice(two, tmp_path):
    config = placed(two, notice_s=2 * TIMEOUT_S)
    config = with_run(config, total_tokens=1 << 20)
    pair = dataclasses.replace(two.islands["pair"], step_seconds=0.1)
    others = dict.fromkeys("bc", IslandConfig())
    islands = {"pair": pair, **others}
    config = dataclasses.replace(config, islands=islands).validate()

    def trains(state) -> bool:
        return "pair" in state.islands and state.islands["pair"].phase == "training"

    def arrived(state) -> bool:
        take = state.fragments[0].accounts["pair"].take
        return take is not None and take.ready

    with (
        coordinator(config, tmp_path / "run") as service,
        hosts(config, ["pair"], service.address, tmp_path, "7") as children,
        client(service.address) as network,
    ):
        await_state(service, trains, TIMEOUT_S)
        hellos = [hello(config, name) for name in others]
        streams = [network.open_control(said) for said in hellos]
        for steps in (1, 3):
            for stream in streams:
                stream.send(report(steps))
        await_state(service, arrived)
        children["pair.1"].send_signal(signal.SIGTERM)
        for name, child in children.items():
            assert child.wait(TIMEOUT_S) == 1, (tmp_path / f"{name}.log").read_text()
        # They answer only now, so what is merged with them was left behind.
        for fragment, steps in enumerate((3, 5)):
            for stream in streams:
                stream.send(report(steps))
            for own, stream in zip(hellos, streams, strict=True):
                take = await_message(stream, messages.TakeRequest)
                assert take.fragment == fragment
                seq = fragment + 1
                answer(service, network, own, stream, take, seq=seq, steps=steps)
            await_state(service, lambda state, f=fragment: state.fragments[f].merges)
    tape = list(read_tape(tmp_path / "run" / "tape.jsonl"))
    (left,) = [r for r in tape if r["kind"] == "left"]
    assert (left["island"], left["reason"]) == ("pair", "preempted")
    assert left["said"] == "preempted (host 1: SIGTERM)"
    merged = [r["contributions"][-1] for r in tape if r["kind"] == "merged"]
    assert [(p["island"], p["tick"], p["end"]) for p in merged] == [
        ("pair", kept["tick"], kept["end"]) for kept in left["left_behind"]
    ]
    assert left["left_behind"][-1]["end"] == left["steps"]
