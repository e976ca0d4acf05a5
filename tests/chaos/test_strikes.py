"""Schedules of strikes: their forms, and those drawn from a seed."""

import pytest

from diloco_jax.chaos.schedule import (
    KINDS,
    OF_PROCESSES,
    Strike,
    parse_strikes,
    random_strikes,
)
from diloco_jax.config import ConfigError

ISLANDS = ("a", "b")


def test_forms_are_read_and_sorted():
    texts = ["a+b@60s:delay10=0.2", "coordinator@5.5s:kill", "b@30s:stop5"]
    found = parse_strikes(texts, ISLANDS)
    assert found == (
        Strike(at_s=5.5, who=("coordinator",), kind="kill"),
        Strike(at_s=30, who=("b",), kind="stop", seconds=5),
        Strike(at_s=60, who=("a", "b"), kind="delay", seconds=10, value=0.2),
    )
    assert parse_strikes(map(str, found), ISLANDS) == found


@pytest.mark.parametrize(
    "text",
    [
        *("a@5s:explode", "a@5:kill", "a@5s:kill3", "a@5s:stop", "a@5s:stop0"),
        *("a@5s:throttle3", "a@5s:throttle3=0", "a@5s:stop3=1", "", "@5s:kill"),
        *(
            "a@5s:full",
            "coordinator@5s:full3=1",
            "a@5s:slow3",
            "a@5s:slow3=0",
            "a@5s:slow3=1",
            "a@5s:corrupt3=1",
        ),
    ],
)
def test_another_form_is_refused_with_the_forms(text):
    with pytest.raises(ConfigError, match="the forms are"):
        parse_strikes([text], ISLANDS)


def test_a_full_disk_is_the_coordinators():
    (strike,) = parse_strikes(["coordinator@5s:full3"], ISLANDS)
    assert not strike.of_network
    with pytest.raises(ConfigError, match="write coordinator@5s:full3"):
        parse_strikes(["a+coordinator@5s:full3"], ISLANDS)


@pytest.mark.parametrize(
    ("first", "second"),
    [("a@5s:stop5", "a+b@9s:stop1"), ("a@5s:partition5", "coordinator@9s:delay1=1")],
)
def test_strikes_that_overlap_are_refused(first, second):
    with pytest.raises(ConfigError, match="begin it after 10 s"):
        parse_strikes([second, first], ISLANDS)
    parse_strikes([first, second.replace("@9s", "@10.1s")], ISLANDS)


def test_other_things_may_be_struck_meanwhile():
    texts = ["a@5s:stop5", "a@6s:kill", "b@6s:stop5", "a@6s:partition2"]
    assert len(parse_strikes(texts, ISLANDS)) == 4


def test_the_coordinators_links_are_those_of_all():
    (strike,) = parse_strikes(["coordinator@5s:partition-up3"], ISLANDS)
    assert strike.links(ISLANDS) == ISLANDS
    (strike,) = parse_strikes(["coordinator@5s:stop3"], ISLANDS)
    assert strike.links(ISLANDS) == ()


def test_a_seed_repeats_its_schedule_and_it_can_be_written():
    def drawn(seed, every_s=4.0):
        kinds = tuple(KINDS)
        return random_strikes(seed, ISLANDS, every_s=every_s, for_s=400, kinds=kinds)

    found = drawn(3)
    assert found == drawn(3) != drawn(4)
    assert [s.at_s for s in found] == [4.0 * n for n in range(1, 101)]
    assert {s.kind for s in found} == set(KINDS)
    struck = {s.who for s in found if s.kind in OF_PROCESSES}
    assert struck == {("a",), ("b",), ("coordinator",)}
    assert parse_strikes(map(str, found), ISLANDS) == found
    assert parse_strikes(map(str, drawn(3, 1.1)), ISLANDS)
