"""Prompts become tokens once, and a continuation is the text that is added to them."""

import json
from pathlib import Path

import make_tokenizers
import pytest

from diloco_jax import cli
from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.data.tokenizers import Bytes, open_tokenizer
from diloco_jax.weights import tasks
from diloco_jax.weights.tasks import Speaker, prompt_tokens

ROWS = 4096


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizers by kind; "spaced" has its text's first space put before it, and taken
    away, by rules of its tokenizer.json."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {name: make(root / name) for name, make in make_tokenizers.KINDS.items()}
    content = json.loads(made["json"].read_text())
    words = ["<s>", "</s>", "<unk>", "▁", "▁import", "import", "▁os", "x"]
    content |= {
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [[word, -float(n)] for n, word in enumerate(words)],
        },
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    }
    made["spaced"] = root / "spaced" / "tokenizer.json"
    made["spaced"].parent.mkdir()
    made["spaced"].write_text(json.dumps(content))
    return {"bytes": Bytes()} | {k: open_tokenizer(path) for k, path in made.items()}


def speaker_of(tokenizer):
    return Speaker(
        model=ModelConfig(vocab_size=ROWS),
        params={},
        encode=lambda text: prompt_tokens(tokenizer, ROWS, text),
        decode=tokenizer.decode,
        ends=frozenset(),
    )


@pytest.mark.parametrize("kind", ["bytes", "json", "pieces", "spaced"])
@pytest.mark.parametrize(
    ("prompt", "more"),
    [("import", " os import"), ("import", "x"), ("", "import os"), ("x ", " import")],
)
def test_a_continuation_is_what_is_added_to_the_prompt(kind, prompt, more, tokenizers):
    tokenizer = tokenizers[kind]
    speaker = speaker_of(tokenizer)
    before = speaker.encode(prompt)
    tokens = speaker.encode(prompt + more)
    assert tokens[: len(before)] == before
    assert speaker.continuation(before, tokens[len(before) :]) == more


def test_half_a_character_is_shown_as_such(tokenizers):
    speaker = speaker_of(tokenizers["bytes"])
    assert speaker.continuation(list(b"caf\xc3"), list(b"\xa9 x")) == "\ufffd x"


@pytest.mark.parametrize("kind", ["json", "pieces", "spaced"])
@pytest.mark.parametrize("text", ["import os", " import", "", "import<s>"])
def test_a_start_that_a_prompt_spells_is_there_once(kind, text, tokenizers):
    tokenizer = tokenizers[kind]
    plain = prompt_tokens(tokenizer, ROWS, text)
    assert plain[: len(tokenizer.start)] == list(tokenizer.start)
    assert prompt_tokens(tokenizer, ROWS, "<s>" + text) == plain


def test_a_prompt_with_a_token_beyond_the_table_is_refused_by_name(tokenizers):
    tokenizer = tokenizers["pieces"]
    tokens = prompt_tokens(tokenizer, ROWS, "import")
    word = tokenizer.word(max(tokens))
    assert prompt_tokens(tokenizer, max(tokens) + 1, "import") == tokens
    shown = rf"token {max(tokens)} \({word}\) .* rows for {max(tokens)} tokens, from 0"
    with pytest.raises(ConfigError, match=shown):
        prompt_tokens(tokenizer, max(tokens), "import")


@pytest.mark.parametrize("kind", ["bytes", "json", "pieces"])
def test_what_no_text_has_is_refused_or_a_token(kind, tokenizers):
    with pytest.raises(ConfigError, match=r"the text is not UTF-8: 'caf\\udce9'"):
        prompt_tokens(tokenizers[kind], ROWS, "caf\udce9")
    assert prompt_tokens(tokenizers[kind], ROWS, "a\0b")


@pytest.fixture
def spoken(tokenizers, monkeypatch):
    """A speaker whose model always says " os os", to `generate` and to lm-eval."""
    speaker = speaker_of(tokenizers["pieces"])
    word, both = tokenizers["pieces"].encode(["x", "x os"])
    space = both[len(word) :].tolist()

    def generate(model, params, prompt, *rest, **how):
        yield from (*space, ROWS - 1, *space)

    for place in ("diloco_jax.models.generation", "diloco_jax.weights.tasks"):
        monkeypatch.setattr(f"{place}.generate", generate)
    opened = "diloco_jax.weights.tasks.open_speaker"
    monkeypatch.setattr(opened, lambda *given, **how: speaker)
    return speaker


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
