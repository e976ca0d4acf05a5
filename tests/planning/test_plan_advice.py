"""Advice is tried before it is told: following it never makes a plan worse."""

import dataclasses

import plan_support
import pytest
from plan_support import CONFIG, GB, HBM

from diloco_jax.config import ConfigError
from diloco_jax.planning.advice import UNBALANCED, advise
from diloco_jax.planning.changes import changed
from diloco_jax.planning.collectives import CollectiveSum
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.report import fragments_of, plan_run

WORLD = Assumptions(mtbi_years=0.0, step_spread=0.0, link_gbit_per_s=1000.0)


@dataclasses.dataclass(kw_only=True)
class Compiler:
    """Stands for the compiler: HBM and time of a step by a formula, per chip. The
    small island has HBM enough."""

    state_gb: float = 32.0
    """Parameters and optimizer of one copy of the model."""
    activations_gb: float = 4.0
    """HBM of one sequence, without remat."""
    remat: float = 0.3
    """Share of them that is left with it."""
    flops: float = 918e12
    """Operations of one sequence: a second on a chip of v6e."""
    weights_gb: float = 0.0
    """Traffic with HBM that does not depend on the batch."""
    links_gb: float = 0.0
    """Bytes over links that do not depend on the batch."""
    available_gb: float = 30.0
    refuses: tuple = ()
    """Values of `remat` that this compiler does not end with."""
    asked: list = dataclasses.field(default_factory=list)

    def __call__(self, config, name):
        island = config.islands[name]
        self.asked.append((name, island))
        if island.remat in self.refuses:
            raise ConfigError("unhappy")
        round_of = island.batch_size / island.devices / island.accumulation
        state = self.state_gb / island.mesh_fsdp
        kept = self.remat if island.remat == "full" else 1.0
        activations = self.activations_gb * round_of * kept
        on_host = island.anchor_memory == "pinned_host"
        used = state + activations + (0.0 if on_host else state / 2)
        available = self.available_gb if name == "big" else 10_000.0
        hbm = dataclasses.replace(
            HBM,
            parameters=int(state / 3 * GB),
            optimizer=int(state / 1.5 * GB),
            anchors=int(state / 4 * GB),
            residuals=int(state / 8 * GB),
            open_takes=int(state / 8 * GB),
            pinned_host=int(state / 2 * GB) if on_host else 0,
            used=int(used * GB),
            available=int(available * GB),
            missing=max(0, int((used - available) * GB)),
        )
        gather = CollectiveSum(
            kind="all-gather",
            count=1,
            sent_bytes=int(self.links_gb * GB),
            overlapping=1,
            overlapping_bytes=int(self.links_gb * GB),
            largest_group=16,
        )
        plan = plan_support.island(
            island.topology,
            flops=self.flops * island.batch_size,
            hbm_bytes=int(self.weights_gb * GB),
            collectives=(gather,) if self.links_gb else (),
            hbm=hbm,
        )
        return dataclasses.replace(plan, tokens_per_step=1000 * island.batch_size)


def config_of(big=None, small=None, **sync):
    """The config of two islands, v6e:4x4 and v5p:2x2x1, with changes."""
    change = {f"islands.big.{field}": v for field, v in (big or {}).items()}
    change |= {f"islands.small.{field}": v for field, v in (small or {}).items()}
    change |= {f"sync.{field}": v for field, v in sync.items()}
    return changed(CONFIG, {"islands.small.batch_size": 8} | change)


def planned(config, compiler, link=1000.0):
    compiled = {name: compiler(config, name) for name in config.islands}
    return replanned(link)(config, compiled)


def replanned(link):
    world = dataclasses.replace(WORLD, link_gbit_per_s=link)
    return lambda config, compiled: plan_run(
        "x.py", config, compiled, fragments_of(config), world, {}
    )


def advised(config, compiler, link=1000.0):
    plan = planned(config, compiler, link)
    cut = fragments_of(config)
    return plan, advise(config, plan, cut, replanned(link), compiler)


def longest_over_shortest(plan):
    times = [island.step_seconds for island in plan.islands.values()]
    return max(times) / min(times)


# ---- islands that do not fit -----------------------------------------------------

