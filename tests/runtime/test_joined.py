"""A train loop of the user's own is an island like any other."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import runpy
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
import tape_checks
from example_support import TIMEOUT_S, Example, merges_of
from oracle_support import expected_history
from runtime_support import (
    PATIENCE_S,
    Stall,
    await_state,
    await_that,
    coordinator,
    make_config,
    placed,
    run_scripted,
    with_run,
)
from test_oracle import CYCLES, positions_by_island

import diloco_jax
from diloco_jax import IslandEndedError, cli
from diloco_jax.chaos.relay import Relay
from diloco_jax.cluster.status import read_status
from diloco_jax.config import ConfigError, Placement
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader
from diloco_jax.island.device.build import (
    at_anchors,
    build_trainer,
    compile_programs,
)
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.joined import JoinedIsland
from diloco_jax.island.link import ending_of
from diloco_jax.island.world import Hosts
from diloco_jax.models.build import build
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire.errors import ConnectionLost, Refused
from diloco_jax.workdir import read_config

pytestmark = pytest.mark.dist


# ---- the same bits as the product's own loop -----------------------------------------


def own_loop(island, config):
    """The product's step, in a loop of the test's."""
    run, loop = config.run, island.loop
    _, trainer = build_trainer(run, config.islands[island.name])
    rows = load_data(run).index(run.seed)
    reader = BatchReader(rows, trainer.fields, run.sequence_length)
    moments = trainer.init_inner(loop.hand_over())
    while (ending := loop.until_step()) is None:
        rate, positions = loop.begin_step()
        batch = trainer.put_batch(reader.batch(positions))
        state = TrainState(loop.hand_over(), moments)
        (params, moments), metrics = trainer.step(state, batch, rate)
        loop.stepped(params, metrics["loss"])
    return ending


@pytest.mark.parametrize("own", ["a", "ab"])
def test_a_loop_that_joins_gives_the_oracles_bits(own, text, tmp_path):
    config = make_config(text, cycles=CYCLES, adopt="rebase")
    tape = run_scripted(config, tmp_path, dict.fromkeys(own, own_loop))
    merges = [r for r in tape if r["kind"] == "merged" and not r["final"]]
    ticks = CYCLES * config.run.sync.fragments
    expected = expected_history(config, positions_by_island(tape), ticks)
    assert len(merges) >= len(expected) == CYCLES * 2
    for merge, wanted in zip(merges, expected, strict=False):
        assert merge["digest"] == wanted.digest, f"tick {wanted.tick} differs"


# ---- the example of the page ---------------------------------------------------------


OWN_SEED = 7
SAYS = """
    params = island.params
    began = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(params))
    print(f"began {began!r}")
"""


def sizes_of(example, *seeds):
    """The sums of the absolute values of the page's parameters."""
    page = runpy.run_path(str(example.folder / "run.py"))
    for seed in seeds:
        leaves = jax.tree.leaves(page["parameters"](jax.random.key(seed)))
        yield sum(float(np.abs(leaf).sum()) for leaf in leaves)


