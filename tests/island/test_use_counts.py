"""An island counts how often its steps used a row, as its books count its steps."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax.config import (
    ConfigError,
    DataConfig,
    InnerConfig,
    IslandConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.core.codecs import decode_uses, get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragment_merge import FragmentMerge
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.core.outer import OuterSettings
from diloco_jax.island.device.build import build_exchange, build_trainer, join
from diloco_jax.island.device.mesh import batch_sharding, make_mesh, place
from diloco_jax.island.device.step import UseCounts, use_shapes
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.model import Use
from diloco_jax.models.transformer import input_counts
from diloco_jax.protocol.messages import Version

ROWS = 6
AXES = {
    "table": ("vocab", "embed"),
    "tower": ("layers", "embed"),
    "up": ("layers", "expert", "embed"),
}
SHAPES = {"table": (ROWS, 8), "tower": (2, 8), "up": (2, 4, 8)}
USES = {
    "table": Use(lambda batch: counted(batch["ids"])),
    "tower": Use(lambda batch: np.array([batch["ids"].size], np.uint32), as_one=True),
    "up": Use("chosen", per_token=2),
}


def counted(ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids.ravel(), minlength=ROWS).astype(np.uint32)


PLAN = plan_fragments(
    SHAPES, AXES, 1, by_use={"table": 1, "tower": 1, "up": 2}, as_one=["tower"]
)


@pytest.fixture
def counts() -> UseCounts:
    shapes = {"table": (ROWS,), "tower": (1,), "up": (2, 4)}
    return UseCounts(PLAN, USES, shapes, make_mesh(IslandConfig()))


def step(counts: UseCounts, *ids: int) -> None:
    batch = {"ids": np.array([ids], np.int64)}
    placed = {"ids": place(batch["ids"], batch_sharding(counts._mesh))}
    chosen = jnp.arange(8, dtype=jnp.uint32).reshape(2, 4)
    counts.step(batch, placed, {"chosen": chosen})


def taken(counts: UseCounts) -> list[list[float]]:
    """Return what a take says, by piece: table, the layers of tower, and of up."""
    return [decode_uses(np.asarray(own)).tolist() for own in counts.take(0)]


def test_a_take_says_what_was_used_since_the_last_one(counts) -> None:
    step(counts, 0, 0, 5)
    step(counts, 5, 2)
    up = [0, 2, 4, 6], [8, 10, 12, 14]
    assert taken(counts) == [[2, 0, 1, 0, 0, 2], [5], [5], *up]
    step(counts, 1)
    assert taken(counts) == [[0, 1, 0, 0, 0, 0], [1], [1], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert taken(counts) == [[0] * 6, [0], [0], [0] * 4, [0] * 4]


def test_a_take_that_is_undone_is_in_the_next_one(counts) -> None:
    step(counts, 0)
    taken(counts)
    step(counts, 1)
    counts.reopen(0)
    assert taken(counts)[0] == [1, 1, 0, 0, 0, 0]
    step(counts, 2)
    counts.restart(0)
    step(counts, 3)
    assert taken(counts)[0] == [0, 0, 0, 1, 0, 0]


def test_counts_that_overflow_show_the_right_difference(counts) -> None:
    counts._total = {
        name: np.full(np.shape(x), 2**32 - 1, np.uint32)
        for name, x in counts._total.items()
    }
    counts.restart(0)
    step(counts, 0, 0)
    assert taken(counts)[0] == [2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("told", [np.zeros(5, np.uint32), np.uint32(3)])
def test_counts_of_another_shape_are_refused(counts, monkeypatch, told) -> None:
    name = Use(lambda batch: told)
    monkeypatch.setattr(counts, "_total", {name: np.zeros(ROWS, np.uint32)})
    with pytest.raises(ConfigError, match=r"counts of shape \(.*tensor has \(6,\)"):
        step(counts, 0)


def test_padding_is_no_input() -> None:
    tokens = np.array([[3, 1, 1, 2, 0, 0]])
    segments = np.array([[1, 1, 2, 2, 0, 0]])
    assert input_counts(4, {"tokens": tokens}).tolist() == [1, 2, 1, 1]
    packed = {"tokens": tokens, "segments": segments}
    assert input_counts(4, packed).tolist() == [0, 2, 1, 1]


def test_shapes_of_counts_are_rows_by_layer() -> None:
    shapes = {name: np.empty(shape) for name, shape in SHAPES.items()}
    found = use_shapes(USES, AXES, shapes)
    assert found == {"table": (6,), "tower": (1,), "up": (2, 4)}


def island_of(run: RunConfig, count: int = 1):
    """The trainer, the plan, and `count` islands at the run's first parameters."""
    model, trainer = build_trainer(run, IslandConfig(batch_size=2))
    plan, first, codec = build_plan(run, model), trainer.first(0), get_codec("f32")
    values = [np.asarray(get_piece(first, piece)) for piece in plan.pieces]
    pairs = zip(values, plan.pieces, strict=True)
    begins = [codec.encode(value, piece.groups) for value, piece in pairs]
    exchanges = [build_exchange(run, model, trainer)[0] for _ in range(count)]
    replicas = [
        join(plan, trainer, x, {0: x.put_anchor(0, x.layouts_whole[0].pack(begins))})
        for x in exchanges
    ]
    return plan, values, exchanges, replicas


