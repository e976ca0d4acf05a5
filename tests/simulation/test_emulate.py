"""Emulation: the oracle's bits in lockstep, what its seeds decide, and its command."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from config_support import load_config
from emulate_support import CYCLES, check_books, make_config, with_placement
from interruption import until_it_is_raised
from oracle_support import expected_history
from tiny import SEQUENCE_LENGTH

from diloco_jax import EmulationOptions, cli, emulate, sweep
from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.data.loading import Data
from diloco_jax.data.reader import BatchReader
from diloco_jax.data.source import SEGMENTS, TOKENS, WEIGHTS, RowRange
from diloco_jax.simulation import laboratory
from diloco_jax.simulation.bodies import TrainedBody
from diloco_jax.simulation.clock import LineSpeed

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("sync", "seconds"),
    [
        ({"codec_up": "f32", "codec_down": "f32", "overlap_steps": 0}, 0.0),
        ({"codec_up": "int8", "codec_down": "int8", "overlap_steps": 1}, 0.5),
        ({"codec_up": "int8", "codec_down": "f32", "adopt": "overwrite"}, 0.5),
        ({"codec_up": "f32", "codec_down": "int8", "adopt": "blend"}, 0.5),
    ],
    ids=["f32-at-once", "int8-rebase", "overwrite", "blend"],
)
def test_lockstep_gives_the_oracles_bits(sync, seconds, text, monkeypatch) -> None:
    positions: dict[str, list[int]] = {"a": [], "b": []}
    train = TrainedBody.train

    def note(body, drawn, learning_rate):
        positions[body.diary.island] += drawn.tolist()
        train(body, drawn, learning_rate)

    monkeypatch.setattr(TrainedBody, "train", note)
    config = make_config(text, **sync)
    merges = emulate(config, options=EmulationOptions(merge_seconds=seconds)).history
    at = {name: np.array(drawn) for name, drawn in positions.items()}
    expected = expected_history(config, at, CYCLES * 2)
    assert len(expected) == 6
    for index, wanted in enumerate(expected):
        assert merges.merges["fragment"][index] == wanted.fragment
        assert merges.merges["digest"][index] == wanted.digest, wanted


def test_the_seeds_are_all_that_a_result_depends_on(text) -> None:
    def digests(run_seed: int = 0, chance_seed: int = 0) -> list[str]:
        config = make_config(text, quorum=1).replace("seed", run_seed)
        options = EmulationOptions(
            step_spread=0.3,
            failure_every_seconds=20.0,
            down_seconds=2.0,
            chance_seed=chance_seed,
            line=LineSpeed(latency_s=0.1, up_bytes_per_s=1e6, down_bytes_per_s=1e6),
        )
        result = emulate(config, options=options)
        check_books(result)
        return result.history.merges["digest"].tolist()

    first = digests()
    assert digests() == first
    assert digests(run_seed=1)[0] != first[0]
    assert digests(chance_seed=1) != first


@pytest.mark.parametrize("unlike", [False, True])
def test_unlike_shards_are_parts_of_the_text(unlike, tmp_path, monkeypatch) -> None:
    for letter in "xy":
        for index in range(10):
            (tmp_path / f"{letter}{index}.txt").write_text(letter * 1000)
    seen: dict[int, set[int]] = {}
    batch = BatchReader.batch

    def watched(self, positions):
        found = batch(self, positions)
        seen.setdefault(id(self), set()).update(found["tokens"].ravel().tolist())
        return found

    monkeypatch.setattr(BatchReader, "batch", watched)
    config = make_config(str(tmp_path), steps=8)
    check_books(emulate(config, options=EmulationOptions(unlike_shards=unlike)))
    assert len(seen) == 2
    halves = [{ord("x"), ord("y")} <= tokens for tokens in seen.values()]
    assert halves.count(True) == (1 if unlike else 2)


def sweep_once(config, **arguments):
    return sweep(config, {"a": {}}, **arguments)


class Packed:
    """Rows of two documents and padding, of which every other place counts."""

    fields = {"tokens": TOKENS, "segments": SEGMENTS, "weights": WEIGHTS}  # noqa: RUF012
    counted = 4
    """Predictions of a row: places 1, 3 of one document, 7, 9 of the other."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int):
        tokens = np.random.default_rng(row).integers(1, 9, SEQUENCE_LENGTH + 1)
        segments = np.array([1] * 6 + [2] * 6 + [0] * 5)
        weights = np.arange(SEQUENCE_LENGTH) % 2
        return {"tokens": tokens, "segments": segments, "weights": weights}


