"""docs/models.md: its model trains; what is no model is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from config_support import load_config

from diloco_jax import cli
from diloco_jax.config import Config, ConfigError, IslandConfig, ModelConfig, RunConfig
from diloco_jax.config.resolving import with_absolute_paths
from diloco_jax.island.device.build import build_trainer
from diloco_jax.models.build import build
from diloco_jax.models.flops import count_flops, least_flops, least_sequence_flops
from diloco_jax.models.presets import preset
from diloco_jax.planning.plan import fragments_of

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
from diloco_jax.models.model import Model
def init(key): return {"w": jnp.zeros((2, 3))}
def loss(params, batch):
    loss = jnp.sum(params["w"])
    return loss, {"loss": loss, "tokens": jnp.ones(())}
AXES = {"w": ("embed", "mlp")}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The config of the page."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text(block)
    return path


def made_by(factory: object, **run: object) -> RunConfig:
    return RunConfig(model=ModelConfig(factory=str(factory)), **run)


@pytest.mark.parametrize("in_flax", [False, True])
def test_the_models_of_the_page_learn(
    path: Path, tmp_path: Path, capsys, *, in_flax: bool
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(5):
        (text / f"{index}.txt").write_text("abcdefgh, 01234567. " * 200)
    options = ["--data.paths", str(text), "--data.validation-fraction", "0.3"]
    options += ["--total-tokens", "40000", "--json"]
    if in_flax:
        file = r"^```python file=(\S+)\n(.*?)^```$"
        ((name, block),) = re.findall(file, PAGE, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block)
        options += ["--model.factory", f"{tmp_path / name}:model"]
    assert cli.main(["emulate", str(path), *options]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["eval_loss"] < np.log(256) - 1.5
    assert all(i["tokens_merged"] for i in summary["islands"].values())


def test_its_products_are_counted(path: Path) -> None:
    config = load_config(path)
    flops = count_flops(config.run, IslandConfig(batch_size=8))
    # Forward: mix and out. Backward: both sides of each, the inputs' side included.
    assert flops.model == flops.executed == 8 * 64 * 6 * (64 * 32 + 32 * 256)
    assert flops.analytic is None
    assert fragments_of(config).total == 256 * 32 * 2 + 64 * 32


def bundled_in(folder: Path) -> Path:
    """A file whose `make` returns the bundled model."""
    factory = folder / "bundled.py"
    factory.write_text(
        "import dataclasses\n"
        "from diloco_jax.models.build import build\n"
        "def make(run, island, layout):\n"
        "    model = dataclasses.replace(run.model, factory='')\n"
        "    return build(dataclasses.replace(run, model=model), island, layout)\n"
    )
    return factory


def test_the_least_of_it_is_its_products_with_weights(
    path: Path, tmp_path: Path
) -> None:
    """Attention is left out, which a kernel may leave out, too."""
    page = load_config(path).run
    assert least_sequence_flops(page) == count_flops(page, IslandConfig()).model / 8
    # Half of the bundled model's products are attention at this length.
    run = made_by(f"{bundled_in(tmp_path)}:make", sequence_length=1024)
    run = dataclasses.replace(
        run, model=dataclasses.replace(preset("2m"), factory=run.model.factory)
    )
    least = least_flops(run.model, 1024)
    assert least_sequence_flops(run) == pytest.approx(least, rel=0.02)
    assert count_flops(run, IslandConfig()).model > 8 * 1.3 * least


def test_products_among_weights_are_none_of_a_sequence(tmp_path: Path) -> None:
    factory = tmp_path / "merged.py"
    factory.write_text(
        "import jax, jax.numpy as jnp\n"
        "from diloco_jax.models.model import Model\n"
        "def init(key): return {'a': jnp.ones((32, 8)), 'b': jnp.ones((8, 32))}\n"
        "def loss(params, batch):\n"
        "    hot = jax.nn.one_hot(batch['tokens'][:, 1:] % 32, 32)\n"
        "    loss = jnp.mean(hot @ (params['a'] @ params['b']))\n"
        "    return loss, {'loss': loss, 'tokens': jnp.ones(())}\n"
        "AXES = {'a': ('embed', 'mlp'), 'b': ('mlp', 'embed')}\n"
        "def make(run, island, layout): return Model(init, loss, AXES)\n"
    )
    run = made_by(f"{factory}:make", sequence_length=64)
    # Forward, and backward to the product of the weights.
    assert least_sequence_flops(run) == 64 * 2 * 2 * 32 * 32


@pytest.mark.parametrize(
    ("make", "level"),
    [
        ("lambda run, island, layout: loop_model(init)", "INFO"),
        ("lambda run, island, layout: Model(init, broken, AXES)", "WARNING"),
    ],
)
def test_a_program_that_cannot_be_traced_bounds_nothing_and_is_named(
    tmp_path: Path, caplog, make: str, level: str
) -> None:
    caplog.set_level("INFO", "diloco_jax")
    factory = tmp_path / "untold.py"
    factory.write_text(
        f"{MODEL}from diloco_jax.models.model import loop_model\n"
        "def broken(params, batch): raise RuntimeError('for a TPU alone')\n"
        f"make = {make}\n"
    )
    run = made_by(f"{factory}:make")
    assert least_sequence_flops(run) == 0.0
    (said,) = caplog.records
    assert said.message.startswith("the FLOPs of model.factory cannot be counted: ")
    assert said.levelname == level


def test_the_island_reaches_the_factory(tmp_path: Path) -> None:
    factory = tmp_path / "curious.py"
    factory.write_text(
        MODEL + "def make(run, island, layout):\n"
        "    raise ValueError(f'{run.seed} {island.remat} {layout.platform}')\n"
    )
    run = made_by(f"{factory}:make", seed=7)
    with pytest.raises(ConfigError, match="failed: ValueError: 7 full cpu"):
        build_trainer(run, IslandConfig(remat="full"))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        ("3", "returned int; it must return a diloco_jax.models.model.Model"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("Model(init, loss, {'w': ('embed',)})", r"axes do not .* w: shape \(2, 3\)"),
        ("Model(init, loss, {'v': ('embed', 'mlp')})", "axes do not name"),
        ("Model(lambda key: {'w': jnp.zeros(2, int)}, loss, AXES)", "makes w as int32"),
        ("Model(lambda key: [jnp.zeros(2)], loss, AXES)", r"a leaf at \[0\]"),
        (
            "Model(lambda k: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), loss, {})",
            r"a leaf at .*value; .* of flax, nnx.to_pure_dict\(state\)",
        ),
        ("Model(lambda key: 1 / 0, loss, AXES)", "its model fails: ZeroDivisionError"),
        (
            "Model(init, lambda p, b: loss(p, b)[0], AXES)",
            "must return the mean loss and a dict of 'loss' and 'tokens'",
        ),
        ("Model(init, lambda p, b: (loss(p, b)[0], {}), AXES)", "a dict of 'loss' and"),
        (
            "Model(init, lambda p, b: (p['w'], loss(p, b)[1]), AXES)",
            r"the loss of shape \(2, 3\)",
        ),
        (
            "Model(init, lambda p, b: (jnp.sum(b['tokens']), loss(p, b)[1]), AXES)",
            "the loss of shape .* dtype int32",
        ),
        ("Model(init, lambda p, b: loss(b, p), AXES)", "its model fails"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, made: str, what: str) -> None:
    (tmp_path / "m.py").write_text(
        f"{MODEL}def make(run, island, layout): return {made}\n"
    )
    factory = f"{tmp_path / 'm.py'}:make"
    with pytest.raises(ConfigError, match=what) as caught:
        build(made_by(factory))
    assert f"model.factory = {factory!r}" in str(caught.value)


def test_a_factory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'json:dump_s': json has no 'dump_s' .did"):
        build(made_by("json:dump_s"))


def test_of_a_file_the_folder_is_this_machines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(run=made_by("models/m.py:make"))
    made = with_absolute_paths(config)
    assert made.run.model.factory == f"{tmp_path}/models/m.py:make"
    assert made.run.fingerprint() == config.run.fingerprint()
    other = Config(run=made_by("models/n.py:make"))
    assert other.run.fingerprint() != config.run.fingerprint()


def test_a_module_is_found_by_its_name() -> None:
    shapes = build(made_by(f"{__name__}:of_this_module")).shapes()
    assert jax.tree.leaves(shapes)[0].dtype == np.float32


def of_this_module(run, island, layout):
    """A factory."""
    plain = dataclasses.replace(run, model=ModelConfig())
    return build(plain, island, layout)