def mixture_of(run: RunConfig, **experts: int) -> RunConfig:
    mixture = dataclasses.replace(run.model, experts=4, expert_dim=32, **experts)
    return dataclasses.replace(run, model=mixture)


def untied(**inner) -> RunConfig:
    return RunConfig(
        model=dataclasses.replace(MODEL, tied_embeddings=False),
        inner=InnerConfig(learning_rate=0.1, **inner),
        sync=SyncConfig(
            fragments=1, codec_up="f32", codec_down="f32", weights_by_use="rows"
        ),
        sequence_length=SEQUENCE_LENGTH,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_row_without_tokens_is_only_moved_by_decay_and_moments(optimizer) -> None:
    run = untied(optimizer=optimizer, weight_decay=0.0 if optimizer == "sgd" else 0.1)
    plan, _, _, (replica,) = island_of(run)
    tokens = np.random.default_rng(0).integers(0, 9, (2, SEQUENCE_LENGTH + 1))
    batch = {"tokens": tokens.astype(np.int32)}
    replica.step(batch, 0.1)
    replica.step(batch, 0.1)
    encoded = replica.take(0)
    assert len(encoded) == len(plan.pieces) + 1
    number = next(n for n, piece in enumerate(plan.pieces) if piece.by_use)
    delta = np.asarray(
        get_codec("f32").decode(encoded[number], plan.pieces[number].shape)
    )
    counts = decode_uses(np.asarray(encoded[-1]))
    np.testing.assert_array_equal(counts, 2 * input_counts(len(delta), batch))
    unused = counts == 0
    assert counts.sum() == 2 * 2 * SEQUENCE_LENGTH
    assert delta[~unused].any(axis=1).all()
    assert delta[unused].any() == (optimizer == "adamw")


def test_each_layer_of_experts_says_how_many_tokens_each_got() -> None:
    run = mixture_of(untied(optimizer="sgd", weight_decay=0.0), experts_per_token=2)
    plan, _, (exchange,), (replica,) = island_of(run)
    counted = [piece for piece in plan.pieces if piece.by_use]
    experts = {piece.layer for piece in counted if piece.groups == 4}
    assert experts == set(range(run.model.num_layers))
    assert {p.by_use for p in counted if p.groups == 4} == {2}
    tokens = np.random.default_rng(0).integers(0, 9, (2, SEQUENCE_LENGTH + 1))
    replica.step({"tokens": tokens.astype(np.int32)}, 0.1)
    taken = exchange.uses.take(0)
    for piece, octets in zip(counted, taken, strict=True):
        uses = decode_uses(np.asarray(octets))
        assert uses.sum() == 2 * SEQUENCE_LENGTH * piece.by_use
        assert len(uses) == piece.shape[0]


def test_a_tied_table_has_no_counts() -> None:
    tied = dataclasses.replace(MODEL, tied_embeddings=True)
    run = dataclasses.replace(untied(), model=tied)
    assert not any(piece.by_use for piece in build_plan(run, build(run)).pieces)


def test_a_rule_that_sees_whole_deltas_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from diloco_jax.core.families import Whole\n"
        "class Own(Whole):\n"
        "    embeddings_by_mean = False\n"
        "    def merge(self, deltas, weights, share, state):\n"
        "        return share * (weights @ deltas.reshape(len(deltas), -1)).reshape("
        "deltas.shape[1:]), state\n"
        "OWN = Own()\n"
    )
    run = untied()
    sync = dataclasses.replace(run.sync, merge=f"{path}:OWN")
    run = dataclasses.replace(run, sync=sync)
    with pytest.raises(ConfigError, match=r"sync.merge = .*Own sees whole deltas"):
        build_plan(run, build(run))


