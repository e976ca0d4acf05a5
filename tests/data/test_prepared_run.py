"""Prepared folders as the data of a run: what fits, is refused, and is counted."""

import dataclasses
import math
import shutil
import subprocess
import sys
from pathlib import Path

import make_tokenizers
import numpy as np
import pytest
import tiny
from prepare_support import documents_of, recipe

from diloco_jax import emulate
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.data.loading import load_data
from diloco_jax.data.prepare import prepare
from diloco_jax.data.prepared import read_manifest
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.weights.first import keep_tokenizer

LENGTH = tiny.SEQUENCE_LENGTH


def folder_of(root: Path, name: str, lines, tokenizer=None, length=LENGTH) -> str:
    """A prepared folder of one document a line."""
    source = root / f"{name}.jsonl"
    source.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    how = recipe(tokenizer, length, 0.2)
    prepare(root / name, (str(source),), how, workers=1)
    return str(root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def folders(root):
    """Two prepared folders of bytes, one about three times as large."""
    a = folder_of(root, "a", [f"letters {n} " * (n % 5 + 1) for n in range(60)])
    b = folder_of(root, "b", [f"{n} {n * n} " * (n % 9 + 1) for n in range(200)])
    return a, b


@pytest.fixture(scope="module")
def in_tokens(root):
    """A tokenizer's file and a folder made with it."""
    path = make_tokenizers.make_json(root / "tokenizer")
    lines = [f"letters {n} " * (n % 5 + 1) for n in range(60)]
    return path, folder_of(root, "tokens", lines, open_tokenizer(path))


def config_of(*paths, vocab_size=256, length=LENGTH, **data):
    model = dataclasses.replace(tiny.MODEL, vocab_size=vocab_size)
    run = RunConfig(
        model=model,
        data=DataConfig(paths=paths, **data),
        sync=SyncConfig(steps_per_cycle=4, fragments=2, quorum=1),
        sequence_length=length,
        total_tokens=40 * 4 * length,
    )
    islands = {
        "a": IslandConfig(batch_size=4, step_seconds=1.0),
        "b": IslandConfig(batch_size=2, step_seconds=1.7),
    }
    return Config(run=run, islands=islands).validate()


def test_a_folder_is_a_runs_data(folders):
    resolved = resolve(config_of(folders[0]))
    assert resolved.run.data.arrays == ("segments", "tokens", "weights")
    assert resolve(resolved, text_is_here=True) == resolved
    data = load_data(resolved.run)
    rows = data.index(0)
    epoch = {rows[p]["tokens"].tobytes() for p in range(len(data.train))}
    assert epoch == {data.train[n]["tokens"].tobytes() for n in range(len(data.train))}
    assert data.bytes_per_token == pytest.approx(1, abs=0.1)
    assert data.bytes_per_token < 1  # The end of each document is predicted, too.


@pytest.mark.parametrize("kind", ["bytes", *make_tokenizers.KINDS])
def test_bits_per_byte_are_of_the_same_bytes_with_any_tokenizer(kind, tmp_path):
    """The bytes of the documents that are held out, each once, over the tokens that are
    predicted of them."""
    made = make_tokenizers.KINDS.get(kind)
    tokenizer = open_tokenizer(made(tmp_path / "words") if made else "")
    lines = [f"letters {n}, numbers {n * n} and naïve Σ {n}" for n in range(60)]
    folder = folder_of(tmp_path, "rows", lines, tokenizer, length=64)
    held = read_manifest(Path(folder)).validation.counts
    data = load_data(config_of(folder, vocab_size=512, length=64).run)
    assert data.bytes_per_token == held.text_bytes / held.predicted
    special = {*tokenizer.start, tokenizer.end}
    documents = [part for part, _ in documents_of(data.validation)]
    out = [
        tokenizer.decode([t for t in p.tolist() if t not in special]) for p in documents
    ]
    assert len(out) == held.documents > 2
    assert held.text_bytes == sum(len(text.encode()) for text in out)
    assert set(out) <= set(lines)
    weights = sum(
        float(data.validation[n]["weights"].sum()) for n in range(len(data.validation))
    )
    assert weights == held.predicted


def test_a_mixture_has_the_weights_that_were_asked(folders):
    resolved = resolve(config_of(*folders, weights=(3.0, 1.0)))
    rows = load_data(resolved.run).index(7)
    drawn = [bytes(rows[p]["tokens"].astype(np.uint8)) for p in range(400)]
    assert sum(any(map(str.isalpha, row.decode())) for row in drawn) == 300
    by_rows = resolve(config_of(*folders)).run.data
    sizes = [len(load_data(config_of(f).run).train) for f in folders]
    assert by_rows.weights == tuple(map(float, sizes))
    assert by_rows.digest != resolved.run.data.digest
    turned = config_of(*folders[::-1], weights=(1.0, 3.0))
    assert resolve(turned).run.data.digest != resolved.run.data.digest


def test_it_trains_and_counts_rows_by_folder(folders):
    config = config_of(*folders, weights=(3.0, 1.0))
    summary = emulate(config).summary
    rows = summary["rows_by_source"]
    assert list(rows) == list(folders)
    first, second = rows.values()
    assert abs(first - 3 * second) <= 4
    assert (first + second) * LENGTH == summary["tokens_computed"]
    assert summary["eval_loss"] < 5.4
    by_source = summary["eval_loss_by_source"]
    counts = [read_manifest(Path(f)).validation.counts.predicted for f in folders]
    mean = sum(by_source[f] * n for f, n in zip(folders, counts, strict=True))
    assert mean / sum(counts) == pytest.approx(summary["eval_loss"], rel=1e-5)
    assert by_source[folders[0]] != by_source[folders[1]]
    bits = summary["eval_loss"] / math.log(2)
    assert summary["eval_bits_per_byte"] == pytest.approx(bits, rel=0.2)
    assert summary["eval_bits_per_byte"] > bits


def test_a_table_needs_rows_for_the_tokens_of_a_folder_alone(in_tokens):
    _, folder = in_tokens
    prepared = read_manifest(folder)
    data = load_data(config_of(folder, vocab_size=512).run)
    seen = max(
        int(source[n]["tokens"].max())
        for source in (data.train, data.validation)
        for n in range(len(source))
    )
    assert data.largest == seen < prepared.tokenizer.vocab_size - 1
    resolve(config_of(folder, vocab_size=seen + 1))


# ---- what is refused -------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_both_values(
    folders, in_tokens, root, tmp_path
):
    config = config_of(folders[0])
    with pytest.raises(ConfigError, match=r"sequence_length = 32, but .* have 16"):
        resolve(config.replace("sequence_length", 32))
    with pytest.raises(
        ConfigError, match=r"is of the tokenizer \w+, but that of .* is"
    ):
        resolve(config_of(folders[0], in_tokens[1], vocab_size=512))
    with pytest.raises(ConfigError, match=r"vocab_size = 256, but the tokens go up to"):
        resolve(config_of(in_tokens[1]))
    bytes_given = config_of(folders[0], vocab_size=512, tokenizer=str(in_tokens[0]))
    with pytest.raises(ConfigError, match=r"is of the tokenizer bytes, but .* is"):
        resolve(bytes_given)
    shutil.copy(in_tokens[0], tmp_path)
    with_weights = config_of(folders[0], vocab_size=512).replace(
        "model.weights", f"hf:{tmp_path}"
    )
    with pytest.raises(ConfigError, match="the data is of the tokenizer bytes, but"):
        resolve(with_weights)
    same = config_of(in_tokens[1], vocab_size=512, tokenizer=str(in_tokens[0]))
    assert resolve(same).run.data.digest
    (root / "plain.txt").write_text("text " * 99)
    with pytest.raises(
        ConfigError, match=r"is a prepared folder and .*plain.txt is no"
    ):
        resolve(config_of(folders[0], str(root / "plain.txt")))
    with pytest.raises(ConfigError, match=r"plain.txt is no prepared folder"):
        resolve(config_of(str(root / "plain.txt"), weights=(1.0,)))
    for weights, shown in (
        ((1.0,), "has 1 numbers, data.paths 2 folders"),
        ((1.0, 0.0), "above 0"),
        ((1.0, 1e-9), "less than 1 in 10000"),
    ):
        with pytest.raises(ConfigError, match=shown):
            resolve(config_of(*folders, weights=weights))
    with pytest.raises(ConfigError, match=r"names .* 2 times; give it once"):
        resolve(config_of(folders[0], folders[1], folders[0]))
    with pytest.raises(ConfigError, match=r"s3://b/c is a bucket.*gs:// alone; mount"):
        resolve(config_of("s3://b/c"))


