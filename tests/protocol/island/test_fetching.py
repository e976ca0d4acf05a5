"""The order of fetches, and the version that each goes on from."""

import pytest

from diloco_jax.protocol.island.conversation import (
    JOIN_FETCHES,
    Fetching,
    HostFetch,
    agreed,
)
from diloco_jax.protocol.values import Version

V = [Version(1, n) for n in range(20)]


def joined(versions):
    fetching = Fetching(versions)
    while (fetch := fetching.next()) is not None:
        fetching.got(fetch.fragment, fetch.want)
    assert fetching.joined
    return fetching


def test_a_join_fetches_every_fragment_in_full_some_at_a_time():
    fetching = Fetching([V[3]] * (JOIN_FETCHES + 2))
    begun = [fetching.next() for _ in range(JOIN_FETCHES)]
    assert [(f.fragment, f.want, f.have) for f in begun] == [
        (fragment, V[3], None) for fragment in range(JOIN_FETCHES)
    ]
    assert fetching.next() is None
    fetching.got(1, V[3])
    assert fetching.next().fragment == JOIN_FETCHES
    fetching.want(1, V[4])
    for fragment in (0, 2, 3, JOIN_FETCHES):
        fetching.got(fragment, V[3])
    last = fetching.next()
    assert (last.fragment, last.have) == (JOIN_FETCHES + 1, None)
    assert fetching.next() is None, "what came meanwhile waits for the join"
    assert not fetching.joined
    fetching.got(last.fragment, V[3])
    assert fetching.joined
    assert fetching.next()[:3] == (1, V[4], V[3])


def test_a_failed_join_goes_on_with_the_newest_version():
    fetching = Fetching([V[3]] * 2)
    fetching.next()
    fetching.want(0, V[5])
    assert fetching.again(0)[:3] == (0, V[5], None)
    assert fetching.next().fragment == 1
    assert fetching.next() is None


def test_after_it_fetches_go_one_at_a_time_and_first_what_lags_most():
    fetching = joined([V[3], V[1], V[2]])
    for fragment in range(3):
        fetching.want(fragment, V[4])
    order = []
    while (fetch := fetching.next()) is not None:
        assert fetching.next() is None
        order.append(fetch.fragment)
        fetching.got(fetch.fragment, fetch.want)
    assert order == [1, 2, 0]


def test_older_versions_than_known_are_not_wanted():
    fetching = joined([V[3]])
    fetching.want(0, V[2])
    assert fetching.next() is None
    fetching.want(0, V[6])
    fetching.want(0, V[5])
    fetch = fetching.next()
    assert (fetch.want, fetch.have, fetch.accepted) == (V[6], V[3], V[3])


def test_a_chain_that_is_gone_is_fetched_in_full():
    fetching = joined([V[3]])
    fetching.want(0, V[6])
    fetching.gone(fetching.next().fragment)
    fetch = fetching.next()
    assert (fetch.have, fetch.accepted) == (None, V[3]), "all hosts have that one"
    fetching.got(0, V[6])
    assert fetching.next() is None


def test_what_failed_or_was_cut_off_comes_again():
    fetching = joined([V[3]])
    fetching.want(0, V[6])
    first = fetching.next()
    fetching.failed(0)
    assert fetching.next() == first
    fetching.disconnected()
    assert fetching.next() == first


def part(outcome="done", chain=None):
    return HostFetch(outcome=outcome, chain=chain)


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ([part(chain=2), part(chain=2)], "done"),
        ([part(), part()], "done"),
        ([part(chain=1)], "done"),
        ([], "done"),
        # Some got publishes and others the anchor, or more of them.
        ([part(chain=2), part()], "gone"),
        ([part(chain=2), part(chain=1)], "gone"),
        ([part(chain=2), part("gone"), part("lost")], "gone"),
        ([part("lost"), part(chain=2), part()], "lost"),
    ],
)
def test_hosts_adopt_together_or_fetch_again(parts, outcome):
    assert agreed(parts) == outcome
    assert agreed(parts[::-1]) == outcome
