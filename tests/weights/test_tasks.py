"""Multiple-choice tasks: scores as counted by hand, and files that are none."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))
import reference_forward as reference

from diloco_jax import cli
from diloco_jax.config import (
    ConfigError,
)
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.protocol.values import Version
from diloco_jax.weights.first import first_params
from diloco_jax.weights.tasks import open_speaker, read_task, score
from diloco_jax.workdir import read_config

WORDS = ("a", "bb", "of it", "z?", "longer", "\N{GREEK SMALL LETTER ALPHA}")


def drawn(count: int) -> list[dict]:
    """Items with two to four choices of unlike lengths."""
    draw = np.random.default_rng(3)
    items = []
    for number in range(count):
        choices = list(draw.permutation(WORDS)[: draw.integers(2, 5)])
        right = int(draw.integers(len(choices)))
        question = "q" * int(draw.integers(0, 8)) + ("\n" if number % 3 == 0 else "")
        answer = choices[right] if number % 2 else right
        items.append({"question": question, "choices": choices, "answer": answer})
    return items


def by_hand(exported, items) -> tuple[list[bool], list[bool]]:
    """Which items are right, by the likelihood and by that per byte, in float64."""
    plain, per_byte = [], []
    for item in items:
        question, found, each = item["question"], [], []
        for choice in item["choices"]:
            space = "" if not question or question.endswith("\n") else " "
            text = list((question + space + choice).encode())
            logits = reference.logits(*exported, np.array(text))
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            first = max(1, len(question.encode()))
            found.append(sum(log_p[t - 1, text[t]] for t in range(first, len(text))))
            each.append(found[-1] / len(choice.encode()))
        answer = item["answer"]
        if isinstance(answer, str):
            answer = item["choices"].index(answer)
        plain.append(int(np.argmax(found)) == answer)
        per_byte.append(int(np.argmax(each)) == answer)
    return plain, per_byte


def test_the_score_is_a_count_by_hand(workdir, exported, tmp_path, capsys):
    items = drawn(60)
    path = tmp_path / "drawn.json"
    path.write_text(json.dumps(items))
    assert cli.main(["eval", str(workdir), "--tasks", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["eval_tasks"].values()
    plain, per_byte = by_hand(exported, items)
    assert plain != per_byte
    for name, right in (("accuracy", plain), ("accuracy_per_byte", per_byte)):
        assert found[name] == sum(right) / 60
        assert 0 < found[name] < 1
        error = np.std(right, ddof=1) / math.sqrt(60)
        assert found[f"{name}_error"] == pytest.approx(error)
    assert (found["items"], found["cut"]) == (60, 0)


def test_people_are_told_of_every_task(workdir, tmp_path, capsys):
    for name, count in (("one", 1), ("two", 8)):
        (tmp_path / f"{name}.json").write_text(json.dumps(drawn(count)))
    paths = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    assert cli.main(["eval", str(workdir), "--tasks", *paths]) == 0
    shown = capsys.readouterr().err
    assert "one: right " in shown
    assert "(standard error " not in shown.split("two: ")[0], (
        "of one item, there is none"
    )
    assert "two: right " in shown
    assert "of 8 items" in shown


def test_a_kept_cycle_has_its_own_score_and_loss(workdir, tmp_path, capsys):
    """All zeros think every token equally likely, and the first choice is taken. The
    drawn parameters prefer one of two, whichever comes first."""
    run = read_config(workdir).run
    plan = build_plan(run, build(run))
    store = Store(run, plan, first_params(run, build(run)), 0.0)
    cycles = KeptCycles(workdir, 2, {"plan": plan.digest()}, plan.sizes)
    for fragment in range(len(plan.fragments)):
        keep = KeepFragment(
            cycle=4, fragment=fragment, version=Version(1, 2), merges=2, tokens=96
        )
        zeros = [np.zeros_like(a) for a in store.arrays(fragment)["theta"]]
        cycles.keep(keep, zeros, lambda cycle, trouble: None)
    cycles.close(60.0)
    pairs = (["x", "y"], ["y", "x"])
    items = [{"question": "q", "choices": pair, "answer": 0} for pair in pairs]
    (tmp_path / "t.json").write_text(json.dumps(items))
    of_cycle = ["eval", str(workdir), "--cycle", "4", "--json"]
    newest = ["eval", str(workdir), "--json"]
    for command, share, cycle in ((of_cycle, 1.0, 4), (newest, 0.5, None)):
        assert cli.main([*command, "--tasks", str(tmp_path / "t.json")]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["eval_tasks"]["t"]["accuracy"] == share
        assert found.get("eval_cycle") == cycle
    assert cli.main(of_cycle) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_loss"] == pytest.approx(math.log(256), rel=1e-5)
    assert (found["eval_merges"], found["eval_tokens"]) == (2 * len(plan.fragments), 96)
    assert cli.main(["eval", str(workdir), "--cycle", "5"]) == 2
    assert "does not keep it; kept are 4" in capsys.readouterr().err


def test_what_does_not_fit_loses_its_beginning_or_is_refused(workdir, tmp_path):
    speaker = open_speaker(workdir)
    path = tmp_path / "t.json"
    long = {"question": "x" * 40 + "end", "choices": ["aa", "bb"], "answer": 0}
    short = {**long, "question": "x" * 9 + "end"}
    scores = []
    for item in (long, short):
        path.write_text(json.dumps([item]))
        scores.append(score(speaker, read_task(path), 15))
    assert [found["cut"] for found in scores] == [1, 0]
    assert scores[0]["accuracy"] == scores[1]["accuracy"]
    path.write_text(json.dumps([{**long, "choices": ["a", "b" * 15]}]))
    with pytest.raises(ConfigError, match=r"t, item 0: the choice 'b+' has 16 tokens"):
        score(speaker, read_task(path), 15)


ITEM = {"question": "q", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "there is no such file"),
        ("[", "cannot be read as JSON"),
        ("[" * 200_000, "cannot be read as JSON"),
        ([{**ITEM, "question": "a\0"}], r"item 0 has a NUL character \(U\+0000\)"),
        ({"question": "q"}, "is no list of items; write"),
        ([], "is no list of items"),
        ([ITEM, {**ITEM, "answer": 2}], "item 1: answer = 2, but there are 2 choices"),
        ([{**ITEM, "answer": -1}], "item 0: answer = -1"),
        ([{**ITEM, "answer": "c"}], "item 0: answer = 'c' is no choice, or several"),
        ([{**ITEM, "choices": ["a", "a"], "answer": "a"}], "or several"),
        ([{**ITEM, "choices": ["a"]}], r"item 0 has choices = \['a'\]; give two"),
        ([{**ITEM, "choices": ["a", ""]}], "none empty"),
        ([{"question": "q", "choices": ["a", "b"]}], "item 0: .*answer"),
        ([{**ITEM, "anwser": 1}], "item 0: .*anwser"),
        ([{**ITEM, "question": 3}], "item 0: .*str"),
    ],
)
def test_a_file_that_is_no_task_is_named(written, message, tmp_path):
    path = tmp_path / "task.json"
    if written is not None:
        path.write_text(written if isinstance(written, str) else json.dumps(written))
    with pytest.raises(ConfigError, match=f"--tasks {path}.*{message}"):
        read_task(path)


def test_the_mark_before_a_file_is_no_part_of_it(tmp_path):
    (tmp_path / "t.json").write_text("\ufeff" + json.dumps([ITEM]))
    assert len(read_task(tmp_path / "t.json").items) == 1


def test_two_files_of_one_name_are_refused(workdir, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "t.json", tmp_path / "a" / "t.json"):
        path.write_text(json.dumps([ITEM]))
    both = [str(tmp_path / "t.json"), str(tmp_path / "a" / "t.json")]
    assert cli.main(["eval", str(workdir), "--tasks", *both]) == 2
    assert "two files of the name 't'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tasks", "--lm-eval"])
def test_an_option_that_names_no_task_does_not_give_the_loss(option, workdir, capsys):
    assert cli.main(["eval", str(workdir), option]) == 2
    assert f"{option} names nothing" in capsys.readouterr().err