def test_packed_rows_count_by_positions_and_their_predictions_apart(
    text, monkeypatch
) -> None:
    found = Data(
        train=Packed(),
        validation=RowRange(Packed(), 0, 5),
        digest="d" * 16,
        largest=8,
        bytes_per_token=None,
    )
    for module in ("data.loading", "simulation.emulate"):
        monkeypatch.setattr(
            f"diloco_jax.{module}.load_data", lambda run, copied=False: found
        )
    config = make_config(text).replace({"data.paths": (), "data.digest": ""})
    result = emulate(config)
    check_books(result)
    assert result.config.run.data.arrays == ("segments", "tokens", "weights")
    rows = result.summary["tokens_computed"] // SEQUENCE_LENGTH
    assert result.summary["tokens_predicted"] == rows * Packed.counted
    for name, island in config.islands.items():
        per_step = island.batch_size * SEQUENCE_LENGTH
        assert result.summary["islands"][name]["tokens_per_step"] == per_step
    assert result.summary["eval_loss"] < np.log(256)
    assert result.summary["eval_bits_per_byte"] is None


def test_five_kinds_of_islands_train_one_model(text) -> None:
    """Those of configs/mixed_five.py, each on a device of this process: each computes
    its share of the tokens, by its batch and the length of its steps, and is merged."""
    five = {
        name: dataclasses.replace(island, mesh_fsdp=1, topology="")
        for name, island in load_config(CONFIGS / "mixed_five.py").islands.items()
    }
    config = make_config(text, fragments=2, steps_per_cycle=8, overlap_steps=2)
    rows = sum(island.batch_size for island in five.values())
    config = config.replace("total_tokens", 40 * rows * SEQUENCE_LENGTH)
    found = emulate(dataclasses.replace(config, islands=five))
    check_books(found)
    assert set(found.summary["islands"]) == set(five)
    for name, island in found.summary["islands"].items():
        assert island["tokens_merged"] > 0, name
        assert island["participation"] > 0.5, name
    speeds = {n: i.batch_size / i.step_seconds for n, i in five.items()}
    computed = {
        n: i["tokens_computed"] / found.summary["tokens_computed"]
        for n, i in found.summary["islands"].items()
    }
    shares = {n: speed / sum(speeds.values()) for n, speed in speeds.items()}
    assert computed == pytest.approx(shares, rel=0.1)


def test_slower_islands_and_pauses_take_their_time(text) -> None:
    config = make_config(text, quorum=1).replace("islands.b.step_seconds", 2.0)
    result = emulate(with_placement(config, faults=("b@3:pause5",)))
    islands = result.summary["islands"]
    assert islands["a"]["median_step_seconds"] == 1.0
    assert islands["b"]["median_step_seconds"] == 2.0
    assert islands["b"]["max_step_gap_seconds"] == 7.0
    assert result.summary["wall_seconds"] == result.history.steps["time"].max()


def test_merges_take_their_time_each_its_own(text) -> None:
    def past_the_second(**times: float) -> list[float]:
        """Return the fraction of a second at which each merge ends."""
        options = EmulationOptions(merge_seconds=0.4, **times)
        merges = emulate(make_config(text), options=options).history.merges
        return [round(float(at), 6) for at in merges["time"] % 1.0]

    assert set(past_the_second()) == {0.4}
    varied = past_the_second(merge_spread=0.2)
    assert len(set(varied)) == len(varied)
    assert 0.2 < sum(varied) / len(varied) < 0.6


