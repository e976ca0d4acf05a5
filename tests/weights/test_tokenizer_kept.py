"""The tokenizer of a run's data stays with the run, its export, and what it says."""

import json
import shutil

import make_tokenizers
import numpy as np
import pytest

from diloco_jax import cli
from diloco_jax.config import Config, DataConfig, IslandConfig, ModelConfig, RunConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.data.tokenizers.opening import open_tokenizer
from diloco_jax.weights.speaker import open_speaker


@pytest.mark.parametrize(
    ("kind", "name"), [("json", "tokenizer.json"), ("pieces", "tokenizer.model")]
)
def test_generate_speaks_in_the_datas_tokens(kind, name, tmp_path, capsys):
    path = make_tokenizers.KINDS[kind](tmp_path / "made")
    own_name = path.with_name(f"mine{path.suffix}")
    path.rename(own_name)
    tokenizer = open_tokenizer(own_name)
    (tokens,) = tokenizer.encode([make_tokenizers.library_text(5_000)])
    np.save(tmp_path / "tokens.npy", tokens)
    data = DataConfig(paths=(str(tmp_path / "tokens.npy"),), tokenizer=str(own_name))
    model = ModelConfig(
        vocab_size=1024, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1
    )
    run = RunConfig(model=model, data=data, sequence_length=16)
    config = resolve(Config(run=run, islands={"a": IslandConfig()}).validate())
    coordinator = main.Coordinator(config, tmp_path / "run", init=True)
    try:
        coordinator.start()
    finally:
        coordinator.close()
    shutil.rmtree(tmp_path / "made")
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["export", str(workdir), str(out)]) == 0
    said = []
    for source in (workdir, out):
        speaker = open_speaker(source)
        want = [*tokenizer.start, *tokenizer.encode(["import os"])[0]]
        assert speaker.encode("import os") == want
        assert speaker.ends == {tokenizer.end}
        line = ["generate", str(source), "--prompt", "import", "--max-tokens", "3"]
        capsys.readouterr()
        assert cli.main([*line, "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
        assert said[-1]["text"] == tokenizer.decode(said[-1]["tokens"])
    assert said[0]["tokens"] == said[1]["tokens"]
    assert open_tokenizer(out).digest == tokenizer.digest
    assert (out / name).is_file()
