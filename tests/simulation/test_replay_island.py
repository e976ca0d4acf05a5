"""An emulated run, written to a tape, is repeated from it: every merge has its bits."""

import contextlib
import dataclasses
import io

import numpy as np
import pytest
from emulate_support import make_config, record, with_placement
from msgspec.structs import replace
from rich.console import Console

from diloco_jax import EmulationOptions, before_jax
from diloco_jax.evaluation import run as evaluate
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.replay import replay
from diloco_jax.simulation.replay.recording import (
    Recording,
    Recovery,
    Restoration,
    TapedRecord,
    Who,
    read_recording,
)
from diloco_jax.simulation.replay.worker import Copies, pack, unpack

RULES = ("keep", "rebase", "overwrite")
FAULTS = ("b@5:kill", "coordinator@6:kill")
OPTIONS = EmulationOptions(merge_seconds=0.5, step_spread=0.3, down_seconds=3.0)


class Here(contextlib.nullcontext):
    """A worker that is this process; calls and answers go through bytes."""

    def __init__(self, run, recorded):
        super().__init__(self)
        self.environment = before_jax.describe_environment()
        self._copies = Copies(run)

    def ask(self, *call):
        who, method, *arguments = unpack(pack(call))
        return unpack(pack(self._copies.carry_out(Who(*who), method, arguments)))

    send = ask


@pytest.fixture(scope="module")
def recordings(text, tmp_path_factory) -> dict[str, Recording]:
    """Takes are merged, opened again, dropped and reset; versions are adopted in
    chains, and beside pending takes; an island and the coordinator come back."""
    found = {}
    for rule in RULES:
        config = make_config(text, quorum=1, grace=0.0, adopt=rule, steps=60)
        config = config.replace("islands.b.step_seconds", 2.5)
        config = with_placement(config, faults=FAULTS, merge_route="xla")
        workdir = tmp_path_factory.mktemp(rule)
        record(config, OPTIONS, workdir, unfit=4)
        found[rule] = read_recording(workdir)
    return found


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(replay, "Worker", Here)


@pytest.mark.parametrize("rule", RULES)
def test_every_merge_has_the_same_bits(recordings, rule):
    recording = recordings[rule]
    assert len(recording.merges) > 20
    fragments = len(recording.between) - 1
    kinds = [Recovery, *[Restoration] * fragments]
    assert [type(event) for event in recording.between] == kinds
    assert fragments == recording.config.run.sync.fragments
    assert Who("b", 2) in recording.lives
    with replay.Replay(recording) as repeated:
        for merge, found in repeated.merges():
            assert found.publish == merge.made.digest, merge
    assert repeated.steps > 50


def test_the_first_merge_that_differs_is_named_and_what_was_before_it_saved(
    recordings, tmp_path
):
    recording, saved = recordings["keep"], tmp_path / "saved"
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
    early = evaluate(recording.config, saved)
    assert (early["eval_merges"], early["eval_loss"] > 0) == (3, True)
    assert 0 < early["eval_tokens"] < recording.config.run.total_tokens


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
def test_a_record_that_does_not_fit_is_named(recordings, kind, change, bad):
    recording = recordings["keep"]
    life = recording.lives[Who("a", 1)]
    number, (line, taped) = next(
        (n, each) for n, each in enumerate(life.records) if each.record.kind == kind
    )
    changed = list(life.records)
    changed[number] = TapedRecord(line, replace(taped, **change))
    lives = {**recording.lives, life.who: dataclasses.replace(life, records=changed)}
    recording = dataclasses.replace(recording, lives=lives)
    with (
        replay.Replay(recording) as repeated,
        pytest.raises(TapeError, match=f"line .*{bad}"),
    ):
        list(repeated.merges())


def test_each_use_on_the_tape_is_served_once(recordings):
    used = replay.UsedVersions(recordings["keep"])
    first = Version(1, 0)
    served = 0
    for value in (np.zeros(3, np.float32),):
        used.keep(("anchor", 0, first), (value,))
    with pytest.raises(KeyError):
        used.anchor(0, Version(1, 1))
    with contextlib.suppress(KeyError):
        while used.anchor(0, first) == np.zeros(3, np.float32).tobytes():
            served += 1
    lives = recordings["keep"].lives.values()
    assert served == sum(life.begins()[0] == first for life in lives) > 0