def test_history_says_who_computed_sent_and_adopted_when(text) -> None:
    options = EmulationOptions(
        line=LineSpeed(latency_s=0.25), evaluate_every_tokens=600
    )
    result = emulate(make_config(text), options=options)
    history = result.history
    takes, adoptions = history.frame("takes"), history.frame("adoptions")
    assert (takes.arrived - takes.time).round(6).eq(0.25).all()
    # Published at the earliest when the second delta is here, and fetched in 0.5 s.
    first = adoptions[(adoptions.island == "a") & (adoptions.fragment == 0)].iloc[0]
    assert first.version == 1
    assert first.time >= takes[takes.fragment == 0].iloc[0].time + 1.0
    merges = history.frame("merges")
    assert {"contributions.a", "contributions.b", "norm"} <= set(merges.columns)
    assert merges.tokens.is_monotonic_increasing
    assert np.isfinite(history.steps["loss"]).all()
    assert len(history.evaluations["loss"]) == 3, "two on the way, and the end"
    assert result.summary["eval_loss"] < history.evaluations["loss"][0]
    assert result.summary["bytes_up"] > result.summary["bytes_down"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_spread": -1.0}, r"step_spread = -1.0; .*at least 0, at most 1"),
        ({"merge_spread": 1.5}, r"merge_spread = 1.5; .*at least 0, at most 1"),
        ({"chance_seed": -1}, r"chance_seed = -1; .*at least 0"),
        ({"joins": {"c": (0.0, 1.0)}}, r"'c', which is no island.*there are b, a"),
        ({"joins": {"a": (2.0, 1.0)}}, r"joins.a = 2 to 1; choose 0 <= from < to"),
        ({"line": LineSpeed(up_bytes_per_s=0.0)}, r"up_bytes_per_s = 0.0; .* above 0"),
        ({"merge_seconds": 1e6}, r"merge_seconds = 1e\+06: .* must be at most 500000"),
    ],
)
def test_unfit_options_are_named(change, message, text) -> None:
    with pytest.raises(ConfigError, match=message):
        emulate(make_config(text), options=EmulationOptions(**change))


@pytest.mark.parametrize("call", [emulate, laboratory.run, sweep_once])
@pytest.mark.parametrize("options", [{}, {"merge_seconds": 1.0}])
def test_options_of_another_class_are_named(options, call, text) -> None:
    with pytest.raises(ConfigError, match=r"options = {.*; give an EmulationOptions"):
        call(make_config(text), options=options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", r"islands.b.step_seconds = 0; virtual time"),
        ("coordinator@3:hang", "merge 3 that is not emulated; give coordinator@3:kill"),
        ("coordinator@3:kill-prepared", "merge 3 that is not emulated; give coord"),
        ("coordinator#2@3:kill", "merge 3 that is not emulated; give coordinator@3"),
        ("a@3:nan", "which no emulated island has"),
    ],
)
def test_what_is_not_emulated_is_refused(fault, message, text) -> None:
    config = with_placement(make_config(text), faults=(fault,) if fault else ())
    if not fault:
        config.islands["b"] = IslandConfig(batch_size=2)
    with pytest.raises(ConfigError, match=message):
        emulate(config)


def test_the_command_leaves_config_history_and_summary(text, tmp_path, capsys) -> None:
    from diloco_jax.config.loading import write_config_json

    path, workdir = tmp_path / "config.json", tmp_path / "run"
    write_config_json(make_config(text), path)
    arguments = ["emulate", str(path), "--workdir", str(workdir), "--json"]
    assert cli.main([*arguments, "--line.latency-s", "0.1"]) == 0
    output = capsys.readouterr()
    summary = json.loads(output.out)
    assert summary == json.loads((workdir / "summary.json").read_text())
    assert (workdir / "config.json").exists()
    assert len((workdir / "history" / "merges.csv").read_text().splitlines()) > 6
    assert "validation loss" in output.err
    assert cli.main(arguments) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ended_early_leaves_no_folder(text, tmp_path, monkeypatch, number, capsys):
    from diloco_jax.config.loading import write_config_json

    path, workdir = tmp_path / "config.json", tmp_path / "run"
    write_config_json(make_config(text), path)

    def interrupted(*arguments, **options):
        assert (workdir / "config.json").exists()
        os.kill(os.getpid(), number)
        until_it_is_raised()

    monkeypatch.setattr("diloco_jax.simulation.emulate.emulate", interrupted)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert cli.main(["emulate", str(path), "--workdir", str(workdir)]) == 1
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not workdir.exists()
    assert f"nothing is kept: {workdir} is as it was" in capsys.readouterr().err
