"""Islands of several host processes: real processes, real `jax.distributed` worlds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import support
import tape_checks
from hosts_support import (
    HOST,
    TIMEOUT_S,
    fetched_bytes,
    hosts,
    patient_config,
    run_processes,
)
from runtime_support import (
    Stall,
    answer,
    await_message,
    await_state,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    report,
    run_scripted,
    with_run,
)
from tiny import SEQUENCE_LENGTH

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config, IslandConfig, Placement, SyncConfig
from diloco_jax.config.loading import write_config_json
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


MESHES = {
    "copies": IslandConfig(batch_size=4, hosts=2, mesh_data=2, mesh_fsdp=2),
    "cut": IslandConfig(batch_size=4, hosts=2, mesh_fsdp=4),
    "four": IslandConfig(batch_size=4, hosts=4, mesh_data=4),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_byte_crosses_the_link_of_an_island_once(text, tmp_path, mesh):
    """Copies on other hosts, pieces cut inside tiles, four hosts: each beside an island
    of one device."""
    config = patient_config(text, codec_up="int8", codec_down="int8")
    sync = dataclasses.replace(config.run.sync, quorum=2)
    config = with_run(config, sync=sync, total_tokens=2 * 4 * 9 * SEQUENCE_LENGTH)
    islands = {"many": MESHES[mesh], "one": IslandConfig(batch_size=4)}
    config = dataclasses.replace(config, islands=islands).validate()
    run_processes(config, tmp_path, how="cut")
    adopted = {path.read_text() for path in tmp_path.glob("many.*.adopted")}
    assert mesh == "cut" or len(adopted) == 1, "hosts have the same bits"
    one = fetched_bytes(tmp_path, "one", hosts=1)
    many = fetched_bytes(tmp_path, "many", MESHES[mesh].hosts)
    assert {count > 0 for _, count in one} == {True, False}
    for kind in one.keys() & many.keys():
        assert many[kind] <= 1.05 * one[kind], kind
    assert all((fragment, 0) in many and (fragment, 1) in many for fragment, _ in one)


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
    for kind, value in sums.items():
        assert 0.8 * value <= islands["a"][kind] <= value
    assert sums["bytes_up"] == pytest.approx(islands["c"]["bytes_up"], rel=0.15)


@pytest.fixture(scope="module")
def stall() -> Stall:
    """Stall of this machine during the run of `killed`."""
    return Stall()


@pytest.fixture(scope="module")
def killed(tmp_path_factory, stall) -> support.Run:
    """Done; host 1 of the pair was killed, and host 0 of its next attempt."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "text").mkdir()
    numbers = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in numbers.integers(0, 99, 2000))
        (folder / "text" / f"{index}.txt").write_text(line)
    config = make_config(folder / "text")
    run = dataclasses.replace(
        config.run,
        sync=SyncConfig(steps_per_cycle=6, fragments=3, quorum=1),
        total_tokens=2 * 130 * 4 * SEQUENCE_LENGTH,
    )
    islands = {
        "pair": IslandConfig(batch_size=4, hosts=2, mesh_fsdp=4, step_seconds=0.4),
        "solo": IslandConfig(batch_size=4, step_seconds=0.4),
    }
    faults = ("pair/1@15:kill", "pair/0#2@15:kill")
    placement = Placement(faults=faults, checkpoint_every_s=1.0)
    config = Config(run=run, islands=islands, placement=placement).validate()
    with stall, pytest.MonkeyPatch.context() as patch:
        # With nothing in it, so that only earlier attempts compile for the last one.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        return support.run_in(config, folder, TIMEOUT_S)


@pytest.mark.timing
def test_the_death_of_any_host_ends_its_islands_attempt_and_nothing_else(killed, stall):
    islands = killed.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"pair": 3, "solo": 1}
    solo = islands["solo"]
    longest_s = 3 * solo["median_step_seconds"] + stall.longest_s
    assert solo["max_step_gap_seconds"] <= longest_s
    assert solo["stalled_seconds"] <= 0.05 * solo["step_seconds"]
    assert solo["tokens_lost"] == {}


@pytest.mark.timing
def test_the_island_is_merged_again_and_the_ledger_balances(killed):
    sizes = support.fragment_sizes(killed.config)
    assert tape_checks.ledger_problems(killed.summary, killed.tape, sizes) == []
    assert tape_checks.version_problems(killed.tape) == []
    for incarnation in (2, 3):
        steps = tape_checks.steps_to_first_merge(killed.tape, "pair", incarnation)
        assert steps <= 6
    lost = killed.summary["islands"]["pair"]["tokens_lost"]
    assert set(lost) == {"died", told_by_the_survivor(killed.tape)}


def told_by_the_survivor(tape: list[dict]) -> str:
    """Reason of the end by host 1's death: "failed" if a collective told host 0 of it
    before it was ended too, else "died", as where host 0 itself is killed."""
    (end,) = (
        r
        for r in tape
        if (r["kind"], r.get("island"), r.get("incarnation")) == ("left", "pair", 1)
    )
    if end["reason"] != "died":
        assert end["reason"] == "failed"
        assert "Gloo" in end["said"], "another host is gone, and nothing else"
    return end["reason"]


@pytest.mark.timing
def test_no_host_compiles_anything_when_the_island_is_back(killed):
    for name in ("pair", "pair.1"):
        log = (killed.workdir / "logs" / f"{name}.log").read_text()
        ends = re.findall(r"ends: .*; (\d+) programs compiled, (\d+) read", log)
        compiled, read = map(int, ends[-1])
        assert compiled == 0 < read
    # Checkpoints are copied to the host and back, which takes no program.
    assert not list(killed.workdir.parent.glob("cache/*device_put*"))
    assert list(killed.workdir.parent.glob("cache/jit_take-*"))


