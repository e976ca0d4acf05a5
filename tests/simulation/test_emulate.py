"""Emulation: the oracle's bits in lockstep, what its seeds decide, failures and books,
tables that are weighed by use, and the command."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from config_support import load_config
from emulate_support import CYCLES, check_books, make_config, with_placement
from interruption import until_it_is_raised
from oracle_support import expected_history
from rich.console import Console
from tiny import SEQUENCE_LENGTH

from diloco_jax import Config, Emulation, EmulationOptions, cli, emulate, sweep
from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.data.loading import Data
from diloco_jax.data.reader import BatchReader
from diloco_jax.data.source import SEGMENTS, TOKENS, WEIGHTS, RowRange
from diloco_jax.models.build import build
from diloco_jax.protocol.coordinator.state import Alert
from diloco_jax.simulation import laboratory
from diloco_jax.simulation.bodies import Diary, TrainedBody
from diloco_jax.simulation.clock import LineSpeed
from diloco_jax.simulation.coordinator import World
from diloco_jax.simulation.emulate import run
from diloco_jax.weights.first import first_pieces

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
    assert len(history.evaluations["loss"]) == 4, "two, before the flush, and the end"
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
        ("a@3:hang", r"faults, a@3 = inf: .* must be at most 500000"),
        ("a@3:pause1000000000", r"faults, a@3 = 1e\+09: .* must be at most 500000"),
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


def test_a_result_that_cannot_be_written_is_told(text, tmp_path, monkeypatch, capsys):
    """Hours were lost with it, and the folder was left."""
    workdir = tmp_path / "run"

    def full(emulation: Emulation, folder: Path) -> None:
        (folder / "history").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Emulation, "write", full)
    config = make_config(text).replace("workdir", str(workdir))
    with pytest.raises(OSError, match="No space left"):
        run(config, "mine.py", Console(), EmulationOptions())
    assert "goodput 1.000, uptime" in capsys.readouterr().out
    assert not workdir.exists()


LIVES = "diloco_jax.simulation.emulate.LIVES_IN_VAIN"


def test_a_kill_costs_what_was_not_merged(text) -> None:
    config = with_placement(make_config(text, steps=40), faults=("b@13:kill",))
    result = emulate(config, options=EmulationOptions(down_seconds=3.0))
    check_books(result)
    victim = result.summary["islands"]["b"]
    # The steps of less than a cycle in every fragment.
    assert 0 < victim["tokens_lost"]["died"] <= 4 * 2 * SEQUENCE_LENGTH
    assert victim["joins"] == 2
    assert result.summary["islands"]["a"]["tokens_lost"] == {}
    lives = result.history.frame("lives")
    assert lives[lives.island == "b"].end.tolist() == ["died", "finished"]
    died, back = lives[lives.island == "b"].iloc[0], lives[lives.island == "b"].iloc[1]
    assert back.began == died.ended + 3.0
    # It begins at the newest version, not at those that it once joined with.
    adoptions = result.history.frame("adoptions")
    again = adoptions[(adoptions.island == "b") & (adoptions.incarnation == 2)]
    assert again.version.min() > 3


def test_a_killed_island_comes_back_each_time(text) -> None:
    """Whatever `placement.restarts` says, which counts in runs alone."""
    twice = ("b@3:kill", "b#2@3:kill")
    config = make_config(text, steps=40, quorum=1)
    result = emulate(with_placement(config, faults=twice, restarts=0))
    lives = result.history.frame("lives").query("island == 'b'")
    assert lives.end.tolist() == ["died", "died", "finished"]


def test_if_nobody_is_left_the_user_is_told(text) -> None:
    options = EmulationOptions(joins={"a": (0.0, 5.0), "b": (0.0, 6.0)})
    with pytest.raises(ConfigError, match=r"at .* s no island is left.* of its 1536"):
        emulate(make_config(text), options=options)


def test_a_coordinator_that_is_away_costs_nobody_a_step(text) -> None:
    config = make_config(text, steps=60)
    calm = emulate(config)
    faults = ("coordinator@9:kill", "coordinator@20:pause2.5")
    struck = with_placement(config, faults=faults)
    result = emulate(struck, options=EmulationOptions(down_seconds=7.0))
    check_books(result)
    merges = result.history.frame("merges")
    gaps = merges.time.diff().fillna(0)
    usual = calm.history.frame("merges").time.diff().max()
    assert (gaps > usual).sum() == 2, "it was away twice"
    assert gaps[9] > 7.0, "after its ninth merge"
    assert 2.5 < gaps[20] < 7.0, "after the twentieth"
    for name, island in result.summary["islands"].items():
        assert island["joins"] == 1, "islands come back as they were"
        assert island["tokens_lost"] == {}
        assert island["stalled_seconds"] == pytest.approx(0, abs=1e-6)
        assert island["steps"] == calm.summary["islands"][name]["steps"]
    for of_fragment in merges.groupby("fragment").version.apply(list):
        assert of_fragment == sorted(set(of_fragment)), "no version twice"
    dies = with_placement(config, faults=("coordinator@9:pause8", "b@20:kill"))
    result = emulate(dies, options=EmulationOptions(down_seconds=2.0))
    check_books(result)
    assert result.summary["islands"]["b"]["joins"] == 2
    back = result.history.frame("lives").query("island == 'b'").iloc[1].first_step
    ninth = result.history.merges["time"][8]
    assert back >= ninth + 8.0, "nobody joins while it is away"


def test_failures_without_progress_between_them_end_it(text, monkeypatch) -> None:
    monkeypatch.setattr(LIVES, 20)

    hopeless = EmulationOptions(failure_every_seconds=0.01)
    with pytest.raises(ConfigError, match=r"seconds = 0.01: .* 20 .* of its 1536") as e:
        emulate(make_config(text), options=hopeless)
    with pytest.raises(ConfigError, match=re.escape(str(e.value))):
        emulate(make_config(text), options=hopeless)
    # Those with progress between them are counted anew.
    monkeypatch.setattr(LIVES, 3)
    options = EmulationOptions(failure_every_seconds=20.0, down_seconds=2.0)
    found = emulate(make_config(text, steps=60, quorum=1), options=options)
    assert found.history.lives["end"].tolist().count("died") > 3


def test_alerts_are_as_many_as_a_runs_and_name_absent_islands(
    text, monkeypatch
) -> None:
    run = World.run

    def alerting(world: World) -> None:
        for number in range(25):
            world.coordinator.carry_out(Alert(text=f"{number}"))
        run(world)

    monkeypatch.setattr(World, "run", alerting)
    options = EmulationOptions(joins={"b": (1000.0, 2000.0)})
    found = emulate(make_config(text, quorum=1), options=options).summary["alerts"]
    assert found == [
        *(f"{number}" for number in range(5, 25)),
        "island b never made a step: see its log",
    ]


def test_a_diverged_emulation_tells_of_skipped_steps(text) -> None:
    result = emulate(make_config(text).replace("inner.learning_rate", 1e12))
    steps = result.history.frame("steps")
    for name, island in result.summary["islands"].items():
        diverged = int(steps[steps.island == name].loss.isna().sum())
        assert 0 < diverged <= island["skipped_steps"] < island["steps"]


def test_an_island_takes_part_for_a_while(text) -> None:
    config = make_config(text, steps=30, quorum=1)
    options = EmulationOptions(joins={"b": (5.0, 15.5)})
    result = emulate(config, options=options)
    check_books(result)
    steps = result.history.frame("steps")
    mine = steps[steps.island == "b"]
    assert (mine.began.min(), mine.time.max()) == (5.0, 15.0)
    assert result.history.lives["end"].tolist() == ["finished", "left"]
    computed = result.summary["islands"]["b"]["tokens_computed"]
    assert computed == len(mine) * 2 * SEQUENCE_LENGTH
    # Without it, the other one goes on alone, and the run has its tokens.
    assert result.summary["islands"]["a"]["steps"] > 30
    assert result.summary["phase"] == "done"


def test_measures_are_of_completed_steps_and_stalls_never_negative():
    chance = np.random.default_rng(0)
    for _ in range(20):
        seconds = chance.exponential(0.1, 50).tolist()
        ends = np.cumsum(seconds).tolist()
        diary = Diary(
            island="a",
            incarnation=1,
            tokens_per_step=1,
            began=0.0,
            compile_seconds=0.0,
            steps=2,
            rows=[
                [began, each, 0.1, 1.0, index != 1, 3]
                for index, (began, each) in enumerate(
                    zip([0.0, *ends], seconds, strict=False)
                )
            ],
        )
        measures = diary.measures()
        assert (measures.skipped_steps, measures.tokens_predicted) == (1, 6)
        diary.steps = 50
        assert 0 <= diary.measures().stalled_seconds < 1e-9


def by_use(text: str, **settings) -> Config:
    config = make_config(text, weights_by_use="rows", **settings)
    return config.replace("model.tied_embeddings", False)


def test_a_row_that_no_text_has_keeps_its_first_bits(text) -> None:
    """Decay moves it on every island, and each drops that with its adoption."""
    config = by_use(text, steps=24)
    found = emulate(config)
    check_books(found)
    run = config.run
    assert run.inner.weight_decay > 0
    first = first_pieces(run, build(run))
    read = b"".join(path.read_bytes() for path in Path(text).iterdir())
    used = np.bincount(np.frombuffer(read, np.uint8), minlength=256) > 0
    used[0] = True  # Between two files.
    before, after = first["embedding"][:256], found.params["embedding"][:256]
    assert not used.all()
    np.testing.assert_array_equal(after[~used], before[~used])
    assert (after[used] != before[used]).any(axis=1).mean() > 0.9
    plain = emulate(config.replace("sync.weights_by_use", "none"))
    moved = plain.params["embedding"][:256] != before
    assert moved[~used].any(axis=1).all()


def test_a_tied_table_keeps_the_islands_tokens(text) -> None:
    config = make_config(text, steps=8).replace("model.tied_embeddings", True)
    on = config.replace("sync.weights_by_use", "rows")
    np.testing.assert_array_equal(
        emulate(on).params["embedding"], emulate(config).params["embedding"]
    )


def test_a_laboratory_has_no_counts(text) -> None:
    config = by_use(text).replace("islands.b.batch_size", 4)
    with pytest.raises(ConfigError, match=r"weights_by_use = .rows., and a laboratory"):
        laboratory.run(config)
