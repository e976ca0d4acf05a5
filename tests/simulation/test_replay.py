"""An emulated run, written to a tape, is repeated from it: every merge has its bits,
where bits must be the same."""

import contextlib
import dataclasses
import io
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from emulate_support import make_config, record, with_placement
from msgspec.structs import replace
from rich.console import Console

from diloco_jax import EmulationOptions, before_jax, compilation, files, load_params
from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.coordinator.journal import FragmentBack, Recovered
from diloco_jax.evaluation import run as evaluate
from diloco_jax.island.device.exchange import Restored
from diloco_jax.models.build import build
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol.messages import Version, to_pass_on
from diloco_jax.simulation.emulate import _Emulator
from diloco_jax.simulation.island import VirtualIsland
from diloco_jax.simulation.replay import replay, worker
from diloco_jax.simulation.replay.recording import (
    SAME_BITS,
    Between,
    Recording,
    TapedRecord,
    Who,
    read_recording,
)
from diloco_jax.weights.first import first_params

RUNS = {
    **{rule: {"sync.adopt": rule} for rule in ("keep", "rebase", "overwrite")},
    "by use": {"sync.weights_by_use": "rows", "model.tied_embeddings": False},
}
FAULTS = ("b@5:kill", "coordinator@6:kill")
OPTIONS = EmulationOptions(merge_seconds=0.5, step_spread=0.3, down_seconds=3.0)
WHO = Who("a", 1)


class Here(contextlib.nullcontext):
    """A worker that is this process; calls and answers go through bytes."""

    def __init__(self, run, recorded):
        super().__init__(self)
        self.environment = before_jax.describe_environment()
        self._copies = worker.Copies(run)

    def ask(self, *call):
        who, method, *arguments = worker.unpack(worker.pack(call))
        answer = self._copies.carry_out(Who(*who), method, arguments)
        return worker.unpack(worker.pack(answer))

    send = ask


def test_what_nobody_used_rests_in_a_fragment_that_came_back() -> None:
    """As at the coordinator, whose publishes say it."""
    said, own = [], object.__new__(replay.Replay)
    held = {
        "snapshot": "arrays",
        "publish": replay.KeptPublish(b"octets", {1: b"rows"}),
    }
    own._used = SimpleNamespace(take=lambda use: held[use[0]])
    own._keep = lambda fragment: None
    own._store = SimpleNamespace(
        load=lambda *_: None, replay=lambda *_, **how: said.append(how)
    )
    back = SimpleNamespace(fragment=0, snapshot=Version(1, 1))
    own._restore(back, [SimpleNamespace(version=Version(1, 2), final=False)])
    assert said == [{"final": False, "unused": {1: b"rows"}}]


@pytest.fixture(scope="module")
def recordings(text, tmp_path_factory) -> dict[str, Recording]:
    """Takes are merged, opened again, dropped and reset; versions are adopted in
    chains, and beside pending takes; an island and the coordinator come back."""
    found = {}
    for name, changes in RUNS.items():
        config = make_config(text, quorum=1, grace=0.0, steps=60)
        config = config.replace({"islands.b.step_seconds": 2.5, **changes})
        config = with_placement(config, faults=FAULTS, merge_route="xla")
        workdir = tmp_path_factory.mktemp("run")
        record(config, OPTIONS, workdir, unfit=4)
        found[name] = read_recording(workdir)
    return found


@pytest.fixture
def recording(recordings) -> Recording:
    return recordings["keep"]


def with_life(recording: Recording, **changes) -> Recording:
    """The recording with other facts of an incarnation."""
    life = dataclasses.replace(recording.lives[WHO], **changes)
    return dataclasses.replace(recording, lives={**recording.lives, WHO: life})


def with_coordinators(recording: Recording, first: dict, second: dict) -> Recording:
    """The recording with other facts of both lives of the coordinator."""
    (merges, back), *others = recording.between
    back = replace(back, environment={**back.environment, **second})
    return dataclasses.replace(
        recording,
        environment={**recording.environment, **first},
        between=(Between(merges, back), *others),
    )


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(replay, "Worker", Here)


