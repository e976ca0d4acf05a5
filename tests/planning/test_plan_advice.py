"""Advice is tried before it is told: following it never makes a plan worse."""

import dataclasses

import plan_support
import pytest
from plan_support import CONFIG, GB, HBM

from diloco_jax import cli
from diloco_jax.config import Config, ConfigError, RunConfig, SyncConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.core.fragments import EVEN
from diloco_jax.models.presets import preset
from diloco_jax.planning.advice import UNBALANCED, advise, unevenness
from diloco_jax.planning.checks import Remedy, changed
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import fragments_of, plan_run
from diloco_jax.planning.program import CollectiveSum

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
    return replanned(link)(config, fragments_of(config), compiled)


def replanned(link):
    world = dataclasses.replace(WORLD, link_gbit_per_s=link)
    return lambda config, cut, compiled: plan_run("x.py", config, cut, world, compiled)


def advised(config, compiler, link=1000.0):
    plan = planned(config, compiler, link)
    cut = fragments_of(config)
    return plan, advise(config, plan, cut, replanned(link), compiler)


def longest_over_shortest(plan):
    times = [island.step_seconds for island in plan.islands.values()]
    return max(times) / min(times)


# ---- islands that do not fit -----------------------------------------------------

UNFIT = [
    ({}, Compiler(activations_gb=9.0), {"remat": "full"}),
    # No more rounds than the missing bytes ask for.
    ({"remat": "full"}, Compiler(activations_gb=30.0), {"accumulation": 2}),
    (
        {"remat": "full", "mesh_data": 4, "mesh_fsdp": 4, "batch_size": 16},
        Compiler(state_gb=100.0),
        {"mesh_data": 1, "mesh_fsdp": 16},
    ),
    (
        {"remat": "full", "batch_size": 16},
        Compiler(state_gb=320.0, activations_gb=1.0),
        {"anchor_memory": "pinned_host"},
    ),
    # Remat helps too, but what comes after it is enough alone.
    (
        {"batch_size": 32, "mesh_data": 2, "mesh_fsdp": 8},
        Compiler(state_gb=200.0, activations_gb=1.5),
        {"mesh_data": 1, "mesh_fsdp": 16},
    ),
    # Remat does not help here.
    ({}, Compiler(activations_gb=9.0, remat=1.0), {"accumulation": 2}),
    ({}, Compiler(activations_gb=9.0, refuses=("full",)), {"accumulation": 2}),
]


@pytest.mark.parametrize(("big", "compiler", "fields"), UNFIT)
def test_an_island_that_does_not_fit_fits_with_the_change(big, compiler, fields):
    config = config_of(big)
    plan, (advice,) = advised(config, compiler)
    assert not plan.islands["big"].compiled.fits
    assert advice.change == {f"islands.big.{field}": v for field, v in fields.items()}
    assert "; then it fits and uses" in advice.text
    assert "larger topology" not in advice.text
    assert planned(changed(config, advice.change), compiler).fits


def test_what_fits_and_is_refused_otherwise_is_not_proposed():
    """Half of the batch would fit, but then the link could not carry the mean."""
    big = {"remat": "full", "batch_size": 64, "anchor_memory": "pinned_host"}
    config, compiler = config_of(big), Compiler(activations_gb=45.0)
    plan = planned(config, compiler)

    def only_by_batch(config, name):
        return compiler(changed(config, {f"islands.{name}.accumulation": 1}), name)

    _, (free,) = advised(config, only_by_batch)
    assert free.change == {"islands.big.batch_size": 32}
    link = 1.2 * max(i.network.down.mean for i in plan.islands.values())
    _, (tight,) = advised(config, only_by_batch, link)
    assert tight.change == {}


def test_what_is_not_enough_is_told_as_that_and_is_the_best():
    config, compiler = config_of(), Compiler(state_gb=600.0)
    plan, (advice,) = advised(config, compiler)
    assert "; then islands.big lacks" in advice.text
    assert "choose a larger topology than v6e:4x4" in advice.text
    after = planned(changed(config, advice.change), compiler)
    before = plan.islands["big"].compiled.hbm.missing
    assert 0 < after.islands["big"].compiled.hbm.missing < before
    big = {"remat": "full", "batch_size": 16, "anchor_memory": "pinned_host"}
    _, (none,) = advised(config_of(big), Compiler(state_gb=600.0))
    assert none.change == {}
    assert "no setting that was tried helps; choose a larger" in none.text


