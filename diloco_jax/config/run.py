"""The settings that all islands of a run must agree on, a section a class.

`fingerprint` is over every field that is not local to a machine; `differences` says in
which of them two configs differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from diloco_jax.config.fields import (
    AT_LEAST_1,
    BELOW_1,
    BETWEEN,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SOME_SHARE,
    Bound,
    explained,
    setting,
)
from diloco_jax.errors import ConfigError
from diloco_jax.files import absolute


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The tower that turns pictures into inputs of the decoder, as SigLIP's in Idefics3
    and SmolVLM; without layers there is none.

    Example:
      >>> from diloco_jax import preset
      >>> preset("smolvlm_256m").vision.tokens_per_picture
      64
    """

    layers: int = setting(
        0, NOT_NEGATIVE, help="Layers of the tower; 0 = the model takes no pictures."
    )
    width: int = setting(768, AT_LEAST_1, help="Width of the tower, over all heads.")
    heads: int = setting(12, AT_LEAST_1, help="Attention heads of the tower.")
    mlp_dim: int = setting(3072, AT_LEAST_1, help="Width of the MLP of its layers.")
    side: int = setting(
        512, AT_LEAST_1, help="Pixels of a side of every picture, which is square."
    )
    patch: int = setting(16, AT_LEAST_1, help="Pixels of a side of a patch.")
    shuffle: int = setting(
        4,
        AT_LEAST_1,
        help="Patches of a side that make one input of the decoder (pixel shuffle).",
    )
    token: int = setting(
        0,
        NOT_NEGATIVE,
        help="The token in whose places a picture's inputs stand; it is not predicted.",
    )

    @property
    def tokens_per_picture(self) -> int:
        """Inputs of the decoder, and places of `token`, of one picture."""
        return (self.side // self.patch // self.shuffle) ** 2


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, sizes in elements; or a model of your own.

    Its switches make the families that `docs/weights.md` names.

    Example:
      >>> from diloco_jax import ModelConfig, preset
      >>> preset("tiny") == ModelConfig(
      ...     d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
      ...     mlp_dim=128,
      ... )
      True
    """

    factory: str = setting(
        "",
        code=True,
        help='Function that makes your own model, "package.module:function" or '
        '"path/to/file.py:function" (docs/models.md); empty = the bundled transformer, '
        "to which the other options of this section belong.",
    )
    weights: str = setting(
        "",
        local=True,
        help="Where the first parameters come from, as --init gives it: hf:DIR or "
        "run:WORKDIR; empty = they are drawn.",
    )
    lora_rank: int = setting(
        0,
        NOT_NEGATIVE,
        help="Rank of the adapters that are trained in place of the weights, which "
        "stay as they are (LoRA); 0 = the weights themselves are trained.",
    )
    lora_alpha: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Factor of the adapters, times lora_rank; 0 = lora_rank, a factor of 1.",
    )
    frozen_digest: str = setting(
        "",
        help="Digest of the weights that stay as they are; empty = computed when the "
        "run is created. Other ones are refused.",
    )
    train: tuple[Literal["tower", "connector", "decoder"], ...] = setting(
        (),
        metavar="PART...",
        help="Parts of a model with pictures that are trained, of tower, connector and "
        "decoder; the others stay as model.weights has them, and make no pieces; empty "
        "= all.",
    )
    vision: VisionConfig = setting(
        VisionConfig(), help="The tower, of a model that takes pictures."
    )
    vocab_size: int = setting(256, AT_LEAST_1, help="Number of different tokens.")
    d_model: int = setting(192, AT_LEAST_1, help="Width of the residual stream.")
    num_layers: int = setting(4, AT_LEAST_1, help="Transformer layers.")
    num_heads: int = setting(
        6, AT_LEAST_1, help="Attention heads, a multiple of num_kv_heads."
    )
    num_kv_heads: int = setting(
        2, AT_LEAST_1, help="Heads of keys and values, each shared by several heads."
    )
    head_dim: int = setting(32, AT_LEAST_1, help="Width of one attention head.")
    mlp_dim: int = setting(
        512, AT_LEAST_1, help="Width of a layer's MLP; without effect with experts."
    )
    experts: int = setting(
        0,
        NOT_NEGATIVE,
        help="MLPs of each layer, to some of which a router sends each token (a "
        "mixture of experts); 0 = one MLP for all tokens.",
    )
    experts_per_token: int = setting(
        2, AT_LEAST_1, help="Experts that a token is sent to, the likeliest ones."
    )
    expert_dim: int = setting(512, AT_LEAST_1, help="Width of one expert.")
    experts_renormalised: bool = setting(
        True,
        help="Divide the probabilities of a token's experts by their sum, as Mixtral "
        "and Qwen 3 do and OLMoE does not.",
    )
    balance_loss: float = setting(
        0.01,
        NOT_NEGATIVE,
        help="Factor of the loss that keeps the experts' loads alike; without the "
        "factor it is 1 where they are, and model.experts where one has all.",
    )
    tied_embeddings: bool = setting(
        False, help="Use the embeddings of the input for the output, too."
    )
    scaled_embeddings: bool = setting(
        False, help="Multiply the embeddings of the input by sqrt(d_model)."
    )
    activation: Literal["silu", "gelu_tanh"] = setting(
        "silu", help="Function of the MLP's gate."
    )
    norm_gain: Literal["one_plus_scale", "scale"] = setting(
        "one_plus_scale",
        help="Factor of a norm's result: 1 + scale, scale starting at 0; or scale, "
        "starting at 1.",
    )
    norm_epsilon: float = setting(
        1e-6, POSITIVE, help="Added to the mean square in a norm."
    )
    qk_norm: bool = setting(
        False, help="Normalise each head's query and key before they are rotated."
    )
    qk_norm_whole: bool = setting(
        False,
        help="With qk_norm: normalise those of all heads together, as OLMoE does.",
    )
    post_norms: bool = setting(
        False, help="Normalise what attention and MLP add to the residual stream, too."
    )
    attention_bias: Literal["none", "qkv", "qkvo"] = setting(
        "none",
        help="Biases of attention: none, those of queries, keys and values, or that of "
        "the output, too.",
    )
    mlp_bias: bool = setting(False, help="Add a bias to each product of the MLP.")
    window: int = setting(
        0,
        NOT_NEGATIVE,
        help="Tokens, itself included, that a token attends to in layers with a "
        "window; 0 = no layer has one.",
    )
    window_pattern: int = setting(
        6, AT_LEAST_1, help="With a window: the last of every so many layers has none."
    )
    rope_base: float = setting(
        10_000.0, POSITIVE, help="Base of the rotary position embedding's wavelengths."
    )
    rope_window_base: float = setting(
        10_000.0, POSITIVE, help="The base in layers with a window."
    )
    rope_scaling: Literal["none", "linear", "llama3"] = setting(
        "none",
        help="Lengthens the wavelengths of layers without a window: all of them by "
        "rope_factor, or the long ones as Llama 3.1 does.",
    )
    rope_factor: float = setting(1.0, POSITIVE, help="Factor of the wavelengths.")
    rope_low_factor: float = setting(
        1.0,
        POSITIVE,
        help='With "llama3": wavelengths above rope_original_length / rope_low_factor '
        "grow by all of rope_factor.",
    )
    rope_high_factor: float = setting(
        4.0,
        POSITIVE,
        help='With "llama3": wavelengths below rope_original_length / rope_high_factor '
        "stay.",
    )
    rope_original_length: int = setting(
        8192, AT_LEAST_1, help='With "llama3": tokens of the sequences before scaling.'
    )

    def is_windowed(self, layer: int) -> bool:
        """Tell if attention of a layer sees `window` tokens alone."""
        return bool(self.window) and (layer + 1) % self.window_pattern != 0

    @property
    def layer_period(self) -> int:
        """Layers after which their kinds repeat."""
        return self.window_pattern if self.window else 1


INIT_KINDS = ("hf", "run")
HUB = "hf://"
"""Begins the location of a model of the Hugging Face Hub."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w][\w./-]*)?")
"""OWNER/NAME, or OWNER/NAME@REVISION."""
FROM_ISLAND = "from-island:"
"""Begins an `--init` that names an island, whose parameters are no files."""


