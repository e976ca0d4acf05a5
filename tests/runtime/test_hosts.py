"""Islands of several host processes: real processes, real `jax.distributed` worlds."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from hosts_support import TIMEOUT_S, hosts, patient_config, run_processes
from runtime_support import (
    await_state,
    client,
    coordinator,
    hello,
    placed,
    run_scripted,
    with_run,
)
from tiny import SEQUENCE_LENGTH

from diloco_jax.config import Config, IslandConfig
from diloco_jax.models import transformer
from diloco_jax.models.build import build_plan
from diloco_jax.observability.metrics import read_metrics

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


@pytest.mark.parametrize("code", [0, 3])
def test_hosts_end_together_though_one_of_them_still_compiles(text, tmp_path, code):
    """One is asked to end; or the coordinator hears of another process of the name."""
    pair = IslandConfig(batch_size=4, hosts=2, mesh_fsdp=2)
    islands = {"pair": pair, "b": IslandConfig()}
    two = dataclasses.replace(patient_config(text), islands=islands).validate()
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
