"""Whatever becomes of takes, and whenever the island hears of it: each delta holds the
steps that the books say, and no others, as values."""

import random
from collections import Counter

import jax
import numpy as np
import pytest

from diloco_jax.config import IslandConfig, SyncConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.island.device.exchange import Exchange, LentParams
from diloco_jax.island.device.mesh import make_mesh, replicated
from diloco_jax.island.mailbox import Arrival, Arrivals
from diloco_jax.protocol.island.boundary import (
    Adoption,
    Books,
    Boundary,
    Decision,
    Goal,
)
from diloco_jax.protocol.messages import TakeRequest, TakeVerdict, Version

SHAPES, AXES = {"w": (4,)}, {"w": ("embed",)}
PLAN = plan_fragments(SHAPES, AXES, 1)
F32, WHOLE = get_codec("f32"), replicated(make_mesh(IslandConfig()))
STALENESS = 1
SEEDS = 30


class Island(LentParams):
    """`boundary.Arrays` and `Outgoing`; every step adds 1, so a value tells how many
    steps are in it."""

    def __init__(self, rule):
        sync = SyncConfig(fragments=1, adopt=rule, codec_up="f32", error_feedback=False)
        params = {"w": jax.device_put(np.zeros(4, np.float32), WHOLE, may_alias=False)}
        super().__init__(Exchange(PLAN, sync, params), params)
        self._exchange.start({0: self.whole(0)})
        self.books = Books([Version(1, 0)], ADOPT_RULES.find(rule))
        self.arrivals = Arrivals()
        self.boundary = Boundary(
            self.books,
            Goal(total_tokens=10**6, tokens_per_step=1, steps_per_cycle=4),
            arrays=self,
            incoming=self.arrivals,
            outgoing=self,
            data=None,
        )
        self.steps, self.sent = 0, {}
        self.seen = Counter()

    def whole(self, value):
        return self._exchange.put_anchor(0, np.full(4, value, np.float32).tobytes())

    def step(self):
        self.params = jax.tree.map(lambda x: x + 1, self.params)
        self.steps += 1

    def act(self, takes, arrivals, **decided):
        for arrival in arrivals:
            self.arrivals.put(arrival)
        decision = Decision(
            takes=tuple(
                TakeRequest(fragment=fragment, tick=tick)
                for fragment, tick in takes.items()
            ),
            adoptions=tuple(Adoption(a.fragment, a.version) for a in arrivals),
            **decided,
        )
        self.boundary.act(decision, self.steps)

    def put(self, fragment, tick, delta):
        (take,) = self.books.outstanding()
        found = np.asarray(F32.decode(delta[0], (4,)))
        np.testing.assert_array_equal(found, np.float32(take.start - take.end))
        self.sent[tick] = take

    def forget(self, fragment, tick):
        """What was settled is not sent again."""

    def adopt(self, arrival, *, keep):
        super().adopt(arrival, keep=keep)
        self.seen["kept" if keep else "adopted"] += 1

    def judge(self, fragment, outcome):
        super().judge(fragment, outcome)
        self.seen[outcome] += 1


class Coordinator:
    """Asks, merges and publishes; the values of its versions have nothing to do with
    what it merges. Verdicts come in order, each before its version."""

    def __init__(self, rng):
        self.rng, self.number, self.tick = rng, 0, 0
        self.open = False
        self.mail = []

    def ask(self):
        if not self.open:
            self.tick, self.open = self.tick + 1, True
            self.mail.append(("take", self.tick))

    def merge(self, island):
        """Another island's deltas, and perhaps this one's."""
        take = island.sent.get(self.tick)
        self.number += 1
        if self.open:
            verdict, reason = "pending", ""
            if take is not None:
                if self.rng.random() < 0.4:
                    verdict = "merged"
                elif self.number - take.base.number > STALENESS:
                    verdict, reason = "refused", "stale"
            self.open = verdict == "pending"
            told = TakeVerdict(
                fragment=0,
                tick=self.tick,
                verdict=verdict,
                reason=reason,
                version=Version(1, self.number),
            )
            self.mail.append(("verdict", told))
        self.mail.append(("version", self.number))


def deliver(island, mail, count):
    """The first so many messages, at one boundary."""
    takes, verdicts, newest = {}, [], None
    for kind, what in mail[:count]:
        if kind == "take":
            takes = {0: what}
        elif kind == "verdict":
            verdicts.append(what)
        else:
            newest = what
    del mail[:count]
    arrivals = ()
    if newest is not None:
        whole = island.whole(1000 * newest)
        arrivals = (Arrival(fragment=0, version=Version(1, newest), anchor=whole),)
    island.act(takes, arrivals, verdicts=tuple(verdicts))


def live(rule, seed):
    rng = random.Random(seed)
    island, coordinator = Island(rule), Coordinator(rng)
    for _ in range(60):
        action = rng.choice(["step", "step", "ask", "merge", "deliver", "deliver"])
        if action == "step":
            island.step()
        elif action == "ask":
            coordinator.ask()
        elif action == "merge":
            coordinator.merge(island)
        else:
            waiting = len(coordinator.mail)
            deliver(island, coordinator.mail, rng.randint(min(1, waiting), waiting))
    deliver(island, coordinator.mail, len(coordinator.mail))
    return island, coordinator


@pytest.mark.parametrize("rule", ["keep", "rebase"])
def test_deltas_hold_what_the_books_say(rule):
    seen = Counter()
    for seed in range(SEEDS):
        island, coordinator = live(rule, seed)
        # And it is not stuck: what is open is merged, then all that it has since done.
        for _ in range(2):
            coordinator.ask()
            deliver(island, coordinator.mail, len(coordinator.mail))
            island.step()
            coordinator.rng = Always()
            coordinator.merge(island)
            deliver(island, coordinator.mail, len(coordinator.mail))
        assert not island.books.outstanding()
        value = np.asarray(island.params["w"])
        last = island.sent[coordinator.tick]
        here = 1000 * coordinator.number + island.steps - last.end
        np.testing.assert_array_equal(value, np.float32(here))
        seen += island.seen
    assert seen["kept"] > SEEDS if rule == "keep" else seen["kept"] == 0
    assert min(seen["reopened"], seen["dropped"], seen["settled"]) > 0, seen


class Always:
    """Merges whatever there is."""

    def random(self):
        return 0.0
