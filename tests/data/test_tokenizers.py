"""Tokenizers give the text back, and what does not fit together is refused by name.

A tokenizer.model with the files beside it gives the tokens that its model had.
"""

import dataclasses
import json
import re
import shutil

import make_tokenizers
import numpy as np
import pytest
import tiny
from prepare_support import documents_of, made, recipe, write_lines

from diloco_jax import files
from diloco_jax.config import Config, ConfigError, DataConfig, IslandConfig, RunConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.data.corpus import load_checked_corpus
from diloco_jax.data.loading import load_data, require_vocabulary
from diloco_jax.data.tokenizers import Bytes, open_tokenizer, refusing, require_digest

KINDS = ("bytes", *make_tokenizers.KINDS)
MEGABYTE = 1_000_000


def opened(path):
    return Bytes() if path.name == "" else open_tokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_megabyte_comes_back_as_it_was(kind, tokenizers):
    text = make_tokenizers.library_text(MEGABYTE)
    tokenizer = opened(tokenizers[kind])
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens) == text
    assert tokens.dtype == np.int32
    assert 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size
    if kind != "bytes":
        assert len(tokens) < 0.7 * len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_several_texts_are_encoded_apart(kind, tokenizers):
    tokenizer, texts = opened(tokenizers[kind]), ["one", "", "two words", "ü"]
    together = tokenizer.encode(texts)
    for text, tokens in zip(texts, together, strict=True):
        np.testing.assert_array_equal(tokens, tokenizer.encode([text])[0])
        assert tokenizer.decode(tokens) == text


def test_start_and_end_are_those_of_the_files(tokenizers, tmp_path):
    json_made = opened(tokenizers["json"])
    assert (json_made.start, json_made.end) == ((0,), 1)
    bare = make_tokenizers.make_json(tmp_path, start=False)
    assert (open_tokenizer(bare).start, open_tokenizer(bare).end) == ((), 1)
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_tokenizer(bare).end is None
    pieces = opened(tokenizers["pieces"])
    assert (pieces.start, pieces.end) == ((1,), 2)
    assert (Bytes().start, Bytes().end) == ((), 0)