UNFIT = [
    ({}, Compiler(activations_gb=9.0), {"remat"}),
    ({"remat": "full"}, Compiler(activations_gb=30.0), {"accumulation"}),
    (
        {"remat": "full", "mesh_data": 4, "mesh_fsdp": 4, "batch_size": 16},
        Compiler(state_gb=100.0),
        {"mesh_data", "mesh_fsdp"},
    ),
    (
        {"remat": "full", "batch_size": 16},
        Compiler(state_gb=320.0, activations_gb=1.0),
        {"anchor_memory"},
    ),
    (
        {"batch_size": 64},
        Compiler(activations_gb=30.0, remat=0.5),
        {"remat", "accumulation"},
    ),
    # Remat helps too, but what comes after it is enough alone.
    (
        {"batch_size": 32, "mesh_data": 2, "mesh_fsdp": 8},
        Compiler(state_gb=200.0, activations_gb=1.5),
        {"mesh_data", "mesh_fsdp"},
    ),
    # Remat does not help here, so it is not kept.
    ({}, Compiler(activations_gb=9.0, remat=1.0), {"accumulation"}),
    ({}, Compiler(activations_gb=9.0, refuses=("full",)), {"accumulation"}),
]


@pytest.mark.parametrize(("big", "compiler", "fields"), UNFIT)
def test_an_island_that_does_not_fit_fits_with_the_change(big, compiler, fields):
    config = config_of(big)
    plan, (advice,) = advised(config, compiler)
    assert not plan.islands["big"].compiled.fits
    (change,) = advice.changes
    assert set(change) == {f"islands.big.{field}" for field in fields}
    assert "compiled so, it fits and uses" in advice.text
    assert planned(changed(config, change), compiler).fits


def test_what_fits_and_is_refused_otherwise_is_not_proposed():
    """Half of the batch would fit, but then the link could not carry the mean."""
    big = {"remat": "full", "batch_size": 64, "anchor_memory": "pinned_host"}
    config, compiler = config_of(big), Compiler(activations_gb=45.0)
    plan = planned(config, compiler)
    _, (free,) = advised(config, compiler)
    assert free.changes == ({"islands.big.accumulation": 2},)

    def only_by_batch(config, name):
        island = config.islands[name]
        rounds = dataclasses.replace(island, accumulation=1)
        without = changed(config, {f"islands.{name}.accumulation": 1})
        assert rounds == without.islands[name]
        return compiler(without, name)

    _, (free,) = advised(config, only_by_batch)
    assert free.changes == ({"islands.big.batch_size": 32},)
    link = 1.2 * max(i.network.down.mean for i in plan.islands.values())
    _, (tight,) = advised(config, only_by_batch, link)
    assert tight.changes == ()


def test_no_more_rounds_than_the_missing_bytes_ask_for():
    config, compiler = config_of({"remat": "full"}), Compiler(activations_gb=30.0)
    _, (advice,) = advised(config, compiler)
    assert advice.changes == ({"islands.big.accumulation": 2},)


def test_what_is_not_enough_is_told_as_that_and_is_an_improvement():
    config, compiler = config_of(), Compiler(state_gb=600.0)
    plan, (advice,) = advised(config, compiler)
    assert "it still lacks" in advice.text
    assert "choose a larger topology than v6e:4x4" in advice.text
    (change,) = advice.changes
    after = planned(changed(config, change), compiler)
    before = plan.islands["big"].compiled.hbm.missing
    assert 0 < after.islands["big"].compiled.hbm.missing < before


def test_where_nothing_helps_nothing_is_proposed():
    big = {"remat": "full", "batch_size": 16, "anchor_memory": "pinned_host"}
    _, (advice,) = advised(config_of(big), Compiler(state_gb=600.0))
    assert advice.changes == ()
    assert "no setting that was tried helps" in advice.text


# ---- islands that could do better ------------------------------------------------


@pytest.mark.parametrize(
    ("big", "small", "field"),
    [
        ({"batch_size": 128}, {}, "islands.big.batch_size"),
        # Its batch cannot be lower.
        ({"batch_size": 16}, {"batch_size": 8, "accumulation": 2}, "islands.big"),
        ({"batch_size": 32, "accumulation": 2}, {"batch_size": 8}, "islands.small"),
    ],
)
def test_unequal_steps_come_with_the_batch_that_balances_them(big, small, field):
    config, compiler = config_of(big, small), Compiler(activations_gb=0.1)
    plan, advice = advised(config, compiler)
    assert longest_over_shortest(plan) > UNBALANCED
    (found,) = advice
    ((path, _),) = found.changes[0].items()
    assert path.startswith(field)
    after = planned(changed(config, found.changes[0]), compiler)
    assert longest_over_shortest(after) < longest_over_shortest(plan)
    assert after.run.tokens_per_day >= 0.99 * plan.run.tokens_per_day
    assert after.fits