def read_init(weights: str) -> tuple[str, str]:
    """Return the kind and the folder that it names; raise ConfigError if it has another
    form. OWNER/NAME, where no such folder is, names a model of the hub.
    """
    kind, _, folder = weights.partition(":")
    if weights and (kind not in INIT_KINDS or not folder or folder.endswith("://")):
        raise ConfigError(
            f"--init {weights}: write hf:DIR for a folder with config.json and "
            f"safetensors, hf:OWNER/NAME for a model of the hub, run:WORKDIR for a "
            f"run's newest snapshot, or {FROM_ISLAND}NAME for what that island begins "
            f"with"
        )
    if kind == "hf" and HUB_NAME.fullmatch(folder) and not os.path.isdir(folder):
        return kind, f"{HUB}{folder}"
    return kind, absolute(folder)


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, tokens or prepared rows that the run trains on.

    Example:
      >>> from diloco_jax import Config, DataConfig, RunConfig
      >>> text = DataConfig(paths=("books/",))  # files and folders of this machine
      >>> Config(run=RunConfig(data=text)).run.data.paths
      ('books/',)
    """

    paths: tuple[str, ...] = setting(
        (),
        local=True,
        help="Text files or folders; or .npy files of tokens; or folders that `diloco "
        "data prepare` made, also gs://BUCKET/FOLDER; empty = the sources of the "
        "Python standard library.",
    )
    weights: tuple[float, ...] = setting(
        (),
        help="Shares of the prepared folders in data.paths, one number for each, in "
        "any scale; empty = by their rows.",
    )
    factory: str = setting(
        "",
        code=True,
        help='Function that makes your own data, "package.module:function" or '
        '"path/to/file.py:function" (docs/data.md); empty = that of data.paths.',
    )
    tokenizer: str = setting(
        "",
        local=True,
        help="The tokenizer that the data was made with: tokenizer.json, a .model of "
        "SentencePiece, or a folder that has one; empty = bytes, or tokens of an "
        "unknown one.",
    )
    validation_fraction: float = setting(
        0.02, BETWEEN, help="Share of the documents held out for validation."
    )
    digest: str = setting(
        "",
        help="Digest of the corpus; empty = computed when the run is created. A corpus "
        "with another digest is refused.",
    )
    arrays: tuple[str, ...] = setting(
        ("tokens",),
        help="Arrays that each row of the data has: tokens; segments where rows are "
        "packed; weights; source_number in a mixture; pictures and picture_count. "
        "Found together with the digest, and needed before to plan.",
    )
    pictures: int = setting(
        0,
        NOT_NEGATIVE,
        help="Most pictures of a row, for which each batch has room; 0 = as many as "
        "the fullest row has, found together with the digest.",
    )
    picture_tokens: int = setting(
        0,
        NOT_NEGATIVE,
        help="Placeholders of a picture in a row's tokens; found together with the "
        "digest, and needed before to plan.",
    )
    picture_token: int = setting(
        0,
        NOT_NEGATIVE,
        help="Number of the placeholder's token; likewise.",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """Folders of a mixture, in order; none if it is none, or not resolved yet."""
        mixed = len(self.weights) > 1 and len(self.weights) == len(self.paths)
        return self.paths if mixed else ()


FragmentBy = Literal["size", "layer", "tensor"]
WeightsByUse = Literal["none", "parts", "rows"]
PartialMerges = Literal["scaled", "full"]
GraceWindow = Literal["alike", "overlap"]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Settings for combining the islands' work.

    Example:
      >>> from diloco_jax import Config
      >>> Config().replace("sync.grace", 0).run.sync.grace
      0
      >>> Config().replace("sync.qorum", 2)
      Traceback (most recent call last):
          ...
      diloco_jax.errors.ConfigError: no field 'sync.qorum' in this config (did...
    """

    steps_per_cycle: int | None = setting(
        None,
        AT_LEAST_1,
        help="H: inner steps of the pacing island between two merges of one fragment; "
        "None = 4 to 24 by the length of the run, when it is created.",
    )
    fragments: int = setting(
        24,
        AT_LEAST_1,
        help="P: fragments that the model is cut into; each is merged once per cycle.",
    )
    fragment_by: FragmentBy = setting(
        "size",
        help="What goes into a fragment by itself, so that all are about equally "
        'large: a tensor of one layer ("size"), a whole layer, or a tensor with all '
        "its layers.",
    )
    overlap_steps: int | None = setting(
        None,
        NOT_NEGATIVE,
        help="tau: steps an island may do between its take and the adoption; None = 2, "
        "or 1 in a short cycle that was chosen.",
    )
    quorum: int = setting(
        1,
        AT_LEAST_1,
        help="K: deltas without which a fragment is not merged; a cycle is H steps of "
        "the K-th fastest island.",
    )
    grace: float = setting(
        0.8,
        BELOW_1,
        help="gamma: share of the slack spent on waiting for more than K deltas; "
        "0 = none.",
    )
    grace_window: GraceWindow = setting(
        "alike",
        help='How long a grace above 0 waits for more than K deltas: "overlap", for '
        'the slack alone, as published; "alike", also until islands of about the '
        "pacing one's speed can have answered, even if that makes an adoption late.",
    )
    max_staleness: int = setting(
        1,
        NOT_NEGATIVE,
        help="Versions by which a delta's base may lag the version it is merged into.",
    )
    delta_bound: float = setting(
        5.0,
        NOT_NEGATIVE,
        help="Longest delta that is merged, as a multiple of what is usual among the "
        "other islands; 0 = any that is finite. A refused island restarts the fragment "
        "from the global parameters.",
    )
    quarantine_after: int = setting(
        8,
        NOT_NEGATIVE,
        help="Deltas in a row that are not finite or too long, after which an island "
        "is merged no more, as long as most of the live islands are left; 0 = never.",
    )
    release_cycles: int = setting(
        2,
        AT_LEAST_1,
        help="Cycles in which all deltas of a quarantined island must be within bounds "
        "before it is merged again.",
    )
    weighting: str = setting(
        "tokens",
        code=True,
        help='Weight of a delta in its merge: "tokens", those behind it; '
        '"tokens_times_rate", the same times the island\'s tokens per step (as '
        'published); "uniform". This option, merge, adopt and the codecs also take '
        'a member of your own as "path/to/file.py:name" (docs/extending.md).',
    )
    weight_cap: float = setting(
        1.0,
        SOME_SHARE,
        help="Largest share of one island in the weights of a merge, if there are "
        "enough others for it; 1 = any.",
    )
    weights_by_use: WeightsByUse = setting(
        "parts",
        help="What an island's deltas weigh by how often it used it, two bytes each: "
        '"parts", a tower of pictures and its connector, by pictures; "rows", also '
        "each row of an input table that is not the output's, too, and each expert; "
        '"none". What nobody used stays as it is.',
    )
    partial_merges: PartialMerges = setting(
        "scaled",
        help="Length of a merge that lacks some live islands: scaled by its share of "
        "all tokens per second, or in full.",
    )
    merge: str = setting(
        "rda",
        code=True,
        help='Rule by which deltas become one: "mean", their weighted mean; "rda", '
        "which averages their lengths and directions apart; "
        '"trimmed_mean", which leaves out the extremes, and "clipped_mean", which '
        "shortens what is longer than most, for islands that may send wrong deltas "
        "(docs/results/raw/liars.md).",
    )
    adopt: str = setting(
        "keep",
        code=True,
        help='What an adoption does with the island\'s own steps. "keep" and '
        '"rebase" lose none; they differ where the island\'s last delta missed the '
        'merge (docs/design/pending_deltas.md). "overwrite" loses the steps since the '
        'take; "blend" averages the island\'s values and the merged ones.',
    )
    blend_alpha: float = setting(
        0.5, SHARE, help='Share of the local value that adopt = "blend" keeps.'
    )
    codec_up: str = setting(
        "int8",
        code=True,
        help='Encoding of deltas: "f32", "bf16", "int8", "int4" or "int2" '
        "(docs/design/codecs.md).",
    )
    codec_down: str = setting(
        "int8", code=True, help="Encoding of merged fragments: the same choices."
    )
    error_feedback: bool = setting(
        True, help="Add what the encoding of a delta lost to the island's next one."
    )

    @property
    def cycle(self) -> int:
        """`steps_per_cycle` of a run that was created. Raises ConfigError before."""
        return self._decided("steps_per_cycle")

    @property
    def overlap(self) -> int:
        """`overlap_steps` of a run that was created. Raises ConfigError before."""
        return self._decided("overlap_steps")

    def _decided(self, field: str) -> int:
        value: int | None = getattr(self, field)
        if value is None:
            raise ConfigError(
                f"sync.{field} = None: it is chosen when the run is created; set it, "
                f"or take the config.json of a run"
            )
        return value


