"""lm-eval's requests, against sums by hand; and lm-eval itself, where it is here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))
import reference_forward as reference

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.models.generation import make_decode
from diloco_jax.weights.tasks import Answers, open_speaker

LENGTH = 12


@pytest.fixture(scope="module")
def speaker(workdir):
    return open_speaker(workdir)


@pytest.fixture(scope="module")
def log_p(exported):
    """Function of tokens that returns the log-probabilities of the next token after
    each, f64 [T, V]."""

    def found(tokens):
        logits = reference.logits(*exported, np.array(tokens))
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return found


def by_hand(log_p, context: str, continuation: str) -> tuple[float, bool]:
    """Likelihood and greediness of a continuation that fits."""
    text = list((context + continuation).encode())
    of_next, first = log_p(text), max(1, len(context.rstrip().encode()))
    scored = range(first, len(text))
    return (
        sum(of_next[t - 1, text[t]] for t in scored),
        all(int(np.argmax(of_next[t - 1])) == text[t] for t in scored),
    )


def test_a_likelihood_is_a_sum_by_hand(speaker, log_p):
    after = {c: int(np.argmax(log_p([c])[-1])) for c in range(97, 123)}
    first, then = next((c, then) for c, then in after.items() if then < 128)
    pairs = [("xy", " z"), ("xy ", "zz"), ("", "abc"), (chr(first), chr(then))]
    found = Answers(speaker, LENGTH).likelihoods(pairs)
    for pair, (log, greedy) in zip(pairs, found, strict=True):
        expected, same = by_hand(log_p, *pair)
        assert log == pytest.approx(expected, rel=1e-4)
        assert greedy == same
    assert [greedy for _, greedy in found] == [False, False, False, True]


def test_a_long_context_loses_its_beginning_and_a_long_answer_is_refused(speaker):
    answers = Answers(speaker, LENGTH)
    long, short = answers.likelihoods([("q" * 40, "ab"), ("q" * 10, "ab")])
    assert long == short
    with pytest.raises(ConfigError, match=r"continuation 'b+' has 12 tokens"):
        answers.likelihoods([("q", "b" * 12)])


@pytest.mark.parametrize("size", [1, 5, LENGTH, LENGTH + 1, 30])
def test_each_token_of_a_text_counts_once_after_all_that_fits(speaker, log_p, size):
    text = list(range(97, 97 + 15)) * 2
    text = text[:size]
    expected, at = 0.0, 1
    while at < size:
        end = min(at + LENGTH - 1, size)
        row = text[max(0, end - LENGTH) : end]
        of_next, skipped = log_p(row), len(row) - (end - at)
        expected += sum(of_next[t - 1, row[t]] for t in range(skipped, len(row)))
        at = end
    texts = [bytes(text).decode(), "zz"]
    found = Answers(speaker, LENGTH).of_texts(texts)
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[1] == pytest.approx(by_hand(log_p, "", "zz")[0], rel=1e-4)


def test_a_text_follows_a_token_that_ends_texts(speaker, log_p):
    """Then the first token of all has a probability too."""
    ending = speaker.__class__(**{**vars(speaker), "ends": frozenset([10])})
    (found,) = Answers(ending, LENGTH).of_texts(["ab"])
    assert found == pytest.approx(by_hand(log_p, "", "\nab")[0], rel=1e-4)


def test_a_continuation_is_greedy_and_ends_before_its_stop(speaker, log_p):
    text = list(b"one li")
    for _ in range(5):
        text.append(int(np.argmax(log_p(text[-LENGTH:])[-1])))
    whole = speaker.decode(text[6:])
    answers = Answers(speaker, LENGTH)
    how = {"until": [], "max_gen_toks": 5}
    assert answers.continuations([("one li", how)]) == [whole]
    stop = whole[2]
    cut = whole[: whole.index(stop)]
    assert answers.continuations([("one li", {**how, "until": [stop]})]) == [cut]
    with pytest.raises(ConfigError, match=r"max_gen_toks = 12: .*have 12"):
        answers.continuations([("a", {"max_gen_toks": LENGTH})])


def test_prompts_of_any_length_share_what_is_compiled(speaker):
    how, compiled = {"max_gen_toks": 2}, make_decode(speaker.model)._cache_size
    Answers(speaker, LENGTH).continuations([("abcdefg", how)])
    before = compiled()
    Answers(speaker, LENGTH).continuations([("abcdefg"[:n], how) for n in range(1, 8)])
    assert compiled() == before


def test_both_kinds_of_tasks_at_once_are_refused(workdir, tmp_path, capsys):
    both = ["--tasks", str(tmp_path / "t.json"), "--lm-eval", "x"]
    assert cli.main(["eval", str(workdir), *both]) == 2
    assert "--tasks and --lm-eval are both given" in capsys.readouterr().err


def test_without_lm_eval_its_package_is_named(workdir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["eval", str(workdir), "--lm-eval", "x"]) == 2
    assert "pip install 'diloco-jax[eval]'" in capsys.readouterr().err


TASK = """
task: counted
dataset_path: json
dataset_kwargs:
  data_files: {{test: {path}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


def test_a_task_of_lm_eval_scores_what_a_count_by_hand_does(
    workdir, log_p, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    draw = np.random.default_rng(3)
    items = [
        {
            "question": "q" * int(draw.integers(1, 8)),
            "choices": ["a", "bb", "of"],
            "answer": int(draw.integers(3)),
        }
        for _ in range(30)
    ]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "counted.yaml").write_text(TASK.format(path=path))
    right = 0
    for item in items:
        found = [by_hand(log_p, item["question"], f" {c}")[0] for c in item["choices"]]
        right += int(np.argmax(found)) == item["answer"]
    task = str(tmp_path / "counted.yaml")
    assert cli.main(["eval", str(workdir), "--lm-eval", task, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["eval_lm_eval"]["counted"]
    assert found["acc"] == pytest.approx(right / 30)
    assert 0 < right < 30
    assert cli.main(["eval", str(workdir), "--lm-eval", "no_such_task"]) == 2
    assert "lm-eval has no such task" in capsys.readouterr().err
