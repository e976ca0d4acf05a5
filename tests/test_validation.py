"""Configs that are refused: values outside the bounds of their fields, and values that
do not fit together."""

import dataclasses
import math
import typing

import pytest

from diloco_jax import emulate
from diloco_jax.config import (
    Config,
    ConfigError,
    IslandConfig,
    LaunchConfig,
    Placement,
    RunConfig,
)
from diloco_jax.config.fields import LARGEST

CONFIG = Config(islands={"v6e": IslandConfig()})
SECTIONS = {
    "": RunConfig,
    "islands.v6e.": IslandConfig,
    "placement.": Placement,
    "launch.": LaunchConfig,
}


def declared(owner, prefix):
    """Path, type and bounds of every field."""
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from declared(hint, f"{path}.")
        else:
            yield path, {hint, *typing.get_args(hint)}, field.metadata["bound"]


FIELDS = [
    field for prefix, owner in SECTIONS.items() for field in declared(owner, prefix)
]


def refusal(config):
    """The message with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        config.validate()
    return str(caught.value)


# ---- bounds ----------------------------------------------------------------------


def test_every_number_of_a_config_has_bounds():
    for path, kinds, bound in FIELDS:
        # A tuple is checked with what it belongs to.
        of_tuple = any(typing.get_origin(kind) is tuple for kind in kinds)
        number = bool({int, float} & kinds) and not of_tuple
        assert (bound is not None) == number, path


@pytest.mark.parametrize(("path", "kinds", "bound"), [f for f in FIELDS if f[2]])
def test_a_number_outside_its_bounds_is_refused(path, kinds, bound):
    whole = int in kinds
    ends = (bound.holds(bound.low), bound.holds(bound.high))
    assert ends == (not bound.above, not bound.below)
    low = bound.low if bound.above else bound.low - 1
    high = bound.high if bound.below else bound.high * 2
    wrong = [int(low), int(high)] if whole else [low, high, math.nan, math.inf]
    for value in wrong:
        value = value if whole else float(value)
        with pytest.raises(ConfigError) as caught:
            CONFIG.replace(path, value)
        message = str(caught.value)
        assert message.startswith(f"{path} = {value}; it must be ")
        assert str(bound) in message
        top = f"at most {bound.high:.1e}"
        assert (top in message) == (LARGEST == bound.high < value < math.inf)
        assert ("finite" in message) == (not math.isfinite(value))


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"islands": [IslandConfig()]}, "must be a dict of IslandConfig by name"),
        ({"islands": {"a": {"batch_size": 4}}}, r"islands\['a'\] = .*IslandConfig"),
        ({"islands": {1: IslandConfig()}}, "islands has 1 as a name"),
        ({"run": None}, "run = None; it must be a diloco_jax.config.RunConfig"),
        ({"run": RunConfig(model={"d_model": 32})}, r"run\.model = .*ModelConfig"),
    ],
)
def test_a_part_of_another_class_is_refused(fields, shown):
    with pytest.raises(ConfigError, match=shown):
        Config(**fields).validate()


def test_what_is_no_config_is_refused():
    with pytest.raises(ConfigError, match=r"'my.py'; it must be a .*Config"):
        emulate("my.py")


# ---- types and choices -----------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("islands.v6e.attention", "splsh", "(did you mean 'splash'?); choose from"),
        ("islands.v6e.batch_size", "8", "Expected `int`, got `str`"),
        ("islands.v6e.hosts", 1.5, "Expected `int`, got `float`"),
        ("sync.quorum", None, "Expected `int`, got `null`"),
        ("sync.merge", abs, "an object of yours as 'file.py:name'"),
        ("placement.faults", "a@3:kill", "Expected `array`, got `str`"),
        ("placement.time_budget_s", "10", "Expected `float`, got `str`"),
    ],
)
def test_another_type_or_choice_is_refused(path, value, shown):
    with pytest.raises(ConfigError) as caught:
        CONFIG.replace(path, value)
    assert str(caught.value).startswith(f"{path} = {value!r}")
    assert shown in str(caught.value)


# ---- what must fit together ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a b", "letters, digits"),
        ("a\n", "letters, digits"),
        ("..", "begins with"),
        ("a" * 65, "longer than 64"),
        ("coordinator", "rename it"),
    ],
)
def test_an_islands_name_must_do_for_files_and_faults(name, shown):
    for config in (
        Config(islands={name: IslandConfig()}),
        Config(placement=Placement(admit=(name,))),
    ):
        message = refusal(config)
        assert repr(name) in message
        assert shown in message


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"workers": 1}, ["has 2 addresses", "placement.workers = 1", "at least 2"]),
        ({"workers": 3}, ["has 2 addresses", "placement.workers = 3"]),
        ({"worker_addresses": ("a:1", "b")}, ["worker_addresses[1]: address 'b'"]),
        ({"worker_addresses": ("a:1", "b:0")}, ["'b:0'", "give a port from 1"]),
        ({"worker_addresses": ("a:1", "b:65535")}, ["'b:65535'", "to 65534"]),
        ({"worker_addresses": ("a:1", "a:1")}, ["a port twice"]),
    ],
)
def test_workers_elsewhere_need_addresses_that_can_be_dialled(changes, shown):
    given = {"workers": 2, "worker_addresses": ("a:1", "b:1"), **changes}
    islands = {"v6e": IslandConfig()}
    message = refusal(Config(placement=Placement(**given), islands=islands))
    for text in shown:
        assert text in message
    there = Placement(workers=2, worker_addresses=("a:1", "b:1"))
    Config(placement=there, islands=islands).validate()


def test_the_last_host_of_an_island_may_be_struck():
    islands = {"v6e": IslandConfig(mesh_data=2, hosts=2)}
    faults = Placement(faults=("v6e/1@1:kill", "coordinator@1:kill"))
    config = Config(islands=islands, placement=faults)
    assert config.validate() is config
