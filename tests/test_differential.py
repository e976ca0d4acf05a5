"""The comparison with another commit: equal decisions are equal, others are found."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SEEDS = range(1)
Line = list[Any]


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recording of the decisions of this checkout's own code."""
    from differential_record import record

    path = tmp_path_factory.mktemp("recordings") / "recording.jsonl.gz"
    record(SEEDS, path)
    return path


def tampered(recording: Path, call: str, change: Callable[[Line], bool]) -> Path:
    """A recording with the first call changed for which `change` returns True."""
    lines = [
        json.loads(line)
        for line in gzip.decompress(recording.read_bytes()).decode().splitlines()
    ]
    assert any(line[0] == call and change(line) for line in lines)
    path = recording.with_name("tampered.jsonl.gz")
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def loses_an_effect(line: Line) -> bool:
    effects = line[3][1]
    return bool(effects) and effects.pop() is not None


def does_not_send(line: Line) -> bool:
    asked = line[2]
    return bool(asked) and asked.pop() is not None


def learns_faster(line: Line) -> bool:
    line[3] += 1e-9
    return True


def finds_an_empty_log(line: Line) -> bool:
    log = line[1][0][2]
    is_news = bool(log)
    log.clear()
    return is_news


def comes_later(line: Line) -> bool:
    line[1][0][-1] += 1e-6
    return True


def test_the_same_code_decides_the_same(recording: Path) -> None:
    from differential_replay import matched, replay

    compared = replay(recording)
    assert compared.holds, str(compared)
    assert not compared.not_compared, str(compared)
    assert compared.schedules == len(SEEDS)
    assert compared.effects > compared.events > 200
    assert compared.calls["Boundary.act"] > 100
    assert not matched(recording, recording).differences


@pytest.mark.parametrize(
    ("call", "change"),
    [
        ("step", loses_an_effect),
        ("Boundary.act", does_not_send),
        ("Pace.learning_rate", learns_faster),
    ],
)
def test_another_decision_is_found(
    recording: Path, call: str, change: Callable[[Line], bool]
) -> None:
    from differential_replay import replay

    compared = replay(tampered(recording, call, change))
    assert dict(compared.differences) == {call: 1}
    assert f"schedule {SEEDS[0]}" in compared.shown[0]


def test_another_state_is_found_by_what_follows(recording: Path) -> None:
    from differential_replay import replay

    compared = replay(tampered(recording, "recover", finds_an_empty_log))
    assert compared.differences["step"]


def test_an_event_that_comes_at_another_time_is_found(recording: Path) -> None:
    from differential_replay import matched

    later = tampered(recording, "step", comes_later)
    assert matched(recording, later).differences.total() == 1


def test_a_decision_that_is_not_there_any_more_does_not_pass(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import differential_replay

    places = {**differential_replay.FUNCTIONS, "step": ()}
    monkeypatch.setattr(differential_replay, "FUNCTIONS", places)
    compared = differential_replay.replay(recording)
    assert not compared.holds
    assert compared.not_compared["step"] > 200


def test_a_recorded_value_is_brought_into_new_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import differential_values as values

    names = {"old": "new", "old.events": "new.messages", "old.events.Ask": "new.Take"}
    monkeypatch.setattr(values, "NAMES", names)
    monkeypatch.setattr(values, "FIELDS", {"old.events.Ask": {"by": "at", "why": None}})
    told = [{"": "new.messages.Told", "to": name} for name in "ab"]
    monkeypatch.setattr(values, "REWRITES", {"new.messages.Tell": lambda *_: told})
    recorded = [
        {"": "old.events.Ask", "by": {"": "old.state.At", "s": 1.5}, "why": "x"},
        {"": "old.events.Tell", "all": ["a", "b"]},
    ]
    values.new_name.cache_clear()
    call = values.Call("step", (), None)
    assert values.renamed(recorded, call) == [
        {"": "new.Take", "at": {"": "new.state.At", "s": 1.5}},
        *told,
    ]
    values.new_name.cache_clear()