def test_a_name_without_rows_is_refused() -> None:
    run = untied()
    model = build(run)._replace(uses={"tabel": USES["table"]})
    with pytest.raises(ConfigError, match="the use of tabel, and no tensor with"):
        build_plan(run, model)


@pytest.mark.parametrize("most", [0.0, -1.0, math.inf, math.nan])
def test_a_token_uses_some_rows_and_not_all_there_are(most: float) -> None:
    run = untied()
    model = build(run)._replace(uses={"embedding": Use("chosen", per_token=most)})
    with pytest.raises(ConfigError, match=rf"uses {most} rows of embedding at most"):
        build_plan(run, model)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_expert_without_a_token_weighs_nothing_whatever_moved_it(optimizer) -> None:
    """Two islands merge and adopt what moved all experts, which gives them moments, and
    then what one token and two did."""
    run = untied(optimizer=optimizer, weight_decay=0.0 if optimizer == "sgd" else 0.1)
    data = DataConfig(arrays=("segments", "tokens"))
    run = dataclasses.replace(mixture_of(run, experts_per_token=1), data=data)
    plan, values, exchanges, replicas = island_of(run, 2)
    codec, random = get_codec("f32"), np.random.default_rng(0)
    merge = FragmentMerge(
        pieces=plan.pieces,
        up=codec,
        down=codec,
        rule=MERGE_RULES.find("rda"),
        settings=OuterSettings(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
    )

    def merged(state, taken):
        payloads = [merge.layout_up.pack(own) for own in taken]
        return merge.merge(
            state,
            payloads,
            [merge.squares(payload) for payload in payloads],
            [2.0, 1.0],
            share=1.0,
            final=False,
            last=(),
            tokens=[SEQUENCE_LENGTH] * 2,
        )

    def taken(*real: int) -> list[list[np.ndarray]]:
        found = []
        for replica, tokens in zip(replicas, real, strict=True):
            segments = np.zeros((2, SEQUENCE_LENGTH + 1), np.int32)
            segments[0, : tokens + 1] = 1
            drawn = random.integers(0, 250, segments.shape).astype(np.int32)
            replica.step({"tokens": drawn, "segments": segments}, 0.1)
            found.append([np.asarray(part) for part in replica.take(0)])
            replica.judge(0, "settled")
        return found

    once = merged(merge.begin(values), taken(SEQUENCE_LENGTH, SEQUENCE_LENGTH))
    for exchange, replica in zip(exchanges, replicas, strict=True):
        publish = exchange.put_publish(0, once.payload)
        arrival = Arrival(fragment=0, version=Version(1, 1), publishes=(publish,))
        replica.adopt(arrival, keep=False)
    last = taken(1, 2)
    again = merged(once.state, last)
    moved, spoilt = False, [list(own) for own in last]
    counted = [n for n, piece in enumerate(plan.pieces) if piece.by_use]
    for at, number in enumerate(counted, start=len(plan.pieces)):
        piece = plan.pieces[number]
        uses = np.stack([decode_uses(own[at]) for own in last])
        for own, spoiled, used in zip(last, spoilt, uses, strict=True):
            delta = np.array(codec.decode(own[number], piece.shape, piece.groups))
            moved |= bool(delta[used == 0].any())
            delta[used == 0] = 1e3
            spoiled[number] = np.asarray(codec.encode(delta, piece.groups))
        before, after = (
            piece.grid.from_tiles(state.theta[number])
            for state in (once.state, again.state)
        )
        nobody = ~uses.any(axis=0)
        assert nobody.any()
        np.testing.assert_array_equal(before[nobody], after[nobody])
        assert (before != after)[~nobody].any(axis=tuple(range(1, before.ndim))).all()
    assert moved == (optimizer == "adamw")
    assert merged(once.state, spoilt).digest == again.digest
