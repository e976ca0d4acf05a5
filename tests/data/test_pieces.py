"""A tokenizer.model with the files beside it gives the tokens that its model had."""

import json

import make_tokenizers
import pytest
from prepare_support import documents_of, made, recipe, write_lines

from diloco_jax.config import ConfigError
from diloco_jax.data.tokenizers import open_tokenizer

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


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"t": [1]}, "tokenizer_config.json cannot be read as a JSON object"),
        ({"a": "words"}, "added_tokens.json cannot be read as a JSON object"),
        (
            {"s": {"bos_token": "\ud800"}},
            "special_tokens_map.json: bos_token = ",
        ),
        ({"t": {"eos_token": "<nope>"}}, "eos_token = '<nope>' is no token of"),
    ],
)
def test_settings_that_are_none_are_named(files, shown, beside):
    with pytest.raises(ConfigError, match=shown):
        beside(**files)


def test_a_truncated_model_is_named(model, tmp_path):
    for size in (0, 1, 100, len(model) // 2, len(model) - 1):
        (tmp_path / "tokenizer.model").write_bytes(model[:size])
        with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be read as a"):
            open_tokenizer(tmp_path)


def test_a_prepared_folder_keeps_what_its_tokens_need(beside, tmp_path):
    (tmp_path / "in").mkdir()
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