@pytest.mark.parametrize("name", RUNS)
def test_every_merge_has_the_same_bits(recordings, name):
    recording = recordings[name]
    assert len(recording.merges) > 20
    fragments = len(recording.between) - 1
    kinds = [Recovered, *[FragmentBack] * fragments]
    assert [type(event.record) for event in recording.between] == kinds
    assert fragments == recording.config.run.sync.fragments
    assert Who("b", 2) in recording.lives
    with replay.Replay(recording) as repeated:
        tables = {
            fragment
            for fragment, pieces in enumerate(repeated._store.plan.fragments)
            if any(piece.by_use for piece in pieces)
        }
        for merge, (publish, _) in repeated.merges():
            assert publish == merge.made.digest, merge
            counted = {bool(part.uses) for part in merge.made.contributions}
            assert counted == {merge.made.fragment in tables}
    assert repeated.steps > 50
    assert bool(tables) == (name == "by use")
    parts = [part for merge in recording.merges for part in merge.made.contributions]
    assert len({part.uses for part in parts}) > 10 or not tables
    taped = [r.kind for life in recording.lives.values() for _, r in life.records]
    assert {"reopened", "reset"} & {*taped}


def test_counts_of_use_that_are_not_those_of_the_tape_are_named(recordings):
    recording = recordings["by use"]
    merges = list(recording.merges)
    number = next(n for n, m in enumerate(merges) if m.made.contributions[0].uses)
    made = merges[number].made
    first, *others = made.contributions
    parts = (replace(first, uses="feed"), *others)
    merges[number] = merges[number]._replace(made=replace(made, contributions=parts))
    changed = dataclasses.replace(recording, merges=tuple(merges))
    named = rf"line {merges[number].line}: the delta of {first.island} has counts of "
    with (
        replay.Replay(changed) as repeated,
        pytest.raises(TapeError, match=f"{named}use of digest 'feed'"),
    ):
        list(repeated.merges())


def test_the_first_merge_that_differs_is_named_and_what_was_before_it_saved(
    recording, tmp_path
):
    saved = tmp_path / "saved"
    merges = list(recording.merges)
    fourth = merges[3]
    merges[3] = fourth._replace(made=replace(fourth.made, digest="feed"))
    changed = dataclasses.replace(recording, merges=tuple(merges))
    outcome = replay.run(changed, Console(file=io.StringIO()), saved)
    assert (outcome.merges, outcome.identical) == (3, False)
    found = outcome.first_mismatch
    assert (found["merge"], found["line"]) == (4, fourth.line)
    assert found["digest_on_tape"] == "feed" != found["digest"]
    assert f"merge 4 (line {fourth.line}" in str(outcome)
    assert str(outcome).endswith("was altered before it")
    early = evaluate(recording.config, saved)
    assert (early["eval_merges"], early["eval_loss"] > 0) == (3, True)
    assert 0 < early["eval_tokens"] < recording.config.run.total_tokens


def test_moments_that_follow_from_what_nobody_heard_are_repeated(
    text, tmp_path, monkeypatch
):
    """b is cut off as a version has arrived, adopts it, makes another step, saves a
    checkpoint and dies; it comes back with it."""
    saved: list[Restored] = []
    make, deliver = _Emulator._make_body, VirtualIsland._deliver
    boundary = VirtualIsland._at_boundary

    def made(emulator, name):
        body = make(emulator, name)
        body.world = emulator._world
        if name == "b" and saved:
            body._kept = saved[0]
        return body

    def cut_off(island):
        deliver(island)
        if (island.name, island.steps > 5, saved) == ("b", True, []):
            island.disconnect()

    def saves(island):
        boundary(island)
        unheard = island._conversation.unsent(0)
        adopted = [r.step for r in unheard if r.kind == "adopted"]
        alone = (island.name, island.line, saved) == ("b", None, [])
        if alone and min(adopted, default=island.steps) < island.steps:
            moments = map(np.array, island._body._replica.trees()["moments"])
            passed_on = tuple(to_pass_on(1, unheard))
            saved.append(Restored(1, island.steps, list(moments), {}, passed_on))
            world = island._body.world
            world.clock.after(0.0, lambda: world._fail("b", 1))

    monkeypatch.setattr(_Emulator, "_make_body", made)
    monkeypatch.setattr(VirtualIsland, "_deliver", cut_off)
    monkeypatch.setattr(VirtualIsland, "_at_boundary", saves)
    config = make_config(text, quorum=1, grace=0.0, steps=40)
    config = config.replace("islands.b.step_seconds", 2.5)
    record(with_placement(config, merge_route="xla"), OPTIONS, tmp_path)
    recording = read_recording(tmp_path)
    restored = recording.lives[Who("b", 2)].restored()
    assert (restored.who, restored.steps) == (Who("b", 1), saved[0].steps)
    assert "adopted" in [record["kind"] for record in restored.unheard]
    assert replay.run(recording, Console(file=io.StringIO())).identical