# ---- islands and links that could do better --------------------------------------

BETTER = [
    ({"batch_size": 128}, {}, {}, "balance", {"islands.big.batch_size": 64}),
    # Its batch cannot be lower.
    (
        {"batch_size": 16},
        {"batch_size": 8, "accumulation": 2},
        {},
        "balance",
        {"islands.big.batch_size": 64},
    ),
    (
        {"batch_size": 32, "accumulation": 2},
        {"batch_size": 8},
        {},
        "balance",
        {"islands.small.batch_size": 4},
    ),
    # Half of the large batch would leave most of the step's traffic.
    (
        {"batch_size": 128},
        {},
        {"weights_gb": 9000.0},
        "balance",
        {"islands.small.batch_size": 16},
    ),
    ({}, {}, {"weights_gb": 2e4}, "batch", {"islands.big.batch_size": 128}),
    ({}, {}, {"links_gb": 9e3}, "batch", {"islands.big.batch_size": 128}),
]


@pytest.mark.parametrize(("big", "small", "steps", "check", "change"), BETTER)
def test_a_batch_that_suits_better_is_told_and_loses_nothing(
    big, small, steps, check, change
):
    config, compiler = config_of(big, small), Compiler(activations_gb=0.1, **steps)
    plan, advice = advised(config, compiler)
    assert change in [a.change for a in advice if a.check == check]
    after = planned(changed(config, change), compiler)
    assert after.fits
    if check == "balance":
        assert longest_over_shortest(plan) > UNBALANCED
        assert longest_over_shortest(after) < longest_over_shortest(plan)
        assert after.run.tokens_per_day >= 0.99 * plan.run.tokens_per_day
    else:
        assert after.run.tokens_per_day > 1.02 * plan.run.tokens_per_day
        full = dataclasses.replace(compiler, activations_gb=5.0)
        told = advised(config, full)[1]
        assert not any(change == a.change for a in told if a.check == check)


def test_a_plan_of_equal_steps_has_no_advice_and_compiles_nothing_again():
    compiler = Compiler(activations_gb=0.1)
    plan, advice = advised(config_of(), compiler)
    assert longest_over_shortest(plan) < UNBALANCED
    assert advice == []
    assert len(compiler.asked) == 2


def late(config, compiler, link):
    return [a.change for a in advised(config, compiler, link)[1] if a.check == "late"]


def test_a_largest_fragment_that_is_late_comes_with_what_carries_it():
    """More overlap, unless its takes do not fit."""
    config = config_of(steps_per_cycle=20, fragments=20, overlap_steps=1)
    compiler = Compiler(activations_gb=0.1, state_gb=100.0)
    plan = planned(config, compiler)
    rates = plan.islands["big"].network.down
    link = max(rates.mean, 0.4 * rates.peak)
    (change,) = late(config, compiler, link)
    assert set(change) == {"sync.overlap_steps"}
    after = planned(changed(config, change), compiler, link).islands["big"].network
    assert max(after.down.peak, after.up.peak) < rates.peak
    used = plan.islands["big"].compiled.hbm.used
    full = dataclasses.replace(compiler, available_gb=used / GB)
    for change in late(config, full, link):
        assert "sync.overlap_steps" not in change


def test_cycles_shorter_than_the_network_are_lengthened_if_that_helps():
    config = config_of(steps_per_cycle=100)
    compiler = Compiler(activations_gb=0.1, flops=2e11)
    plan, advice = advised(config, compiler)
    (change,) = [a.change for a in advice if a.check == "cycle"]
    after = planned(changed(config, change), compiler)
    assert after.run.goodput.participation > plan.run.goodput.participation
    # Of a cycle of 20 steps no fragment is asked for before its last merge is done.
    assert "cycle" not in [a.check for a in advised(config_of(), compiler)[1]]


# ---- uneven fragments ------------------------------------------------------------

LARGE = Config(
    run=RunConfig(
        model=preset("12b"), sync=SyncConfig(steps_per_cycle=160, fragments=128)
    ),
    islands=CONFIG.islands,
)
PIECES = 20
"""Fragments of the small model that are uneven, whose bands are others than those of
fewer fragments."""