def test_the_loops_of_the_page_begin_a_run_and_survive_kills(tmp_path, capsys):
    """The run begins with what `fast` has, and is visible once that is complete,
    whoever dies before. Later the other loop is killed, and the coordinator."""
    example = Example(tmp_path)
    loop = (tmp_path / "train.py").read_text()
    loop = loop.replace("\n    params = island.params\n", SAYS)
    own = loop.replace("jax.random.key(0)", f"jax.random.key({OWN_SEED})")
    (tmp_path / "own.py").write_text(own)
    kept = example.folder / "kept"
    processes = [served := example.serve("--init", "from-island:fast")]
    try:
        slow = example.keep("slow", 1, 0.25)
        fast = example.loop("own.py", "fast", 1, 0.1)
        processes += [slow, fast]
        status = functools.partial(read_status, str(example.workdir), Placement())
        shown = {"islands": {}}
        await_that(lambda: shown.update(status()) or shown["islands"], TIMEOUT_S)
        assert shown["phase"] == "gathering"
        assert "island 'fast', of which 0 of 3" in shown["alerts"][0]
        assert "slow" not in shown["islands"]
        fast.send_signal(signal.SIGKILL)
        example.kill(served)
        assert not (example.workdir / "log").exists()
        processes.append(served := example.serve())
        processes.append(fast := example.loop("own.py", "fast", 2, 0.1))
        example.until(
            lambda tape: merges_of(tape, "slow", 1) >= 3 and (kept / "1").is_dir()
        )
        slow.send_signal(signal.SIGKILL)
        processes.append(slow := example.keep("slow", 2, 0.25))
        example.until(lambda tape: merges_of(tape, "slow", 2) >= 2)
        example.kill(served)
        processes.append(served := example.serve())
        printed = [p.communicate(timeout=TIMEOUT_S)[0].decode() for p in (fast, slow)]
        assert (fast.returncode, slow.returncode) == (0, 0), printed
        assert served.wait(PATIENCE_S) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    learnt = [re.search(r"learnt (\S+)$", text.strip())[1] for text in printed]
    assert learnt[0] == learnt[1], "both have the flushed parameters"
    began = float(re.search(r"^began (\S+)$", printed[0], re.M)[1])
    given, drawn = sizes_of(example, OWN_SEED, 0)
    assert began == pytest.approx(given, rel=1e-6)
    assert abs(given - drawn) > 1e-3 * given
    summary = json.loads((example.workdir / "summary.json").read_bytes())
    tape = list(read_tape(example.workdir / "tape.jsonl"))
    assert tape[0]["first_from"] == "fast"
    assert {n: i["joins"] for n, i in summary["islands"].items()} == {
        "fast": 1,
        "slow": 2,
    }
    assert len(tape_checks.outage_seconds(tape)) == 1
    sizes = support.fragment_sizes(read_config(example.workdir))
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    assert set(summary["islands"]["slow"]["tokens_lost"]) <= {"died"}
    assert summary["islands"]["fast"]["tokens_lost"] == {}
    told = [r for r in tape if r["kind"] == "island"]
    restored = [r for r in told if r["record"]["kind"] == "restored"]
    of = {(r["island"], r["incarnation"], r["record"]["start"]) for r in restored}
    assert of == {("slow", 2, 1)}, "its moments are those of its checkpoint"
    assert cli.main(["replay", str(example.workdir), "--trust-code"]) == 2
    assert "gives no loss" in capsys.readouterr().err, "only loops know their steps"


# ---- a line that is cut --------------------------------------------------------------


def test_a_loop_trains_on_while_its_line_is_cut_and_loses_nothing(text, tmp_path):
    config = placed(make_config(text, quorum=1), time_budget_s=2.0)
    tokens = 2 * config.run.sequence_length
    config = with_run(config, total_tokens=250 * tokens)
    with (
        coordinator(config, tmp_path) as service,
        contextlib.closing(Relay(service.address)) as line,
        joined(config, service, address=line.address) as island,
        Stall() as stall,
    ):
        params, longest_s = island.params, 0.0
        while not island.over:
            params = jax.tree.map(lambda x: x + 0.01 * island.learning_rate, params)
            time.sleep(0.02)
            if island.step == 40:
                line.set(up=False, down=False)
                await_state(service, lambda s: s.islands["b"].status == "absent")
            if island.step == 100:
                assert service.lead.state.islands["b"].status == "absent"
                line.set()
            began = time.monotonic()
            params = island.boundary(params)
            if 40 <= island.step <= 100:
                longest_s = max(longest_s, time.monotonic() - began)
    assert longest_s < 1.0 + stall.longest_s, "it waits for nobody"
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    tape = list(read_tape(tmp_path / "tape.jsonl"))
    kinds = {record["kind"] for record in tape}
    assert {"absent", "resumed"} <= kinds
    assert summary["islands"]["b"]["joins"] == 1
    assert summary["islands"]["b"]["tokens_lost"] == {}
    assert summary["islands"]["b"]["tokens_merged"] == 250 * tokens
    sizes = support.fragment_sizes(read_config(tmp_path))
    assert tape_checks.ledger_problems(summary, tape, sizes) == []