def test_a_balance_that_costs_tokens_is_not_told():
    """Half of the large batch would leave most of the step's traffic, so the other
    island's batch is raised."""
    config = config_of({"batch_size": 128}, {"batch_size": 8})
    compiler = Compiler(activations_gb=0.1, weights_gb=9000.0)
    plan, advice = advised(config, compiler)
    lower = planned(changed(config, {"islands.big.batch_size": 64}), compiler)
    assert longest_over_shortest(lower) < longest_over_shortest(plan)
    assert lower.run.tokens_per_day < 0.95 * plan.run.tokens_per_day
    (told,) = [found for found in advice if "a step of" in found.text]
    assert told.changes == ({"islands.small.batch_size": 16},)


@pytest.mark.parametrize(
    ("bound", "said"), [({"weights_gb": 20_000.0}, "HBM"), ({"links_gb": 9e3}, "links")]
)
def test_a_step_bound_by_memory_or_links_wants_a_larger_batch(bound, said):
    config, compiler = config_of(), Compiler(activations_gb=0.1, **bound)
    plan, advice = advised(config, compiler)
    found = next(a for a in advice if "islands.big is bound by" in a.text)
    assert said in found.text
    after = planned(changed(config, found.changes[0]), compiler)
    assert after.run.tokens_per_day > 1.02 * plan.run.tokens_per_day
    assert after.fits
    full = dataclasses.replace(compiler, activations_gb=5.0)
    assert not any("islands.big is bound" in a.text for a in advised(config, full)[1])


def test_a_plan_of_equal_steps_has_no_advice_and_compiles_nothing_again():
    compiler = Compiler(activations_gb=0.1)
    plan, advice = advised(config_of(small={"batch_size": 8}), compiler)
    assert longest_over_shortest(plan) < UNBALANCED
    assert advice == []
    assert len(compiler.asked) == 2


# ---- links -----------------------------------------------------------------------


def test_a_largest_fragment_that_is_late_comes_with_what_carries_it():
    config, compiler = config_of(), Compiler(activations_gb=0.1)
    rates = planned(config, compiler).islands["big"].network.down
    link = 0.7 * rates.peak
    plan, (advice,) = advised(config, compiler, link)
    refused = {refusal.check for refusal in plan.run.refusals}
    assert "is adopted late" in advice.text
    assert {"sync.overlap_steps": 3} in advice.changes
    for change in advice.changes:
        after = planned(changed(config, change), compiler, link)
        network = after.islands["big"].network
        assert max(network.down.peak, network.up.peak) < rates.peak
        assert {refusal.check for refusal in after.run.refusals} <= refused


def late(advice):
    (found,) = [told for told in advice if "is adopted late" in told.text]
    return found


def test_more_overlap_is_not_told_where_its_takes_do_not_fit():
    config = config_of(steps_per_cycle=20, fragments=20, overlap_steps=1)
    compiler = Compiler(activations_gb=0.1, state_gb=100.0)
    rates = planned(config, compiler).islands["big"].network.down
    link = max(rates.mean, 0.4 * rates.peak)
    free = late(advised(config, compiler, link)[1])
    overlap = [c for c in free.changes if "sync.overlap_steps" in c]
    assert overlap
    used = planned(config, compiler).islands["big"].compiled.hbm.used
    full = dataclasses.replace(compiler, available_gb=used / GB)
    told = late(advised(config, full, link)[1])
    assert [c for c in free.changes if c not in overlap] == list(told.changes)


def test_cycles_shorter_than_the_network_are_lengthened_if_that_helps():
    config = config_of(steps_per_cycle=100)
    compiler = Compiler(activations_gb=0.1, flops=2e11)
    plan, advice = advised(config, compiler)
    (change,) = next(a for a in advice if "round trips" in a.text).changes
    after = planned(changed(config, change), compiler)
    assert after.run.goodput.participation > plan.run.goodput.participation
    # Of a cycle of 20 steps no fragment is asked for before its last merge is done.
    _, none = advised(config_of(), compiler)
    assert not any("round trips" in a.text for a in none)
