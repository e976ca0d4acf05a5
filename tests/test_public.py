"""The public names: each is documented, typed, and has an example that runs."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
from pathlib import Path

import pytest

import diloco_jax
from diloco_jax import Config, ConfigError, IslandConfig

ROOT = Path(__file__).parents[1]
PAGES = ("python.md", "embed.md")
"""Pages whose blocks other tests run (tests/runtime/)."""
PROVOKED = {
    "IslandEndedError": "runtime/test_joined.py",
    "LocalClusterError": "runtime/test_local_cluster.py",
}
"""Errors that only a whole run raises, and where tests provoke them."""


def examples_of(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(getattr(diloco_jax, name), name)
    return [test for test in found if test.examples]


def on_a_page(name: str) -> bool:
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    blocks = "".join(re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.M | re.S))
    shown = "join" if name == "JoinedIsland" else name  # What `join` returns.
    return re.search(rf"\b{shown}\b", blocks) is not None


def is_provoked(name: str) -> bool:
    text = (ROOT / "tests" / PROVOKED[name]).read_text() if name in PROVOKED else ""
    return re.search(rf"raises\(\s*{name}\b", text) is not None


@pytest.mark.parametrize("name", diloco_jax.__all__)
def test_a_public_name_is_documented_and_its_example_runs(name):
    public = getattr(diloco_jax, name)
    assert len(inspect.getdoc(public)) > 20
    tests = examples_of(name)
    assert tests or on_a_page(name) or is_provoked(name)
    for test in tests:
        said: list[str] = []
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        assert not runner.run(test, out=said.append).failed, "".join(said)
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.mark.parametrize("name", diloco_jax.__all__)
def test_a_public_function_has_types(name):
    public = getattr(diloco_jax, name)
    functions = [public] if inspect.isfunction(public) else []
    if inspect.isclass(public):
        functions = [
            member
            for key, member in vars(public).items()
            if inspect.isfunction(member) and not key.startswith("_")
        ]
    for function in functions:
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        assert inspect.getdoc(function), function
        for parameter in signature.parameters.values():
            if parameter.name != "self":
                assert parameter.annotation is not inspect.Parameter.empty, function


def test_every_public_name_stands_on_the_page_or_in_its_examples():
    page = (ROOT / "docs" / "python.md").read_text()
    assert 20 <= len(diloco_jax.__all__) <= 30
    for name in ("emulate", "LocalCluster", "read_history", "join", "read_config"):
        assert name in diloco_jax.__all__
        assert name in page


def test_an_unknown_name_is_named():
    with pytest.raises(AttributeError, match="emulated"):
        _ = diloco_jax.emulated


# ---- config.replace -----------------------------------------------------------------


CONFIG = Config(islands={"v5p-a": IslandConfig(), "v6e": IslandConfig(batch_size=2)})


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("sync.grace", 0, lambda c: c.run.sync.grace),
        ("run.sync.grace", 0.25, lambda c: c.run.sync.grace),
        ("total_tokens", 7, lambda c: c.run.total_tokens),
        ("islands.v5p-a.batch_size", 3, lambda c: c.islands["v5p-a"].batch_size),
        ("faults", ("v6e@3:kill",), lambda c: c.placement.faults),
        ("placement.restarts", 1, lambda c: c.placement.restarts),
        ("launch.name", "x", lambda c: c.launch.name),
        ("islands", {"b": IslandConfig()}, lambda c: c.islands),
        ("islands.v6e", IslandConfig(hosts=2), lambda c: c.islands["v6e"]),
    ],
)
def test_replace_changes_one_field_and_no_other(name, value, read):
    before = dataclasses.asdict(CONFIG)
    changed = CONFIG.replace(name, value)
    assert read(changed) == value
    assert read(CONFIG) != value
    assert dataclasses.asdict(CONFIG) == before
    old = read(CONFIG)
    assert dataclasses.asdict(changed.replace(name, old)) == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sync.grase", 0, r"no field 'sync\.grase'.*did you mean 'grace'"),
        ("grace", 0, r"no field 'grace'.*did you mean"),
        ("islands.v6f.batch_size", 1, r"no field 'islands\.v6f'.*did you mean 'v6e'"),
        ("sync.grace", 1.5, r"sync\.grace = 1\.5; it must be at least 0, below 1"),
        ("sync.quorum", "two", r"sync\.quorum = 'two'"),
        ("islands.v6e.batch_size", 0, r"islands\.v6e\.batch_size = 0; it must be"),
        ("sync.grace.x", 1, r"sync\.grace is a value"),
        ("sync", 3, r"sync = 3: give a SyncConfig"),
    ],
)
def test_replace_refuses_what_is_no_field_or_no_value(name, value, message):
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(name, value)


def test_replace_takes_several_fields_and_the_first_wrong_one_changes_nothing():
    both = CONFIG.replace({"sync.grace": 0, "islands.v6e.batch_size": 5})
    assert (both.run.sync.grace, both.islands["v6e"].batch_size) == (0, 5)
    with pytest.raises(ConfigError, match=r"sync\.grace = 2; it must be"):
        CONFIG.replace({"seed": 3, "sync.grace": 2})


# ---- what a notebook shows ----------------------------------------------------------


@pytest.mark.parametrize("name", ["SyncConfig", "IslandConfig", "EmulationOptions"])
def test_the_docstring_of_a_section_has_every_field_with_its_help(name):
    section = getattr(diloco_jax, name)
    text = " ".join(inspect.getdoc(section).split())
    for field in dataclasses.fields(section):
        assert f"{field.name} (" in text
        assert " ".join(field.metadata["help"].split()) in text
    assert max(map(len, section.__doc__.splitlines())) <= 88


def test_a_docstring_has_default_and_bounds():
    text = " ".join(inspect.getdoc(diloco_jax.SyncConfig).split())
    assert "grace (float, default 0.8, at least 0, below 1): gamma" in text


def test_a_config_shows_what_differs_from_the_defaults():
    shown = CONFIG.replace({"sync.grace": 0, "faults": ("v6e@3:kill",)})._repr_html_()
    assert "<th>sync.grace</th><td>0</td>" in shown
    assert "<th>islands.v6e.batch_size</th><td>2</td>" in shown
    assert "&#x27;v6e@3:kill&#x27;" in shown
    assert "quorum" not in shown
    assert Config()._repr_html_() == (
        "<table><tr><th>islands</th><td>a</td></tr></table>"
    )
