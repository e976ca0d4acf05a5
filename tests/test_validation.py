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
from diloco_jax.config.fields import BELOW_1, LARGEST, LONGEST_S, SHARE, Bound

SECTIONS = {
    "": RunConfig,
    "islands.v6e.": IslandConfig,
    "placement.": Placement,
    "launch.": LaunchConfig,
}


def declared(owner, prefix=""):
    """Paths of all fields, with how they were declared."""
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from declared(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.metadata


BOUNDS = [
    (section, field, metadata["bound"])
    for section, owner in SECTIONS.items()
    for field, metadata in declared(owner)
    if metadata["bound"]
]


def hint_of(section, field):
    """The type of a field, given by its path."""
    owner = SECTIONS[section]
    for name in field.split("."):
        owner = typing.get_type_hints(owner)[name]
    return owner


def with_value(section, field, value):
    """A config that differs from a good one in one field."""

    def replaced(owner, path):
        inner = getattr(owner, path[0])
        return dataclasses.replace(
            owner, **{path[0]: replaced(inner, path[1:]) if path[1:] else value}
        )

    config = Config(islands={"v6e": IslandConfig()})
    path = field.split(".")
    if section == "islands.v6e.":
        return Config(islands={"v6e": replaced(config.islands["v6e"], path)})
    part = section.rstrip(".") or "run"
    return dataclasses.replace(config, **{part: replaced(getattr(config, part), path)})


def refusal(config):
    """The message with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        config.validate()
    return str(caught.value)


def numeric_fields(owner, prefix=""):
    """Paths of all fields that hold numbers."""
    for name, hint in typing.get_type_hints(owner).items():
        if dataclasses.is_dataclass(hint):
            yield from numeric_fields(hint, f"{prefix}{name}.")
        elif typing.get_origin(hint) is tuple:
            continue  # Checked with what they belong to.
        elif {int, float} & {hint, *typing.get_args(hint)}:
            yield f"{prefix}{name}"


# ---- bounds ----------------------------------------------------------------------


@pytest.mark.parametrize("section", list(SECTIONS))
def test_every_number_of_a_config_has_bounds(section):
    bounded = {field for where, field, _ in BOUNDS if where == section}
    assert bounded == set(numeric_fields(SECTIONS[section]))


@pytest.mark.parametrize(("section", "field", "bound"), BOUNDS)
def test_a_number_outside_its_bounds_is_refused(section, field, bound):
    whole = int in {hint_of(section, field), *typing.get_args(hint_of(section, field))}
    low = bound.low if bound.above else bound.low - 1
    high = bound.high if bound.below else bound.high * 2
    wrong = [int(low), int(high)] if whole else [low, high, math.nan, math.inf]
    for value in wrong:
        value = value if whole else float(value)
        message = refusal(with_value(section, field, value))
        assert message.startswith(f"{section}{field} = {value}; it must be ")
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


def test_bounds_tell_which_ends_are_in():
    assert str(BELOW_1) == "at least 0, below 1"
    assert [BELOW_1.holds(x) for x in (-1e-9, 0, 0.999, 1)] == [0, 1, 1, 0]
    assert str(SHARE) == "at least 0, at most 1"
    assert [SHARE.holds(x) for x in (0, 1, 1.001, math.nan)] == [1, 1, 0, 0]
    above = Bound(0, LONGEST_S, above=True)
    assert str(above) == "above 0, at most 1,000,000,000"
    assert [above.holds(x) for x in (0, 1e-9, LONGEST_S)] == [0, 1, 1]


# ---- types and choices -----------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "field", "value", "shown"),
    [
        ("islands.v6e.", "attention", "splsh", "(did you mean 'splash'?); choose from"),
        ("", "sync.codec_up", "int2", "choose from f32, bf16, int8, int4"),
        ("", "sync.codec_up", "int9", "(did you mean 'int8'?); choose from"),
        ("", "sync.adopt", "keeps", "(did you mean 'keep'?); choose from keep, rebase"),
        ("", "sync.weighting", "token", "(did you mean 'tokens'?); choose from tokens"),
        (
            "",
            "outer.optimizer",
            "adamm",
            "(did you mean 'adam'?); choose sgd, nesterov",
        ),
        ("islands.v6e.", "batch_size", "8", "Expected `int`, got `str`"),
        ("islands.v6e.", "hosts", 1.5, "Expected `int`, got `float`"),
        ("", "sync.quorum", None, "Expected `int`, got `null`"),
        ("placement.", "faults", "a@3:kill", "Expected `array`, got `str`"),
        ("placement.", "time_budget_s", "10", "Expected `float`, got `str`"),
    ],
)
def test_another_type_or_choice_is_refused(section, field, value, shown):
    message = refusal(with_value(section, field, value))
    assert message.startswith(f"{section}{field} = {value!r}")
    assert shown in message


# ---- what must fit together ------------------------------------------------------


def test_hosts_that_do_not_share_the_devices_are_refused():
    island = IslandConfig(hosts=4, mesh_fsdp=2, mesh_tensor=3)
    message = refusal(Config(islands={"v6e": island}))
    for text in ("hosts = 4", "divide 6, the", "1 * 2 * 3", "a divisor of 6"):
        assert text in message


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
    ("field", "value", "shown"),
    [
        ("checkpoints", "ftp://x", ["checkpoints = 'ftp://x'", "gs:// or s3://"]),
        ("bind", "", ["placement.bind: address ''", "write 10.0.0.1:7077"]),
        ("advertise", "host", ["placement.advertise: address 'host'", "HOST:PORT"]),
        (
            "faults",
            ("coordinator/2@3:kill",),
            ["coordinator/2@3", "1 host,", "never strike"],
        ),
        ("faults", ("v6@3:kill",), ["no 'v6'", "did you mean 'v6e'"]),
    ],
)
def test_a_placement_that_cannot_work_is_refused(field, value, shown):
    message = refusal(with_value("placement.", field, value))
    for text in shown:
        assert text in message


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