def test_all_kinds_of_records_were_repeated(recordings):
    taped = [
        record
        for recording in recordings.values()
        for life in recording.lives.values()
        for _, record in life.records
    ]
    kinds = {record.kind for record in taped}
    assert {"reopened", "dropped", "reset", "progress", "granted"} <= kinds
    assert any(record.kind == "adopted" and record.tick >= 0 for record in taped)


@pytest.mark.parametrize(
    ("kind", "change", "bad"),
    [
        ("granted", {"stop": 5}, "did step 1 without data.* 5 sequences"),
        ("took", {"start": 1}, "start=1.*start=0"),
        ("took", {"version": Version(1, 1)}, "number=1.*number=0"),
        ("adopted", {"version": Version(1, 1)}, r"version \(1, 1\) of fragment 0 befo"),
    ],
)
def test_a_record_that_does_not_fit_is_named(recording, kind, change, bad):
    changed = list(recording.lives[WHO].records)
    number, (line, taped) = next(
        (n, each) for n, each in enumerate(changed) if each.record.kind == kind
    )
    changed[number] = TapedRecord(line, replace(taped, **change))
    with (
        replay.Replay(with_life(recording, records=changed)) as repeated,
        pytest.raises(TapeError, match=f"line .*{bad}"),
    ):
        list(repeated.merges())


def test_each_use_on_the_tape_is_served_once(recordings):
    """So that no anchor stays in memory longer than it is needed."""
    recording = recordings["keep"]
    used, first = replay.UsedVersions(recording), Version(1, 0)
    value = np.zeros(3, np.float32)
    used.keep(("anchor", 0, first), (value,))
    with pytest.raises(KeyError):
        used.anchor(0, Version(1, 1))
    served = 0
    with contextlib.suppress(KeyError):
        while used.anchor(0, first) == value.tobytes():
            served += 1
    lives = recording.lives.values()
    assert served == sum(life.begins()[0] == first for life in lives) > 0


# ---- where it cannot be -------------------------------------------------------------


@pytest.mark.parametrize(
    "routes", [("xla", "xla"), ("native", "xla"), ("xla", "native")]
)
def test_each_life_of_the_coordinator_merges_by_its_route(recording, routes):
    facts = [{"merge_route": route} for route in routes]
    changed, found = with_coordinators(recording, *facts), []
    with replay.Replay(changed) as repeated:
        found.append(repeated._store.describe()["merge_route"])
        repeated._follow(changed.between[0])
        found.append(repeated._store.describe()["merge_route"])
    assert tuple(found) == routes


@pytest.mark.parametrize("route", ["native", "of tomorrow"])
def test_a_route_that_is_not_to_be_had_is_refused(recording, route, monkeypatch):
    def absent():
        raise compilation.NativeError("no C compiler")

    monkeypatch.setattr(compilation, "_passes", absent)
    changed = with_coordinators(recording, {"merge_route": route}, {})
    with pytest.raises(ConfigError, match=f"by the route '{route}', here it .*\"xla\""):
        replay.Replay(changed)


@pytest.mark.parametrize("fact", SAME_BITS)
def test_another_machine_is_refused(recording, fact):
    another = {fact: "another"}
    with pytest.raises(ConfigError, match=f"coordinator had {fact} = 'another', here"):
        replay.Replay(with_coordinators(recording, {}, another))
    environment = {**recording.lives[WHO].environment, **another}
    with (
        replay.Replay(with_life(recording, environment=environment)) as repeated,
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
    changed = with_life(
        recording,
        environment={**life.environment, **environment},
        config=dataclasses.replace(life.config, **config),
    )
    with (
        replay.Replay(changed) as repeated,
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
    run = recording.config.run
    saved, begun = load_params(folder), first_params(run, build(run))
    assert jax.tree.all(jax.tree.map(np.array_equal, saved, begun))


def test_other_text_is_refused(recording, tmp_path):
    (tmp_path / "text").write_text("other words " * 20)
    config = recording.config.replace("data.paths", (str(tmp_path / "text"),))
    with pytest.raises(ConfigError, match=r"data\.digest = .*--data\.paths"):
        replay.Replay(dataclasses.replace(recording, config=config))


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