# ---- its promises --------------------------------------------------------------------


def joined(config, service, *, address="", **changes):
    """Island b of the config, joined with parameters of the config's model."""
    shapes = build(config.run).shapes()
    fields = {
        "name": "b",
        "like": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        "tokens_per_step": 2 * config.run.sequence_length,
        "incarnation": 1,
        "axes": build(config.run).axes,
    }
    return diloco_jax.join(address or service.address, **(fields | changes))


def await_gone(service):
    """Wait until the coordinator has heard that island b left."""
    await_state(service, lambda s: s.islands["b"].status == "gone")


@pytest.fixture
def alone(text):
    """One island suffices for a merge."""
    return placed(make_config(text, quorum=1), time_budget_s=20.0)


def test_a_loop_that_leaves_early_loses_nothing(alone, tmp_path):
    with coordinator(alone, tmp_path) as service:
        with joined(alone, service) as island:
            params = island.params
            for _ in range(5):
                params = jax.tree.map(lambda x: x + 0.01 * island.learning_rate, params)
                params = island.boundary(params)
            assert island.step == 5
            assert not island.over
        assert island.state()["outstanding"].all(), "all may still be merged"
        await_gone(service)
    summary = json.loads((tmp_path / "summary.json").read_bytes())["islands"]["b"]
    assert summary["tokens_computed"] == 5 * 2 * alone.run.sequence_length
    assert summary["tokens_lost"] == {}