@pytest.mark.timing
def test_islands_of_one_host_and_of_two_are_merged_together(killed):
    """Their steps take the same time, but two hosts take later than they are asked."""
    for name, island in killed.summary["islands"].items():
        assert island["participation"] >= 0.8, name


@pytest.mark.timing
def test_replay_repeats_an_island_of_two_hosts_bit_for_bit(killed):
    """Its three attempts too, two of which ended with a host's death, and the moments
    that the later ones had from checkpoints."""
    told = [r["record"] for r in killed.tape if r["kind"] == "island"]
    assert "restored" in {record["kind"] for record in told}
    command = [*support.DILOCO, "replay", str(killed.workdir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == outcome["merges_on_tape"] > 20


def test_hosts_with_different_configs_are_told_apart(text, tmp_path):
    config = patient_config(text)
    pair = IslandConfig(batch_size=4, hosts=2, mesh_fsdp=2)
    config = dataclasses.replace(config, islands={"pair": pair, "b": IslandConfig()})
    other = dataclasses.replace(
        config,
        islands={**config.islands, "pair": dataclasses.replace(pair, remat="full")},
    )
    world, children = f"127.0.0.1:{free_port()}", []
    with coordinator(config.validate(), tmp_path / "run") as service:
        for index, told in enumerate((config, other)):
            path = tmp_path / f"{index}.json"
            write_config_json(told.validate(), path)
            arguments = [path, "pair", service.address, tmp_path, world, index, "1"]
            children.append(
                subprocess.Popen(
                    [sys.executable, str(HOST), *map(str, arguments)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        output, _ = children[1].communicate(timeout=TIMEOUT_S)
        children[0].kill()
        children[0].communicate(timeout=TIMEOUT_S)
    assert children[1].returncode == 2, output
    assert "host 1 of island 'pair' has another config or model than host 0" in output
    assert "remat: 'full' here, 'none' there" in output


def test_an_island_of_two_hosts_leaves_what_is_open_when_one_has_notice(text, tmp_path):
    config = placed(patient_config(text, cycles=1000), notice_s=2 * TIMEOUT_S)
    pair = IslandConfig(batch_size=4, hosts=2, mesh_fsdp=4, step_seconds=0.1)
    others = {name: IslandConfig(batch_size=4) for name in "bc"}
    config = dataclasses.replace(config, islands={"pair": pair} | others).validate()

    def trains(state) -> bool:
        return "pair" in state.islands and state.islands["pair"].phase == "training"

    def went_on(state) -> bool:
        """It has sent a delta, and made steps since."""
        take = state.fragments[0].accounts["pair"].take
        here = take is not None and take.ready
        return here and take.end < state.islands["pair"].steps

    with contextlib.ExitStack() as stack:
        service = stack.enter_context(coordinator(config, tmp_path / "run"))
        children = stack.enter_context(
            hosts(config, ["pair"], service.address, tmp_path, how="7")
        )
        await_state(service, trains, TIMEOUT_S)
        network = stack.enter_context(client(service.address))
        hellos = {name: hello(config, name) for name in others}
        streams = {name: network.open_control(h) for name, h in hellos.items()}
        for steps in (1, 3):
            for stream in streams.values():
                stream.send(report(steps))
        await_state(service, went_on)

        told_at = time.monotonic()
        children["pair.1"].send_signal(signal.SIGTERM)
        await_state(service, lambda state: state.islands["pair"].phase != "training")
        for child in children.values():
            child.send_signal(signal.SIGTERM)
        for name, child in children.items():
            code = child.wait(TIMEOUT_S)
            assert code == 1, (tmp_path / f"{name}.log").read_text()[-3000:]
        assert time.monotonic() - told_at < config.placement.notice_s

        # They answer only now, so what is merged with them was left behind.
        for fragment, steps in enumerate((3, 5)):
            for stream in streams.values():
                stream.send(report(steps))
            for name, stream in streams.items():
                take = await_message(stream, messages.TakeRequest)
                assert take.fragment == fragment
                who, seq = hellos[name], fragment + 1
                answer(service, network, who, stream, take, seq=seq, steps=steps)
            await_state(service, lambda state, f=fragment: state.fragments[f].merges)
        for stream in streams.values():
            stream.send(messages.Goodbye(reason="stopped", text="done"))
        await_state(
            service,
            lambda state: all(i.status == "gone" for i in state.islands.values()),
        )
    tape = list(read_tape(tmp_path / "run" / "tape.jsonl"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    sizes = support.fragment_sizes(config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    left = next(r for r in tape if r["kind"] == "left")
    assert (left["island"], left["reason"]) == ("pair", "preempted")
    assert left["said"] == "preempted (host 1: SIGTERM)"
    first, second = left["left_behind"]
    assert (first["fragment"], second["fragment"]) == (0, 1)
    assert first["end"] < second["end"] == left["steps"]
    after = (left["steps"] - first["end"]) * pair.batch_size * SEQUENCE_LENGTH
    assert left["lost_tokens_by_fragment"] == [after, 0], "after an earlier take"
    merged = [r["contributions"][-1] for r in tape if r["kind"] == "merged"]
    assert [(p["island"], p["tick"], p["end"]) for p in merged] == [
        ("pair", kept["tick"], kept["end"]) for kept in (first, second)
    ]