Schedule = Literal["cosine", "constant"]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The inner optimizer; its learning rate follows the progress of the run.

    Example:
      >>> from diloco_jax import Config
      >>> Config().replace("inner.learning_rate", -1.0)
      Traceback (most recent call last):
          ...
      diloco_jax.errors.ConfigError: inner.learning_rate = -1.0; it must be at least 0
    """

    optimizer: str = setting(
        "adamw",
        code=True,
        help='"adamw", "lion", "sgd", "muon", one of optax or optax.contrib by its '
        'name, or your own as "path/to/file.py:function" (docs/extending.md).',
    )
    arguments: tuple[tuple[str, bool | int | float | str], ...] = setting(
        (),
        metavar="[NAME VALUE ...]",
        help="Further arguments of that function: pairs of name and value; in a "
        "configs file also a mapping.",
    )
    learning_rate: float = setting(1e-3, NOT_NEGATIVE, help="Peak learning rate.")
    schedule: Schedule = setting(
        "cosine", help="Course of the learning rate after the warm-up."
    )
    warmup_fraction: float = setting(
        0.05,
        SHARE,
        help="Share of the run's progress over which the learning rate rises from 0.",
    )
    final_fraction: float = setting(
        0.1, SHARE, help="Learning rate at the end, as a share of the peak."
    )
    rewarm_steps: int = setting(
        10,
        NOT_NEGATIVE,
        help="Steps over which a fresh or returned island's learning rate rises.",
    )
    beta1: float = setting(
        0.9,
        BELOW_1,
        help="b1 of every optax function that takes one; the momentum of Muon.",
    )
    beta2: float = setting(
        0.95, BELOW_1, help="b2 of every optax function that takes one."
    )
    moment_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        help='Type of the first moment. optax keeps second moments in float32; "sgd" '
        "has no moments.",
    )
    weight_decay: float = setting(
        0.1,
        NOT_NEGATIVE,
        help="Decay of parameters with at least two axes, times the learning rate.",
    )
    clip_norm: float = setting(
        1.0,
        NOT_NEGATIVE,
        help="Global gradient norm above which gradients are scaled down; 0 = never.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(dict(self.arguments).items()))


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The outer optimizer (docs/design/outer_presets.md).

    Example:
      >>> from diloco_jax import OuterConfig
      >>> OuterConfig(optimizer="sgd", learning_rate=1.0).momentum is None
      True
    """

    optimizer: str | None = setting(
        None,
        code=True,
        help='Outer optimizer: "sgd", "nesterov", the name of one in optax or '
        'optax.contrib, or your own as "path/to/file.py:function" '
        "(docs/extending.md); None = chosen when the run is created.",
    )
    learning_rate: float | None = setting(
        None,
        POSITIVE,
        help="Outer learning rate; None = chosen when the run is created.",
    )
    momentum: float | None = setting(
        None,
        BELOW_1,
        help='Momentum of "nesterov"; None = chosen when the run is created.',
    )
    warmup_merges: int = setting(
        0,
        NOT_NEGATIVE,
        help="Merges of a fragment over which the outer learning rate rises.",
    )
    norm_guard: float = setting(
        10.0,
        NOT_NEGATIVE,
        help="A merged delta longer than this many times the running mean is cut; "
        "0 = never.",
    )


