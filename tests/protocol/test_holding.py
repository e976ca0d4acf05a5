"""The decision of a holder: when a snapshot may take the place of an older one."""

import typing

import pytest

from diloco_jax.protocol.holding import (
    AwaitAnchor,
    Commit,
    Drop,
    Forget,
    KeepFragment,
    Merge,
    RestoreFragments,
    ToHolder,
    may_replace_snapshots,
)
from diloco_jax.protocol.values import DeltaKey, Version

NEXT = Version(1, 1)
SERVING = (
    Merge(fragment=0, version=NEXT, contributions=(), share=1.0, final=False),
    Commit(fragment=0, version=NEXT),
    KeepFragment(cycle=1, fragment=0, version=NEXT, merges=1, tokens=16),
    Drop(delta=DeltaKey("a", 1, 0, 1)),
    Forget(island="a", before=2, kept=()),
    AwaitAnchor(fragment=0, island="a", incarnation=1, term=2),
)


def test_what_a_lead_says_at_its_start_may_never_have_been():
    assert not may_replace_snapshots(RestoreFragments(fragments=()))


@pytest.mark.parametrize("message", SERVING, ids=lambda message: type(message).__name__)
def test_a_lead_that_serves_has_passed_the_gate(message):
    assert may_replace_snapshots(message)


def test_every_message_of_a_lead_that_serves_is_tried():
    assert {type(message) for message in SERVING} == set(typing.get_args(ToHolder))


def test_a_process_that_began_the_run_needs_nobodys_word():
    assert may_replace_snapshots(None)
