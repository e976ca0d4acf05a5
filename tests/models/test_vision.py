"""Pictures in the bundled model: as `transformers` computes them, and what of it is
trained. `published/idefics3` and its logits are of `tests/weights/make_published.py`.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    VisionConfig,
)
from diloco_jax.coordinator.holding.store import merges_of
from diloco_jax.core.codecs import encode_uses, get_codec
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.island.device.build import build_exchange, join
from diloco_jax.island.joined import JoinedHost
from diloco_jax.models import transformer, vision
from diloco_jax.models.build import build_plan
from diloco_jax.models.flops import analytic_flops, pictures_note, product_flops
from diloco_jax.models.generation import (
    Cache,
    generate,
    make_begun,
    make_decode,
    make_likelihood,
)
from diloco_jax.models.model import abstract_batch
from diloco_jax.models.presets import preset
from diloco_jax.simulation.bodies import trainer_of
from diloco_jax.weights import families
from diloco_jax.weights.first import read_folder, whole
from diloco_jax.weights.tensor_files import read_json

FOLDER = Path(__file__).parents[1] / "weights" / "published" / "idefics3"


@pytest.fixture(scope="module")
def published() -> tuple[ModelConfig, dict, dict]:
    """The tiny model, its parameters, and what `transformers` says about it."""
    model = families.read(read_json(FOLDER / "config.json"), "here")
    params = whole(read_folder(FOLDER, model))
    return model, params, dict(np.load(FOLDER / "pictures.npz"))


def logits_of(model, params, there, *cuts: int) -> np.ndarray:
    """Logits, [rows, T, V], by as many calls of the decoder as there are parts."""
    tokens = jnp.asarray(there["tokens"])
    first = make_begun(model, "float32")(
        params, tokens, there["pictures"], there["counts"]
    )
    decode, found, begin = make_decode(model), [], 0
    cache = Cache.empty(model, *tokens.shape, "float32")
    for end in (*cuts, tokens.shape[1]):
        part = slice(begin, end)
        logits, cache = decode(params, tokens[:, part], cache, begin, first[:, part])
        found.append(np.asarray(logits))
        begin = end
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_are_those_of_transformers(published, row):
    """Row 0 has no picture, row 1 one, row 2 two."""
    model, params, there = published
    assert there["counts"][row] == row
    expected = there["logits"][row]
    found = logits_of(model, params, there)[row]
    largest = np.abs(expected).max()
    assert largest > 1
    np.testing.assert_allclose(found, expected, atol=1e-5 * largest)
    if row:
        blind = there | {"pictures": there["pictures"] * 0}
        other = logits_of(model, params, blind)[row]
        assert np.abs(other - expected).max() > 1e-2 * largest


def test_what_is_trained_is_what_is_decoded(published):
    """The loss is that of the logits, without the places of pictures; a decoder in
    parts, a cut inside a picture, is the same decoder."""
    model, params, there = published
    batch = {
        "tokens": there["tokens"],
        "pictures": there["pictures"],
        "picture_count": there["counts"],
    }
    expected = []
    logits = logits_of(model, params, there)
    for remat in ("none", "full"):
        built = transformer.build(model, remat=remat, pictures=2)
        loss, metrics = jax.jit(built.loss)(params, batch)
        shares = jax.nn.log_softmax(logits[:, :-1])
        targets = there["tokens"][:, 1:]
        counted = targets != model.vision.token
        expected = -np.take_along_axis(np.asarray(shares), targets[..., None], -1)
        np.testing.assert_allclose(loss, expected[counted].mean(), rtol=1e-5)
        assert metrics["tokens"] == counted.sum() == 3 * 31 - 27
    in_parts = logits_of(model, params, there, 7, 8)
    np.testing.assert_allclose(in_parts, logits, atol=1e-4)
    weights = np.zeros(there["tokens"].shape, np.float32)
    weights[:, -3:] = 1
    of_end = make_likelihood(model)(
        params, there["tokens"], weights, there["pictures"], there["counts"]
    )
    np.testing.assert_allclose(of_end.log, -expected[:, -3:, 0].sum(-1), rtol=1e-4)


@pytest.mark.parametrize("room", [0, 64])
def test_an_answer_is_the_likeliest_after_the_pictures(published, room):
    model, params, there = published
    prompt = there["tokens"][2].tolist()
    pictures, answers = there["pictures"][2], []
    for given in (pictures, pictures[::-1], None):
        made = generate(model, params, prompt, 4, room=room, pictures=given)
        answers.append(list(made))
    assert answers[0][0] == int(there["logits"][2, -1].argmax())
    assert len({*map(tuple, answers)}) == 3


TINY = preset("tiny_vision")


def batch_of(model: ModelConfig, counts: list[int]) -> dict:
    """Random rows with places for two pictures each, of which some have fewer."""
    chance = np.random.default_rng(3)
    each, side = model.vision.tokens_per_picture, model.vision.side
    tokens = chance.integers(0, 200, (len(counts), 2 * each + 6)).astype(np.int32)
    pictures = chance.integers(0, 256, (len(counts), 2, side, side, 3))
    for row, count in enumerate(counts):
        tokens[row, 2 : 2 + count * each] = model.vision.token
    return {
        "tokens": tokens,
        "pictures": pictures.astype(np.uint8),
        "picture_count": np.array(counts, np.int32),
    }


def test_rows_without_pictures_leave_the_tower_alone():
    """Its gradient is exactly 0; the bytes of pictures that a row does not have are
    never seen."""
    model = transformer.build(TINY, pictures=2)
    params = model.init(jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda p, b: model.loss(p, b)[0]))
    for counts, some in (([0, 0], False), ([0, 1], True)):
        found = gradient(params, batch_of(TINY, counts))
        moved = {
            part: max(float(jnp.abs(g).max()) for g in jax.tree.leaves(found[part]))
            for part in ("tower", "connector", "layers")
        }
        assert moved["layers"] > 0
        assert (moved["tower"] > 0) == (moved["connector"] > 0) == some
    batch = batch_of(TINY, [0, 1])
    loss, _ = model.loss(params, batch)
    batch["pictures"][0] = batch["pictures"][1, 1] = 7
    assert model.loss(params, batch)[0] == loss
    batch["pictures"][1, 0] = 7
    assert model.loss(params, batch)[0] != loss


SEEN = DataConfig(
    arrays=("tokens", "pictures", "picture_count"),
    pictures=2,
    picture_tokens=TINY.vision.tokens_per_picture,
    picture_token=TINY.vision.token,
)


def test_who_had_no_pictures_weighs_nothing_in_the_tower():
    """Decay moves it on the island of text; the merge has that of the other, and of two
    of text none."""
    run = RunConfig(
        model=TINY,
        data=SEEN,
        sync=SyncConfig(fragments=1, codec_up="f32", codec_down="f32"),
        outer=OuterConfig(optimizer="sgd", learning_rate=1.0),
        sequence_length=13,
    )
    model, trainer = trainer_of(run, IslandConfig(batch_size=4, accumulation=2))
    (plan, (exchange, _)) = build_plan(run, model), build_exchange(run, model, trainer)
    (merge,) = merges_of(run, plan)
    first = [np.asarray(get_piece(trainer.first(0), p)) for p in plan.pieces]
    begun, encode = merge.begin(first), get_codec("f32").encode
    whole = exchange.layouts_whole[0].pack(list(map(encode, first)))

    def delta(count: int) -> bytearray:
        replica = join(plan, trainer, exchange, {0: exchange.put_anchor(0, whole)})
        replica.step(batch_of(TINY, [count] * 4), 0.1)
        return exchange.layouts_up[0].pack(replica.take(0))

    text, shown = delta(0), delta(1)
    pairs = list(zip(plan.pieces, merge.squares(text), strict=True))
    assert any(moved for piece, moved in pairs if piece.path[0] == "tower")
    # Its tokens could have twice as many pictures: two a row.
    assert [merge.uses(own).most for own in (text, shown)] == [0, 4 * 13 / 2]

    def merged(*deltas: bytearray):
        squares, ones = list(map(merge.squares, deltas)), [1] * len(deltas)
        how = {"share": 1.0, "final": False, "last": (), "tokens": ones}
        return merge.merge(begun, deltas, squares, ones, **how).state.theta

    both, alone, none = merged(text, shown), merged(shown), merged(text, text)
    for piece, *of in zip(plan.pieces, both, alone, none, begun.theta, strict=True):
        seen = piece.path[0] in vision.PARTS
        assert np.array_equal(of[0], of[1]) == np.array_equal(of[2], of[3]) == seen


def test_what_a_float_rounds_is_no_use_more():
    """Two pictures in each row of 49 tokens, and some 26e9 of these."""
    (use,) = {*vision.uses(TINY, most=2, length=49).values()}
    plan = plan_fragments(
        {"w": (4, 4)},
        {"w": ("embed", "mlp")},
        1,
        by_use={"w": use.per_token},
        as_one=["w"],
    )
    outer = OuterConfig(optimizer="sgd", learning_rate=1.0)
    (merge,) = merges_of(RunConfig(outer=outer), plan)
    delta, count = bytearray(merge.layout_up.total_bytes), 1021 << 20
    (counts,) = merge.layout_up.unpack(delta)[1:]
    counts[...] = encode_uses(jnp.array([count], jnp.uint32))
    assert merge.uses(delta).most == count * 49 // 2


def test_a_train_loop_of_a_users_own_counts_no_pictures():
    config, like = Config(run=RunConfig(model=TINY)), {"x": np.zeros(2, np.float32)}
    with pytest.raises(ConfigError, match=r"weights_by_use = 'parts'.* = 'none'"):
        JoinedHost(config, "a", "127.0.0.1:1", like, None)


@pytest.mark.parametrize(
    "train", [("decoder",), ("connector", "decoder"), ("tower", "connector")]
)
def test_what_stays_as_it_is_makes_no_parameters(train):
    plain = transformer.build(TINY, pictures=2)
    params, batch = plain.init(jax.random.key(0)), batch_of(TINY, [2, 1])
    model = transformer.build(dataclasses.replace(TINY, train=train), pictures=2)
    own = {n: v for n, v in params.items() if vision.part_of((n,)) in train}
    rest = {n: v for n, v in params.items() if n not in own}
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(
        lambda leaf: leaf.shape, model.shapes()
    )
    assert {*model.frozen.shapes} == {*rest}
    counted = {path.split("/")[0] for path in model.uses}
    assert counted & {*vision.PARTS} == {*train} - {"decoder"}
    loss, _ = jax.jit(model.loss)(own, batch, rest)
    np.testing.assert_allclose(loss, jax.jit(plain.loss)(params, batch)[0], rtol=1e-6)


@pytest.mark.parametrize("train", [(), ("connector", "decoder"), ("tower",)])
def test_the_count_of_pictures_is_that_of_the_formula(train):
    """Of the program as it is differentiated: nothing goes back into a tower that stays
    as it is."""
    model = dataclasses.replace(preset("smolvlm_256m"), train=train)
    built = transformer.build(model, attention="dot_product", loss_chunk=0, pictures=2)
    arrays = ("tokens", "pictures", "picture_count")
    batch = abstract_batch(built.fields(arrays), 1, 512)
    frozen = {} if built.frozen is None else built.frozen.shapes
    traced = jax.make_jaxpr(jax.value_and_grad(built.require_loss(), has_aux=True))
    counted = product_flops(traced(built.shapes(), batch, frozen).jaxpr)
    assert counted == pytest.approx(analytic_flops(model, 512, 2), rel=1e-6)


def test_a_plan_without_the_data_says_that_no_picture_is_counted():
    run = RunConfig(model=preset("smolvlm_256m"))
    options = "--data.picture-tokens 64 --data.picture-token 49190"
    assert options in pictures_note(run)
    assert pictures_note(dataclasses.replace(run, data=SEEN)) == ""
    assert pictures_note(RunConfig()) == ""


def test_the_published_config_reads_as_it_is_written_by_both_names():
    model = preset("smolvlm_256m")
    assert model.vision.tokens_per_picture == 64
    written = families.write(model, 8192)
    assert families.read(written, "") == model
    assert families.read(written | {"model_type": "smolvlm"}, "") == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": VisionConfig(layers=1, width=30)}, r"width = 30.*heads = 12"),
        ({"vision": VisionConfig(layers=1, side=40)}, r"side = 40.*2 patches a side"),
        ({"vision": VisionConfig(layers=1, token=256)}, r"token = 256.*from 0 to 255"),
        ({"train": ("tower",)}, r"train = tower.*vision\.layers = 0"),
        (
            {"vision": TINY.vision, "train": ("tower", "connector", "decoder")},
            r"which are all parts",
        ),
        (
            {"vision": TINY.vision, "train": ("decoder",), "lora_rank": 2},
            r"train = decoder with model\.lora_rank = 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        transformer.build(
            dataclasses.replace(TINY, **{"vision": VisionConfig()} | changes)
        )