SEED = Bound(0, 2**32 - 1)
"""Range of a seed: the bits of it that keys of jax.random use."""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that all islands must agree on.

    Example:
      >>> from diloco_jax import RunConfig, SyncConfig
      >>> a, b = RunConfig(), RunConfig(sync=SyncConfig(quorum=2))
      >>> a.fingerprint() == b.fingerprint()  # so no island of the one joins the other
      False
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    sequence_length: int = setting(
        128, AT_LEAST_1, help="Tokens of one training sequence."
    )
    total_tokens: int = setting(
        1_000_000,
        AT_LEAST_1,
        help="Tokens that all islands train on together, after which the run ends.",
    )
    seed: int = setting(
        0, SEED, help="Seed of the first parameters and of the order of the data."
    )

    def fingerprint(self) -> str:
        """Return 16 hex digits over every field that is not local to a machine."""
        text = json.dumps(shared_fields(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def shared_fields(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested builtins, without the fields local to a machine.

    A whole number in a field of floats is a float, as it is when `config.json` is
    read.
    """
    shared: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("local"):
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = shared_fields(value)
        elif isinstance(value, tuple):
            # JSON and messages give lists.
            value = [list(v) if isinstance(v, tuple) else v for v in value]
        elif field.metadata.get("code") and value is not None:
            value = value.rpartition("/")[2]
        elif isinstance(value, int) and "float" in str(field.type):
            value = float(value)
        shared[field.name] = value
    return shared


def differences(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    where: tuple[str, str] = ("here", "there"),
) -> list[str]:
    """List `field: ours here, theirs there` for every leaf in which two differ. where:
    the words for the two."""
    found = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{name}.{line}" for line in differences(a, b, where)]
        elif a != b:
            found.append(f"{name}: {a!r} {where[0]}, {b!r} {where[1]}")
    return found