def uneven(config, accepts=lambda *_: True):
    """Advice on a plan by arithmetic, whose changes are accepted by that."""
    cut = fragments_of(config)
    plan = plan_run("x.py", config, cut, WORLD)
    more = [*plan.run.refusals, Remedy(check="another", text="", change={})]
    worse = dataclasses.replace(plan, run=dataclasses.replace(plan.run, refusals=more))

    def replan(then, cut, compiled):
        assert compiled is None
        if not accepts(then.run.sync):
            return worse
        assert cut == fragments_of(then)
        return plan

    return advise(config, plan, cut, replan, None)


def test_even_fragments_are_left_alone():
    assert uneven(changed(LARGE, {"sync.fragments": 114})) == []


def test_the_nearest_number_of_fragments_that_is_even_and_no_larger(tmp_path, capsys):
    """Two matrices that RDA keeps whole share a fragment of 128."""
    before = fragments_of(LARGE)
    (advice,) = uneven(LARGE)
    assert advice.change == {"sync.fragments": 114}
    assert "the largest of 128 fragments has 117" in advice.text
    assert "1.28 of the mean" in advice.text
    cuts = {
        n: fragments_of(changed(LARGE, {"sync.fragments": n})) for n in range(114, 142)
    }
    good = [
        count
        for count, cut in cuts.items()
        if unevenness(cut) <= EVEN and max(cut.sizes) <= max(before.sizes)
    ]
    assert good == [114]
    # The command tells it, too.
    write_config_json(LARGE, tmp_path / "large.json")
    cli.main(["plan", str(tmp_path / "large.json"), "--arithmetic"])
    assert "set sync.fragments = 114; then the largest of" in capsys.readouterr().err


WHOLE = "no setting that was tried helps; above 1.15 of the mean is uneven"
OTHERS = [
    # Four are uneven too: three are near, of five they are far away.
    (CONFIG, {"fragments": 4, "fragment_by": "layer"}, None, {"sync.fragments": 3}),
    (CONFIG, {"fragment_by": "layer"}, None, {"sync.fragment_by": "size"}),
    (CONFIG, {"fragments": 8, "fragment_by": "tensor"}, None, {"sync.fragments": 7}),
    # Three are even, and the largest would be larger.
    (
        CONFIG,
        {"fragments": 4, "fragment_by": "tensor"},
        None,
        {"sync.fragment_by": "size"},
    ),
    # A rule that cuts all tensors comes last.
    (LARGE, {}, lambda sync: sync.fragments == 128, {"sync.merge": "mean"}),
    # 101 are even, but their largest is 3 % larger.
    (LARGE, {}, lambda sync: sync.fragments <= 101, {}),
    (LARGE, {}, lambda sync: False, {}),
]


@pytest.mark.parametrize(("config", "sync", "accepts", "change"), OTHERS)
def test_the_smallest_change_that_evens_fragments(config, sync, accepts, change):
    config = changed(config, {f"sync.{field}": v for field, v in sync.items()})
    (advice,) = uneven(config, accepts or (lambda sync: True))
    assert advice.change == change
    if not change:
        assert WHOLE in advice.text
        assert "of 58,982,400 parameters, with sync.fragment_by = 's" in advice.text
    else:
        after = fragments_of(changed(config, change))
        assert unevenness(after) <= EVEN < unevenness(fragments_of(config))


def test_only_a_change_that_makes_other_pieces_is_compiled_before_it_is_told():
    compiler = Compiler(activations_gb=0.1)
    _, advice = advised(config_of(fragments=5, fragment_by="layer"), compiler)
    assert "fragments" in [a.check for a in advice]
    assert len(compiler.asked) == 2
    config = config_of(fragments=PIECES, steps_per_cycle=2 * PIECES)
    compiler = Compiler(activations_gb=0.1)
    (found,) = [a for a in advised(config, compiler)[1] if a.check == "fragments"]
    assert found.change
    assert {name for name, _ in compiler.asked[2:]} == set(config.islands)

    def full(now, name):
        plan = compiler(now, name)
        if now.run == config.run:
            return plan
        hbm = dataclasses.replace(plan.hbm, missing=1)
        return dataclasses.replace(plan, hbm=hbm, fits=False)

    (found,) = [a for a in advised(config, full)[1] if a.check == "fragments"]
    assert found.change == {}