def test_another_folder_is_not_the_runs(folders):
    resolved = resolve(config_of(folders[0]))
    digest = resolved.run.data.digest
    with pytest.raises(ConfigError, match=f"data.digest = {digest} in.*the data here"):
        load_data(resolved.replace("data.paths", (folders[1],)).run)


def test_the_folders_tokenizer_stays_with_the_run(folders, in_tokens, tmp_path):
    keep_tokenizer(DataConfig(paths=(in_tokens[1],)), tmp_path)
    kept = open_tokenizer(tmp_path / "source")
    assert kept.digest == open_tokenizer(in_tokens[0]).digest
    assert (kept.start, kept.end) == ((0,), 1)
    keep_tokenizer(DataConfig(paths=(folders[0],)), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_start_reads_little_and_a_host_its_own_rows(folders, tmp_path):
    """Counts what a process reads of a folder's files."""
    code = f"""
import builtins, sys
from diloco_jax.data import loading, prepared
from diloco_jax.config import DataConfig, RunConfig
opened = []
real = prepared._opened
prepared._opened = lambda *shard: opened.append(shard) or real(*shard)
data = loading.load_data(RunConfig(
    data=DataConfig(paths=({folders[1]!r},)), sequence_length={LENGTH}))
data.index(0)[3]
assert len(opened) == 1, opened
assert "pyarrow" not in sys.modules and "tokenizers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- a source of one's own -------------------------------------------------------

OWN = '''
import grain


class Changed:
    def __init__(self, change):
        self._change = change

    def __mul__(self, rows):
        return self._change(rows)


F = Changed(lambda rows: rows.filter(lambda row: row["tokens"][0] == 0))
R = Changed(lambda rows: rows.repeat())

import numpy as np
from diloco_jax.data.loading import Data
from diloco_jax.data.source import TOKENS, WEIGHTS


class Squares:
    """Rows of squares, from any random-access data set."""

    fields = {{"tokens": TOKENS, "weights": WEIGHTS}}

    def __init__(self, rows, length):
        self._rows = grain.MapDataset.range(rows).map(
            lambda n: {{
                "tokens": ((n + np.arange(length + 1)) ** 2 % 97).astype(np.int32),
                "weights": np.ones(length, np.float32),
            }}
        )

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, row):
        return self._rows[row]


def data(run):
    length = run.sequence_length
    return Data(
        train=Squares({rows}, length),
        validation=Squares(3, length),
        digest="{digest}",
        largest=96,
        bytes_per_token=None,
    )


def none(run):
    return run


def broken(run):
    return run.no_such_field
'''


def own(tmp_path, name="data", rows=90, digest="squares"):
    (tmp_path / "own.py").write_text(OWN.format(rows=rows, digest=digest))
    return f"{tmp_path}/own.py:{name}"


def test_a_factory_makes_a_runs_data(tmp_path):
    config = config_of(factory=own(tmp_path))
    resolved = resolve(config)
    assert resolved.run.data.digest == "squares"
    assert resolved.run.data.arrays == ("tokens", "weights")
    summary = emulate(config).summary
    assert summary["eval_loss"] < 5.4
    assert summary["eval_bits_per_byte"] is None


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"name": "none"}, "returned RunConfig; it must return a .*Data"),
        ({"name": "broken"}, "failed: AttributeError"),
        ({"name": "datum"}, "did you mean 'data'"),
        ({"rows": 0}, "train has no row"),
    ],
)
def test_a_factory_that_makes_none_is_named(changes, shown, tmp_path):
    with pytest.raises(ConfigError, match=rf"data.factory = .*{shown}"):
        resolve(config_of(factory=own(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("was", "now", "shown"),
    [
        ("(n + np.arange(length + 1))", "np.arange(9)", r"\(9,\) as shape of 'tokens'"),
        (".astype(np.int32)", ".astype(float)", r"'tokens' is float64, and .* int32"),
        (".astype(np.int32)", ".astype(np.int32).tolist()", r"'tokens' is list"),
        ("% 97", "% 9700", r"tokens from \d+ to \d+, and largest = 96"),
        ('"weights": np', '"other": np', r"'weights' is NoneType"),
        ("self._rows = g", "self._rows = F * g", r"train row 6 is None: a filter leav"),
        (
            "self._rows = g",
            "self._rows = R * g",
            r"train has 9,223,.*`.repeat\(\)` has",
        ),
        ("self._rows[row]", "self._rows / 0", r"cannot be read: TypeError"),
        ("return len(self._rows)", "return None", r"cannot be read: TypeError"),
        ('digest="squares"', 'digest=""', r"digest is empty"),
    ],
)
def test_rows_of_a_factory_are_as_they_say(was, now, shown, tmp_path):
    name = own(tmp_path)
    text = (tmp_path / "own.py").read_text()
    assert was in text
    (tmp_path / "own.py").write_text(text.replace(was, now))
    with pytest.raises(ConfigError, match=rf"data.factory = .*{shown}"):
        resolve(config_of(factory=name))


def test_a_factory_with_other_data_is_refused(tmp_path):
    resolved = resolve(config_of(factory=own(tmp_path)))
    with pytest.raises(ConfigError, match=r"data.digest = cubes in .* has squares he"):
        load_data(resolved.replace("data.digest", "cubes").run)
