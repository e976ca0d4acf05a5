"""Replay compares bits only where they must be the same."""

import contextlib
import dataclasses
from multiprocessing import Pipe
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from diloco_jax import before_jax, compilation, files, load_params
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.data.corpus import load_corpus
from diloco_jax.models import transformer
from diloco_jax.protocol.messages import Contribution, Record, Version
from diloco_jax.protocol.records import Merged
from diloco_jax.simulation.replay import replay, worker
from diloco_jax.simulation.replay.recording import (
    SAME_BITS,
    Life,
    RecordedMerge,
    Recording,
    Recovery,
    TapedRecord,
    Who,
)

WHO = Who("a", 1)
RUN = RunConfig(
    model=ModelConfig(
        d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16
    ),
    outer=OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0),
    sync=SyncConfig(fragments=1),
    sequence_length=16,
)


class Worker(contextlib.nullcontext):
    """One that is never asked for anything."""

    def __init__(self, run, recorded):
        super().__init__(self)
        self.environment = before_jax.describe_environment()


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Recording of a run with one merge, on this machine."""
    monkeypatch.setattr(replay, "Worker", Worker)
    (tmp_path / "text").write_text("a few words " * 20)
    paths = (str(tmp_path / "text"),)
    data = DataConfig(paths=paths, digest=load_corpus(paths, 0.02).digest)
    run = dataclasses.replace(RUN, data=data)
    model = transformer.build(run.model)
    here = before_jax.describe_environment()
    took = Record(seq=2, kind="took", step=1, fragment=0, tick=1)
    begins = Record(seq=1, kind="adopted", step=0, fragment=0)
    life = Life(
        who=WHO,
        config=IslandConfig(batch_size=1),
        environment=here,
        total_tokens=run.total_tokens,
        records=[TapedRecord(4, begins), TapedRecord(5, took)],
    )
    part = Contribution(
        island="a", incarnation=1, tick=1, start=0, end=1, tokens=16, base=Version()
    )
    made = Merged(
        fragment=0,
        version=Version(1, 1),
        tick=1,
        final=False,
        contributions=(part,),
        share=1.0,
        verdicts={},
        digest="",
        payload_bytes=0,
    )
    return Recording(
        workdir=tmp_path,
        config=Config(run=run),
        plan_digest=plan_fragments(model.shapes(), model.axes, 1).digest(),
        coordinators=({**here, "merge_route": "xla"},),
        merges=(RecordedMerge(6, 1, made),),
        merges_on_tape=1,
        between=(),
        lives={WHO: life},
    )


def test_all_is_well_here(recording):
    with replay.Replay(recording) as repeated, pytest.raises(AttributeError):
        next(repeated.merges())  # it gets as far as commanding its worker


@pytest.mark.parametrize("route", ["xla", "native"])
def test_replay_merges_by_the_route_of_the_tape(recording, route):
    there = {**recording.coordinators[0], "merge_route": route}
    recording = dataclasses.replace(recording, coordinators=(there,))
    with replay.Replay(recording) as repeated:
        assert repeated._store.describe()["merge_route"] == route


def test_each_life_of_the_coordinator_has_its_route(recording):
    first = recording.coordinators[0]
    recording = dataclasses.replace(
        recording,
        coordinators=(first, {**first, "merge_route": "native"}),
        between=(Recovery(0),),
    )
    with replay.Replay(recording) as repeated:
        assert repeated._store.describe()["merge_route"] == "xla"
        repeated._follow(recording.between[0])
        assert repeated._store.describe()["merge_route"] == "native"


@pytest.mark.parametrize("route", ["native", "of tomorrow"])
def test_a_route_that_is_not_to_be_had_is_refused(recording, route, monkeypatch):
    def absent():
        raise compilation.NativeError("no C compiler")

    monkeypatch.setattr(compilation, "_passes", absent)
    there = {**recording.coordinators[0], "merge_route": route}
    recording = dataclasses.replace(recording, coordinators=(there,))
    with pytest.raises(ConfigError, match=f"by the route '{route}', here it .*\"xla\""):
        replay.Replay(recording)


@pytest.mark.parametrize("fact", SAME_BITS)
def test_another_machine_is_refused(recording, fact):
    there = {**recording.coordinators[0], fact: "another"}
    with pytest.raises(ConfigError, match=f"coordinator had {fact} = 'another', here"):
        replay.Replay(dataclasses.replace(recording, coordinators=(there,)))
    recording.lives[WHO].environment |= {fact: "another"}
    with (
        replay.Replay(recording) as repeated,
        pytest.raises(ConfigError, match=f"incarnation 1 had {fact} = 'another', here"),
    ):
        next(repeated.merges())


@pytest.mark.parametrize(
    ("environment", "config", "message"),
    [
        ({"platform": "tpu", "processes": 4}, {}, "computed on 4 hosts with tpu"),
        ({}, {"batch_size": 99, "mesh_data": 99}, "computed on 99 devices, here"),
    ],
)
def test_what_is_not_here_is_refused(recording, environment, config, message):
    life = recording.lives[WHO]
    life.environment |= environment
    life.config = dataclasses.replace(life.config, **config)
    with (
        replay.Replay(recording) as repeated,
        pytest.raises(ConfigError, match=f"incarnation 1 {message}"),
    ):
        next(repeated.merges())


def test_a_folder_that_cannot_be_made_is_refused_first(recording):
    with pytest.raises(ConfigError, match="--save /proc/x/y: in /proc: no file can"):
        replay.run(recording, Console(), Path("/proc/x/y"))


def test_what_is_saved_is_there_whole_or_not_at_all(recording, tmp_path, monkeypatch):
    folder, save = tmp_path / "new" / "saved", files.write_sealed

    def interrupted(path, *arguments):
        save(path, *arguments)
        if path.name.startswith("state-"):
            raise KeyboardInterrupt

    with replay.Replay(recording) as repeated:
        monkeypatch.setattr(files, "write_sealed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            repeated.save(folder, 0)
        assert not list(folder.parent.iterdir())
        monkeypatch.setattr(files, "write_sealed", save)
        repeated.save(folder, 0)
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]
    saved, begun = (
        load_params(folder),
        jax.jit(transformer.build(RUN.model).init)(jax.random.key(0)),
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, saved, begun))


def test_other_text_is_refused(recording, tmp_path):
    (tmp_path / "text").write_text("other words " * 20)
    with pytest.raises(ConfigError, match=r"data\.digest = .*--data\.paths"):
        replay.Replay(recording)


def test_other_fragments_are_refused(recording):
    recording = dataclasses.replace(recording, plan_digest="feed")
    with pytest.raises(ConfigError, match="digest feed, here it is"):
        replay.Replay(recording)


@pytest.fixture
def pipe(monkeypatch):
    """(its end, ours), of a process that is like this one."""
    monkeypatch.setattr(worker.compilation, "use_cache", lambda folder: None)
    theirs, ours = Pipe()
    ours.send_bytes(worker.pack(worker.Start(RunConfig(), 1, 0, "")))
    ours.send_bytes(worker.pack((WHO, "judge", (0, "settled"))))
    yield theirs, ours
    theirs.close()
    ours.close()


@pytest.mark.parametrize("ends", ["at once", "at a call", "interrupted"])
def test_a_worker_that_is_not_needed_ends_without_a_word(pipe, monkeypatch, ends):
    theirs, ours = pipe

    def carry_out(*call):
        ours.close()
        if ends == "interrupted":
            raise KeyboardInterrupt
        return b"a delta"

    monkeypatch.setattr(worker.Copies, "carry_out", carry_out)
    if ends == "at once":
        ours.close()
    worker.serve(theirs)


def test_what_is_wrong_in_a_worker_is_told(pipe):
    with pytest.raises(KeyError, match="incarnation=1"):
        worker.serve(pipe[0])
