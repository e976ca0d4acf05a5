"""Scores in tasks as counted by hand, lm-eval's too; prompts and continuations."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import make_tokenizers
import numpy as np
import pytest
import reference_forward as reference
from begin_support import keep_cycle

from diloco_jax import cli
from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.data.tokenizers import Bytes, open_tokenizer
from diloco_jax.weights import tasks
from diloco_jax.weights.tasks import Answers, TextModel, open_model, read_task, score

sys.path.append(str(Path(__file__).parents[1] / "models"))


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


def by_hand(log_p, items) -> tuple[list[bool], list[bool]]:
    """Which items are right, by the likelihood and by that per byte, in float64."""
    plain, per_byte = [], []
    for item in items:
        question, choices, answer = item["question"], item["choices"], item["answer"]
        space = "" if not question or question.endswith("\n") else " "
        found = [
            answered_by_hand(log_p, question, space + choice, len(question))[0]
            for choice in choices
        ]
        each = [
            log / len(choice.encode())
            for log, choice in zip(found, choices, strict=True)
        ]
        right = choices.index(answer) if isinstance(answer, str) else answer
        plain.append(int(np.argmax(found)) == right)
        per_byte.append(int(np.argmax(each)) == right)
    return plain, per_byte


def test_the_score_is_a_count_by_hand(workdir, log_p, tmp_path, capsys):
    items = drawn(60)
    path = tmp_path / "drawn.json"
    path.write_text(json.dumps(items))
    assert cli.main(["eval", str(workdir), "--tasks", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["eval_tasks"].values()
    plain, per_byte = by_hand(log_p, items)
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
    plan = keep_cycle(workdir, 4, np.zeros_like)
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
    text_model = open_model(workdir)
    path = tmp_path / "t.json"
    long = {"question": "x" * 40 + "end", "choices": ["aa", "bb"], "answer": 0}
    short = {**long, "question": "x" * 9 + "end"}
    scores = []
    for item in (long, short):
        path.write_text(json.dumps([item]))
        scores.append(score(text_model, read_task(path), 15))
    assert [found["cut"] for found in scores] == [1, 0]
    assert scores[0]["accuracy"] == scores[1]["accuracy"]
    path.write_text(json.dumps([{**long, "choices": ["a", "b" * 15]}]))
    with pytest.raises(ConfigError, match=r"t, item 0: the choice 'b+' has 16 tokens"):
        score(text_model, read_task(path), 15)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "a/t.json", "t.json"], "two files of the name 't'"),
        (["--tasks"], "--tasks names nothing"),
        (["--lm-eval"], "--lm-eval names nothing"),
        (["--tasks", "t.json", "--lm-eval", "x"], "--tasks and --lm-eval are both giv"),
        (["--lm-eval", "x"], "pip install 'diloco-jax[eval]'"),
    ],
)
def test_options_that_name_no_tasks_are_refused(
    options, said, workdir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    for path in (Path("t.json"), Path("a/t.json")):
        path.write_text(json.dumps([ITEM]))
    assert cli.main(["eval", str(workdir), *options]) == 2
    assert said in capsys.readouterr().err


ROWS = 4096


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizers by kind; "spaced" has its text's first space put before it, and taken
    away, by rules of its tokenizer.json."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {name: make(root / name) for name, make in make_tokenizers.KINDS.items()}
    made["spaced"] = Path(__file__).with_name("published") / "mistral/tokenizer.json"
    return {"bytes": Bytes()} | {k: open_tokenizer(path) for k, path in made.items()}


def model_of(tokenizer, rows=ROWS):
    return TextModel(
        model=ModelConfig(vocab_size=rows),
        params={},
        tokenizer=tokenizer,
        ends=frozenset(),
    )


@pytest.mark.parametrize("kind", ["bytes", "json", "pieces", "spaced"])
@pytest.mark.parametrize(
    ("prompt", "more"),
    [("import", " os import"), ("import", "x"), ("", "import os"), ("x ", " import")],
)
def test_a_continuation_is_what_is_added_to_the_prompt(kind, prompt, more, tokenizers):
    tokenizer = tokenizers[kind]
    text_model = model_of(tokenizer)
    before = text_model.encode(prompt)
    tokens = text_model.encode(prompt + more)
    assert tokens[: len(before)] == before
    assert text_model.continuation(before, tokens[len(before) :]) == more


@pytest.mark.parametrize("kind", ["bytes", "json", "pieces", "spaced"])
@pytest.mark.parametrize("choice", ["os", "os sys"])
def test_a_question_may_end_in_a_space(kind, choice, tokenizers):
    """The space is the first token's of each choice, not the question's last one."""
    found = []
    for question in ("import", "import "):
        item = tasks.Item(question=question, choices=(choice, "x"), answer=0)
        own = tasks._row(model_of(tokenizers[kind]), item, choice, 99, "here", ())
        found.append(own)
    assert found[0] == found[1]


def test_half_a_character_is_shown_as_such(tokenizers):
    text_model = model_of(tokenizers["bytes"])
    assert text_model.continuation(list(b"caf\xc3"), list(b"\xa9 x")) == "\ufffd x"


@pytest.mark.parametrize("kind", ["json", "pieces", "spaced"])
@pytest.mark.parametrize("text", ["import os", " import", "", "import<s>"])
def test_a_start_that_a_prompt_spells_is_there_once(kind, text, tokenizers):
    tokenizer = tokenizers[kind]
    plain = model_of(tokenizer).encode(text)
    assert plain[: len(tokenizer.start)] == list(tokenizer.start)
    assert model_of(tokenizer).encode("<s>" + text) == plain


def test_a_prompt_with_a_token_beyond_the_table_is_refused_by_name(tokenizers):
    tokenizer = tokenizers["pieces"]
    tokens = model_of(tokenizer).encode("import")
    word = tokenizer.word(max(tokens))
    assert model_of(tokenizer, max(tokens) + 1).encode("import") == tokens
    shown = rf"token {max(tokens)} \({word}\) .* rows for {max(tokens)} tokens, from 0"
    with pytest.raises(ConfigError, match=shown):
        model_of(tokenizer, max(tokens)).encode("import")


@pytest.mark.parametrize("kind", ["bytes", "json", "pieces"])
def test_what_no_text_has_is_refused_or_a_token(kind, tokenizers):
    with pytest.raises(ConfigError, match=r"the text is not UTF-8: 'caf\\udce9'"):
        model_of(tokenizers[kind]).encode("caf\udce9")
    assert model_of(tokenizers[kind]).encode("a\0b")


@pytest.fixture
def spoken(tokenizers, monkeypatch):
    """A text_model whose model always says " os os", to `generate` and to lm-eval."""
    text_model = model_of(tokenizers["pieces"])
    word, both = tokenizers["pieces"].encode(["x", "x os"])
    space = both[len(word) :].tolist()

    def generate(model, params, prompt, *rest, **how):
        yield from (*space, ROWS - 1, *space)

    for place in ("diloco_jax.models.generation", "diloco_jax.weights.tasks"):
        monkeypatch.setattr(f"{place}.generate", generate)
    opened = "diloco_jax.weights.tasks.open_model"
    monkeypatch.setattr(opened, lambda *given, **how: text_model)
    return text_model


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_generate_says_the_first_space(more, spoken, capsys):
    assert cli.main(["generate", "here", "--prompt", "import", *more]) == 0
    out = capsys.readouterr().out
    assert (json.loads(out)["text"] if more else out) == " os os" + "\n" * (not more)


def test_lm_eval_gets_the_first_space(spoken):
    answers = tasks.Answers(spoken, 512)
    asked = [("import", {"max_gen_toks": 8}), ("import", {"until": "s o"})]
    assert answers.continuations(asked) == [" os os", " o"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (["generate", "here", "--prompt", "caf\udce9"], r"--prompt is not UTF-8"),
        (["data", "prepare", "out", "in", "--text-field", "\udce9"], "--text-field is"),
        (["data", "prepare", "out", "in", "--turn", "{role}\udce9"], "--turn is not"),
        (["data", "prepare", "out", "caf\udce9"], "SOURCES is not UTF-8"),
    ],
)
def test_bytes_of_a_command_line_are_refused_by_the_options_name(
    line, shown, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    assert cli.main(line) == 2
    assert shown in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


LENGTH = 12


@pytest.fixture(scope="module")
def text_model(workdir):
    return open_model(workdir)


@pytest.fixture(scope="module")
def log_p(exported):
    """Function of tokens that returns the log-probabilities of the next token after
    each, f64 [T, V]."""

    def found(tokens):
        logits = reference.logits(*exported, np.array(tokens))
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return found


def answered_by_hand(log_p, context, continuation, before=0) -> tuple[float, bool]:
    """Likelihood and greediness of a continuation that fits, of what is after the first
    bytes, which are the context without the spaces at its end if none are given."""
    text = list((context + continuation).encode())
    of_next, first = log_p(text), max(1, before or len(context.rstrip().encode()))
    scored = range(first, len(text))
    return (
        sum(of_next[t - 1, text[t]] for t in scored),
        all(int(np.argmax(of_next[t - 1])) == text[t] for t in scored),
    )


def test_a_likelihood_is_a_sum_by_hand(text_model, log_p):
    after = {c: int(np.argmax(log_p([c])[-1])) for c in range(97, 123)}
    first, then = next((c, then) for c, then in after.items() if then < 128)
    pairs = [("xy", " z"), ("xy ", "zz"), ("", "abc"), (chr(first), chr(then))]
    found = Answers(text_model, LENGTH).likelihoods(pairs)
    for pair, (log, greedy) in zip(pairs, found, strict=True):
        expected, same = answered_by_hand(log_p, *pair)
        assert log == pytest.approx(expected, rel=1e-4)
        assert greedy == same
    assert [greedy for _, greedy in found] == [False, False, False, True]


def test_a_long_context_loses_its_beginning_and_a_long_answer_is_refused(text_model):
    answers = Answers(text_model, LENGTH)
    long, short = answers.likelihoods([("q" * 40, "ab"), ("q" * 10, "ab")])
    assert long == short
    with pytest.raises(ConfigError, match=r"continuation 'b+' has 12 tokens"):
        answers.likelihoods([("q", "b" * 12)])


@pytest.mark.parametrize("size", [1, 5, LENGTH, LENGTH + 1, 30])
def test_each_token_of_a_text_counts_once_after_all_that_fits(text_model, log_p, size):
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
    found = Answers(text_model, LENGTH).of_texts(texts)
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[1] == pytest.approx(answered_by_hand(log_p, "", "zz")[0], rel=1e-4)


def test_a_text_follows_a_token_that_ends_texts(text_model, log_p):
    """Then the first token of all has a probability too."""
    ending = text_model.__class__(**{**vars(text_model), "ends": frozenset([10])})
    (found,) = Answers(ending, LENGTH).of_texts(["ab"])
    assert found == pytest.approx(answered_by_hand(log_p, "", "\nab")[0], rel=1e-4)


def test_a_continuation_is_greedy_and_ends_before_its_stop(text_model, log_p):
    text = list(b"one li")
    for _ in range(5):
        text.append(int(np.argmax(log_p(text[-LENGTH:])[-1])))
    whole = text_model.decode(text[6:])
    answers = Answers(text_model, LENGTH)
    how = {"until": [], "max_gen_toks": 5}
    assert answers.continuations([("one li", how)]) == [whole]
    stop = whole[2]
    cut = whole[: whole.index(stop)]
    assert answers.continuations([("one li", {**how, "until": [stop]})]) == [cut]
    with pytest.raises(ConfigError, match=r"max_gen_toks = 12: .*have 12"):
        answers.continuations([("a", {"max_gen_toks": LENGTH})])


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
    items = [
        {"question": "q" * (1 + n % 7), "choices": ["a", "bb", "of"], "answer": n % 3}
        for n in range(30)
    ]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "counted.yaml").write_text(TASK.format(path=path))
    right = sum(by_hand(log_p, items)[0])
    task = str(tmp_path / "counted.yaml")
    assert cli.main(["eval", str(workdir), "--lm-eval", task, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["eval_lm_eval"]["counted"]
    assert found["acc"] == pytest.approx(right / 30)
    assert 0 < right < 30
    assert cli.main(["eval", str(workdir), "--lm-eval", "no_such_task"]) == 2
    assert "lm-eval has no such task" in capsys.readouterr().err