def test_special_tokens_are_found_without_the_letter_a(tmp_path):
    """As of bases or digits, whose models know no Latin text."""
    from tokenizers import Tokenizer, models
    from tokenizers.processors import TemplateProcessing

    words = {word: n for n, word in enumerate(["A", "C", "G", "T", "[CLS]", "[SEP]"])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.add_special_tokens(["[CLS]", "[SEP]"])
    around = [("[CLS]", 4), ("[SEP]", 5)]
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    made.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(tmp_path / "tokenizer.json")
    assert (found.start, found.end) == ((4,), 5)


def test_a_tokenizer_is_found_in_its_folder(tokenizers, tmp_path):
    shutil.copy(tokenizers["pieces"], tmp_path)
    pieces = open_tokenizer(tmp_path)
    assert pieces.digest == opened(tokenizers["pieces"]).digest
    shutil.copy(tokenizers["json"], tmp_path)
    both = open_tokenizer(tmp_path)
    assert both.digest == opened(tokenizers["json"]).digest != pieces.digest


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("", None, "neither tokenizer.json nor tokenizer.model"),
        ("absent.json", None, "absent.json is no file"),
        ("words.txt", "a", r"ends neither in .json nor in .model"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer.model", "none", "cannot be read as a model of SentencePiece"),
        ("tokenizer.json", files.POINTER.decode(), "`git lfs pull`"),
        ("tokenizer.model", files.POINTER.decode(), "`git lfs pull`"),
    ],
)
def test_what_is_no_tokenizer_is_named(name, content, shown, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=shown):
        open_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{", r"cannot be read as a JSON object .*copy it again"),
        ("[1]", r"cannot be read as a JSON object"),
        ('{"eos_token": 5}', r"eos_token = 5 is no token of .*tokenizer.json; give"),
        ('{"eos_token": "<nope>"}', r"eos_token = '<nope>' is no token"),
        ('{"eos_token": {"text": "a"}}', r"eos_token = \{'text': 'a'\} is no token"),
    ],
)
def test_settings_beside_a_tokenizer_are_those_of_it(content, shown, tmp_path):
    made = make_tokenizers.make_json(tmp_path, start=False)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"tokenizer_config.json.*{shown}"):
        open_tokenizer(made)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}},
        {"model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}},
        {"decoder": {"type": "Strip"}},
        {"post_processor": {"type": "TemplateProcessing", "single": 1}},
        {"added_tokens": [{"id": -1}]},
        {"pre_tokenizer": "\ud800"},
    ],
)
def test_whatever_a_library_says_of_a_file_names_it(change, tokenizers, tmp_path):
    content = json.loads(tokenizers["json"].read_text()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(tmp_path)


def test_a_panic_of_a_library_names_the_file(tmp_path):
    class PanicException(BaseException):
        pass

    with (
        pytest.raises(ConfigError, match=r"a\.json cannot be read \(no way\)"),
        refusing(tmp_path / "a.json", "be read"),
    ):
        raise PanicException("no way")
    with pytest.raises(KeyboardInterrupt), refusing(tmp_path, "be read"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_a_padded_table_has_no_text(kind, tokenizers):
    tokenizer = opened(tokenizers[kind])
    tokens = tokenizer.encode(["two words"])[0].tolist()
    more = [tokenizer.vocab_size, 70_000, *tokens, tokenizer.vocab_size]
    assert tokenizer.decode(more) == "two words"
    assert [bool(tokenizer.word(token)) for token in (tokens[0], 70_000)] == [1, 0]


def test_another_tokenizer_is_refused_with_both_digests():
    require_digest("aa", "aa", "data/", "mine.json")
    with pytest.raises(
        ConfigError, match=r"tokenizer aa, but mine.json is bb.*prepare"
    ):
        require_digest("aa", "bb", "data/", "mine.json")


# ---- a run's data ----------------------------------------------------------------


@pytest.fixture
def config(tokenizers, tmp_path):
    """A run on tokens that the json tokenizer made."""
    text = make_tokenizers.library_text(20_000)
    (tokens,) = opened(tokenizers["json"]).encode([text])
    np.save(tmp_path / "tokens.npy", tokens)
    data = DataConfig(
        paths=(str(tmp_path / "tokens.npy"),), tokenizer=str(tokenizers["json"])
    )
    model = dataclasses.replace(tiny.MODEL, vocab_size=512)
    run = RunConfig(model=model, data=data, sequence_length=tiny.SEQUENCE_LENGTH)
    return Config(run=run, islands={"a": IslandConfig()})


def test_the_digest_of_the_data_tells_its_tokenizer(config, tokenizers):
    resolved = resolve(config)
    assert resolve(config).run.data.digest == resolved.run.data.digest
    none = resolve(config.replace("data.tokenizer", "")).run.data.digest
    other = config.replace("data.tokenizer", str(tokenizers["pieces"]))
    other = other.replace("model.vocab_size", 1024)
    digests = {resolved.run.data.digest, none, resolve(other).run.data.digest}
    assert len(digests) == 3
    digest = resolved.run.data.digest
    with pytest.raises(ConfigError, match=f"data.digest = {digest} .* has.* {none}"):
        load_checked_corpus(resolved.replace("data.tokenizer", "").run.data)


def test_a_table_needs_rows_for_the_tokens_of_the_data_alone(config, tmp_path):
    def run(rows, **model):
        named = {f"model.{name}": value for name, value in model.items()}
        return config.replace({"model.vocab_size": rows, **named}).run

    np.save(tmp_path / "tokens.npy", np.arange(501))
    data = load_data(config.run)
    require_vocabulary(data, run(501))
    word = open_tokenizer(config.run.data.tokenizer).word(500)
    shown = rf"vocab_size = 500, but .* up to 500 \({re.escape(word)}\)"
    with pytest.raises(ConfigError, match=f"{shown}; set it to 512 or more"):
        require_vocabulary(data, run(500))
    with pytest.raises(ConfigError, match=f"{shown}; its weights have no row for it"):
        require_vocabulary(data, run(500, weights="hf:weights"))
    require_vocabulary(data, run(500, factory="mine:model"))


def test_text_and_tokens_of_another_tokenizer_are_refused(config, tmp_path):
    (tmp_path / "a.txt").write_text("text\n" * 99)
    text = config.replace("data.paths", (str(tmp_path / "a.txt"),))
    with pytest.raises(ConfigError, match="every byte is a token; make its tokens"):
        resolve(text)
    np.save(tmp_path / "tokens.npy", np.arange(600))
    with pytest.raises(ConfigError, match=r"has 512 tokens, but .* go up to 599"):
        resolve(config)


def test_weights_bring_their_own_tokenizer(config, tokenizers, tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    started = config.replace("model.weights", f"hf:{weights}")
    resolve(started)
    shutil.copy(tokenizers["json"], weights)
    resolve(started)
    there = json.loads(tokenizers["json"].read_text())
    there["model"]["merges"].pop()
    (weights / "tokenizer.json").write_text(json.dumps(there))
    theirs = open_tokenizer(weights).digest
    ours = opened(tokenizers["json"]).digest
    with pytest.raises(ConfigError, match=f"tokenizer {ours}, but .* is {theirs}"):
        resolve(started)


PIECES = 2 * make_tokenizers.WORDS
UNK, START, END, TOOL = 0, 1, 2, 3
SPECIAL = {"content": "<|x|>", "special": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer.model with a control piece of its own."""
    folder = tmp_path_factory.mktemp("pieces")
    return make_tokenizers.make_pieces(folder, control="[TOOL]").read_bytes()


@pytest.fixture
def beside(model, tmp_path):
    """Function that opens the tokenizer with these files beside it, by first letter."""
    names = ("added_tokens", "special_tokens_map", "tokenizer_config")

    def opened(**files):
        (tmp_path / "tokenizer.model").write_bytes(model)
        for name in names:
            if (content := files.get(name[0])) is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return open_tokenizer(tmp_path)

    return opened


def decoder(token=PIECES, **entry):
    return {"added_tokens_decoder": {str(token): SPECIAL | entry}}


def words(tokenizer, text):
    return [tokenizer.word(token) for token in tokenizer.encode([text])[0].tolist()]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("import", ["▁import"]),
        ("import</s>import", ["▁import", "</s>", "i", "mport"]),
        ("import</s> import", ["▁import", "</s>", "▁import"]),
        ("<s>import", ["<s>", "i", "mport"]),
        ("</s></s>", ["</s>", "</s>"]),
        ("[TOOL]<unk><s>", ["[TOOL]", "<unk>", "<s>"]),
        ("import </ s>", ["▁import", "▁<", "/", "▁s", ">"]),
    ],
)
def test_control_pieces_that_a_text_spells_are_tokens(text, want, beside):
    assert words(beside(), text) == want


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"a": {"<|x|>": PIECES}}, True),
        ({"t": decoder()}, False),
        ({"t": decoder(special=False)}, True),
        ({"a": {"<|x|>": PIECES}, "t": decoder()}, False),
    ],
)
def test_words_that_files_beside_a_model_add_are_tokens(files, shown, beside):
    bare = beside().digest
    tokenizer = beside(**files)
    assert tokenizer.vocab_size == PIECES + 1
    assert words(tokenizer, "import<|x|> import") == ["▁import", "<|x|>", "▁import"]
    (tokens,) = tokenizer.encode(["import<|x|> import"])
    want = "import<|x|> import" if shown else "import import"
    assert tokenizer.decode(tokens) == want
    assert tokenizer.digest != bare


def test_a_list_of_the_models_own_pieces_changes_nothing(beside):
    bare = beside()
    own = {
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        str(TOOL): {"content": "[TOOL]", "special": True},
    }
    listed = beside(t={"added_tokens_decoder": own}, a={"</s>": END})
    assert (listed.vocab_size, listed.digest) == (PIECES, bare.digest)
    assert words(listed, "a</s>") == words(bare, "a</s>")


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"a": {"<|x|>": END}}, r"'<\|x\|>' is 2, here '</s>'"),
        ({"a": {"<|x|>": PIECES}, "t": decoder(PIECES + 1)}, "is 1025 and 1024"),
        ({"a": {"<|x|>": PIECES, "<|y|>": PIECES}}, "two of them are one token"),
        ({"a": {"<|x|>": "many"}}, "is 'many', which is no token"),
        ({"a": {"<|x|>": 2**31}}, "is 2147483648, which is no"),
        ({"a": {"": PIECES}}, "'' is 1024"),
        ({"a": {"\ud800": PIECES}}, "surrogates not allowed"),
        ({"t": {"added_tokens_decoder": [1]}}, "no attribute 'items'"),
        ({"t": {"added_tokens_decoder": {"x": SPECIAL}}}, "invalid literal"),
        ({"t": {"added_tokens_decoder": {"1024": {}}}}, "'content'"),
        ({"t": decoder(content=["a"])}, "no attribute"),
        ({"t": decoder(single_word=True)}, "has single_word"),
        ({"t": decoder(lstrip=True)}, "has lstrip"),
    ],
)
def test_words_that_are_not_the_models_are_refused(files, shown, beside):
    match = f"tokenizer.model: words that added_tokens.json .*{shown}.*; save"
    with pytest.raises(ConfigError, match=match):
        beside(**files)


@pytest.mark.parametrize(
    ("files", "start", "end"),
    [
        ({}, (START,), END),
        ({"t": {"add_bos_token": True}}, (START,), END),
        ({"t": {"add_bos_token": False}}, (), END),
        ({"t": {"add_bos_token": None, "add_eos_token": False}}, (START,), END),
        ({"t": {"bos_token": "[TOOL]", "eos_token": {"content": "<s>"}}}, (TOOL,), 1),
        ({"s": {"eos_token": "<unk>"}}, (START,), UNK),
        ({"t": decoder() | {"eos_token": "<|x|>"}}, (START,), PIECES),
        ({"a": {"<|x|>": PIECES}, "s": {"bos_token": "<|x|>"}}, (PIECES,), END),
    ],
)
def test_start_and_end_are_those_that_the_files_name(files, start, end, beside):
    tokenizer = beside(**files)
    assert (tokenizer.start, tokenizer.end) == (start, end)


def test_a_truncated_model_is_named(model, tmp_path):
    for size in (0, 1, 100, len(model) // 2, len(model) - 1):
        (tmp_path / "tokenizer.model").write_bytes(model[:size])
        with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be read as a"):
            open_tokenizer(tmp_path)


def test_a_prepared_folder_keeps_what_its_tokens_need(beside, tmp_path):
    lines = [{"text": f"import {n}<|x|>"} for n in range(40)]
    write_lines(tmp_path / "in" / "a.jsonl", lines)
    config = decoder() | {"add_bos_token": False, "eos_token": "<|x|>"}
    tokenizer = beside(t=config)
    prepared, *rows = made(tmp_path, recipe(tokenizer))
    assert max(split.largest for split in (prepared.train, prepared.validation)) == (
        PIECES
    )
    for tokens, _ in documents_of(*rows):
        assert tokens.tolist().count(PIECES) >= 2
        assert START not in tokens
    kept = open_tokenizer(tmp_path / "out")
    assert (kept.digest, kept.start, kept.end) == (tokenizer.digest, (), PIECES)