def test_a_loop_that_leaves_within_a_step_loses_what_was_not_taken(alone, tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with coordinator(alone, tmp_path) as service:
        with joined(alone, service) as island:
            params = island.params
            for _ in range(5):
                params = island.boundary(step(params))
            params = step(params)  # No boundary follows.
        await_gone(service)
    summary = json.loads((tmp_path / "summary.json").read_bytes())["islands"]["b"]
    tokens = 5 * 2 * alone.run.sequence_length
    lost = sum(summary["tokens_lost"].values())
    assert summary["tokens_computed"] == tokens
    rounded_down = tokens - summary["tokens_merged"] - lost
    assert 0 <= rounded_down == summary["tokens_in_flight"] <= 2
    assert lost


def train_to_the_end(island):
    params = island.params
    while not island.over:
        params = jax.tree.map(lambda x: x + 0.01 * island.learning_rate, params)
        params = island.boundary(params)


def test_final_has_the_last_merge_however_late_it_comes(text, tmp_path):
    config = placed(make_config(text, quorum=1, codec_down="f32"), time_budget_s=20.0)
    with coordinator(config, tmp_path) as service, joined(config, service) as island:
        fetcher, mailbox = island._host.fetcher, island._host.mailbox
        fetch = fetcher.fetch

        def late(wanted):
            with contextlib.suppress(AssertionError):
                await_that(lambda: mailbox.finished, 1.0)
            return fetch(wanted)

        fetcher.fetch = late
        train_to_the_end(island)
        final = island.final
    expected = diloco_jax.load_params(tmp_path)
    off = jax.tree.map(lambda a, b: float(abs(a - b).max()), final, expected)
    print(off)
    assert max(jax.tree.leaves(off)) <= 1e-6


def test_final_is_refused_where_the_last_merge_did_not_come(alone, tmp_path):
    short = placed(alone, time_budget_s=2.0)
    with coordinator(short, tmp_path) as service, joined(short, service) as island:
        fetcher, mailbox = island._host.fetcher, island._host.mailbox
        fetch = fetcher.fetch

        def broken(wanted):
            if mailbox.finished:
                raise ConnectionLost("by the test")
            time.sleep(0.3)
            return fetch(wanted)

        fetcher.fetch = broken
        train_to_the_end(island)
        with pytest.raises(IslandEndedError, match="did not come to this island"):
            _ = island.final


@pytest.mark.parametrize("inside", [True, False])
def test_an_exception_in_the_block_or_at_its_end_is_told(
    alone, tmp_path, monkeypatch, inside
):
    monkeypatch.setattr(JoinedIsland, "_leave", lambda island: 1 / 0)
    with coordinator(alone, tmp_path) as service:
        with pytest.raises(ZeroDivisionError), joined(alone, service):
            _ = 1 / 0 if inside else 0
        await_gone(service)
    (left,) = (r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "left")
    assert left["reason"] == "failed"


def test_what_does_not_fit_is_named(alone, tmp_path, monkeypatch):
    length = alone.run.sequence_length
    with coordinator(alone, tmp_path) as service:
        with monkeypatch.context() as patched:
            two = Hosts(None, 0, 2)
            patched.setattr("diloco_jax.island.joined.hosts_here", lambda folder: two)
            with pytest.raises(ConfigError, match=r"islands.b.hosts = 1, .* has 2 pro"):
                joined(alone, service)
        for changes, shown in (
            ({"tokens_per_step": 2 * length + 1}, "no multiple of the run's sequence"),
            ({"tokens_per_step": 3 * length}, r"islands.b.batch_size = 2; make them"),
            ({"incarnation": 0}, "counted from 1"),
            ({"every": 0}, "every = 0"),
            ({"like": {"w": jnp.zeros(3, jnp.bfloat16)}, "axes": None}, "bfloat16"),
            ({"like": jnp.zeros(3), "axes": None}, "leaf at the top"),
            (
                {"like": {"w": jnp.zeros(3)}, "axes": None},
                "like, of 1 arrays, cannot be cut as the run cuts its model",
            ),
        ):
            with pytest.raises(ConfigError, match=shown):
                joined(alone, service, **changes)
        with (
            pytest.raises(IslandEndedError, match="no island 'bb', only 'b', 'a'; let"),
            joined(alone, service, name="bb"),
        ):
            pass
        other = {"w": jnp.zeros((4, 4)), "v": jnp.zeros(4)}
        with (
            pytest.raises(IslandEndedError, match="names, shapes and fragments"),
            joined(alone, service, like=other, axes=None),
        ):
            pass
        with joined(alone, service) as island:
            grown = jax.tree.map(lambda x: jnp.zeros((*x.shape, 2)), island.params)
            with pytest.raises(ValueError, match="the island joined with float32"):
                island.boundary(grown)
            with pytest.raises(ValueError, match="give it the parameters alone"):
                island.boundary((island.params, 1))


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("removed", compile_programs),
        ("removed", at_anchors),
        ("finished", compile_programs),
    ],
)
def test_an_end_that_comes_while_it_starts_is_told(
    code, part, alone, tmp_path, monkeypatch
):
    def ends(*given):
        await_that(lambda: not mailbox.tell_left()["fragments_left"])
        mailbox.end(*ending_of(Refused(code, "by an operator")))
        return part(*given)

    monkeypatch.setattr(f"diloco_jax.island.joined.{part.__name__}", ends)
    with coordinator(alone, tmp_path) as service:
        island = joined(alone, service)
        mailbox = island._host.mailbox
        if code == "finished":
            with island:
                assert island.over
        else:
            with pytest.raises(IslandEndedError, match="by an operator"), island:
                pass
        await_gone(service)
    (left,) = [r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "left"]
    assert left["reason"] == ("finished" if code == "finished" else "refused")


def test_a_loop_with_data_of_its_own_and_several_steps_to_a_boundary(alone, tmp_path):
    fields = {"every": 2, "tokens_per_step": alone.run.sequence_length}
    with coordinator(alone, tmp_path) as service:
        with joined(alone, service, own_data=True, **fields) as island:
            params = island.params
            for _ in range(6):
                params = island.boundary(jax.tree.map(np.add, params, params))
            assert island.step == 3
        await_gone(service)
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["islands"]["b"]["data"] == "own"
    tape = list(read_tape(tmp_path / "tape.jsonl"))
    (hello,) = (record for record in tape if record["kind"] == "hello")
    assert hello["environment"]["own_data"] is True
