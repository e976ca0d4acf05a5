"""Configs: from files and options, to `config.json` and back, and what is refused."""

import dataclasses
import sys

import numpy as np
import pytest
from config_support import load_config

from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    InnerConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
    differences,
    shared_fields,
)
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import resolve
from diloco_jax.data.corpus import Corpus

FILE = """
from diloco_jax.config import *
def config():
    return Config(islands={"v6e": IslandConfig(), "v5p_a": IslandConfig(batch_size=6)},
                  placement=Placement(faults=("v6e@3:kill",)))
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "two.py").write_text(FILE)
    return tmp_path / "two.py"


# ---- files and options -----------------------------------------------------------


def test_a_config_without_options_is_what_the_file_says(path):
    config = load_config(path)
    assert config.islands["v5p_a"].batch_size == 6
    assert config.run == RunConfig()


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ("--sync.quorum 2", "sync.quorum", 2),
        ("--total_tokens=9", "total_tokens", 9),
        ("--total-tokens 1.2e6", "total_tokens", 1_200_000),
        ("--workdir runs/x", "placement.workdir", "runs/x"),
        # The prefixes that messages have.
        ("--placement.workdir runs/x", "placement.workdir", "runs/x"),
        ("--run.sync.quorum=2", "sync.quorum", 2),
        ("--islands.v5p-a.batch-size 4", "islands.v5p_a.batch_size", 4),
        ("--islands.v5p_a.batch_size=4", "islands.v5p_a.batch_size", 4),
        ("--islands.v6e.loss-chunk 1e2", "islands.v6e.loss_chunk", 100),
        ("--data.paths a b", "data.paths", ("a", "b")),
        ("--faults", "placement.faults", ()),
        ("--outer.learning-rate 0.7", "outer.learning_rate", 0.7),
        ("--outer.learning-rate None", "outer.learning_rate", None),
    ],
)
def test_an_option_replaces_its_field_alone(path, options, name, value):
    found = load_config(path, options.split())
    assert found == load_config(path).replace(name, value)


def test_a_config_imports_what_lies_beside_it(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path.with_name("beside_the_config.py").write_text("TOKENS = 25_600")
    path.write_text(
        "import beside_the_config\n"
        "from diloco_jax.config import *\n"
        "def config():\n"
        "  run = RunConfig(total_tokens=beside_the_config.TOKENS)\n"
        "  return Config(run=run, islands={'a': IslandConfig()})"
    )
    for _ in range(2):
        assert load_config(path).run.total_tokens == 25_600
    # Last, so that a file here hides no module that is installed.
    assert sys.path.index(str(path.parent)) == len(sys.path) - 1


def test_every_config_of_the_repository_is_valid(pytestconfig):
    files = sorted((pytestconfig.rootpath / "configs").glob("*.py"))
    assert files
    for file in files:
        load_config(file)


# ---- fingerprint -----------------------------------------------------------------


def test_fingerprint_covers_what_islands_share_and_nothing_local():
    base = RunConfig()
    assert base.fingerprint() == RunConfig().fingerprint()
    local = dataclasses.replace(base, data=DataConfig(paths=("/elsewhere",)))
    assert local.fingerprint() == base.fingerprint()
    other = dataclasses.replace(base, data=DataConfig(digest="1"))
    assert other.fingerprint() != base.fingerprint()


def test_whole_numbers_have_one_fingerprint_before_and_after_config_json(tmp_path):
    run = RunConfig(inner=InnerConfig(clip_norm=0), outer=OuterConfig(momentum=0))
    write_config_json(Config(run=run), tmp_path / "config.json")
    read = read_config_json(tmp_path / "config.json").run
    assert read.fingerprint() == run.fingerprint()


def test_differences_name_the_leaves():
    ours = shared_fields(RunConfig())
    theirs = shared_fields(RunConfig(sync=SyncConfig(quorum=2), seed=1))
    assert differences(ours, theirs) == [
        "seed: 0 here, 1 there",
        "sync.quorum: 1 here, 2 there",
    ]


# ---- config.json -----------------------------------------------------------------


def test_config_json_gives_the_same_config(path, tmp_path):
    config = load_config(path, ["--data.paths", "a", "--outer.momentum", "0.5"])
    write_config_json(config, tmp_path / "config.json")
    assert read_config_json(tmp_path / "config.json") == config
    assert load_config(tmp_path / "config.json") == config
    assert not list(tmp_path.glob("*.tmp"))


# ---- resolve ---------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """Calls that read corpora; the text is faked."""
    calls = []

    def load_corpus(paths, validation_fraction, copied):
        calls.append((paths, validation_fraction))
        train, validation = np.zeros(200, np.uint8), np.zeros(9, np.uint8)
        return Corpus(train, validation, "abc", ("a",))

    monkeypatch.setattr("diloco_jax.data.corpus.load_corpus", load_corpus)
    return calls


def test_resolve_fills_in_digest_and_outer_preset_once(read):
    config = Config(run=RunConfig(outer=OuterConfig(learning_rate=0.3)))
    resolved = resolve(config)
    assert resolved.run.data.digest == "abc"
    assert resolved.run.outer.learning_rate == 0.3
    assert None not in (resolved.run.outer.optimizer, resolved.run.outer.momentum)
    assert resolve(resolved) == resolved
    assert read == [((), 0.02)]
    assert resolved.placement == Placement()


def test_text_that_is_not_the_runs_is_refused_where_it_must_be_here(read):
    config = Config(run=RunConfig(data=DataConfig(digest="d")))
    assert resolve(config).run.data.digest == "d"
    assert read == []
    with pytest.raises(ConfigError, match=r"data\.digest = d .* has abc"):
        resolve(config, text_is_here=True)
