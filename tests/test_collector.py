"""Starts without the garbage collector."""

from __future__ import annotations

import gc
import weakref

import pytest

from diloco_jax.collector import uncollected


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def collections():
    """Generations that were collected since, in order."""
    seen: list[int] = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def make(count):
    """Make so many objects that stay; return them."""
    return [[number] for number in range(count)]


def test_nothing_is_collected_inside_and_all_is_as_before(collections):
    with uncollected():
        before = len(collections)
        kept = make(100_000)
        assert len(collections) == before
    assert gc.isenabled()
    kept += make(100_000)
    assert len(collections) > before


def test_what_a_start_made_is_never_looked_at_again():
    with uncollected():
        node = Node()
        seen = weakref.ref(node)
        del node
    gc.collect()
    assert seen() is not None
    assert gc.get_freeze_count() > 0


def test_what_is_made_later_is_freed():
    with uncollected():
        pass
    node = Node()
    seen = weakref.ref(node)
    del node
    gc.collect()
    assert seen() is None


def test_a_start_that_fails_leaves_the_collector_on():
    with pytest.raises(ValueError, match="fell"), uncollected():
        raise ValueError("fell")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    frozen = gc.get_freeze_count()
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == frozen
