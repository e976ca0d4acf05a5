"""config.json of a published model, as a ModelConfig, and back.

Both the older keys (`rope_theta`, `rope_scaling`) and those of transformers 5
(`rope_parameters`) are read; the older ones are written, which all versions read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from diloco_jax.config import ConfigError, ModelConfig, VisionConfig, suggest
from diloco_jax.models import vision
from diloco_jax.weights.tensor_files import PREPROCESSOR, PROCESSOR, read_json

Json = Mapping[str, Any]

SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FACTOR = {"rope_factor": "factor"}
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": FACTOR,
    "llama3": {
        **FACTOR,
        "rope_low_factor": "low_freq_factor",
        "rope_high_factor": "high_freq_factor",
        "rope_original_length": "original_max_position_embeddings",
    },
}
"""Scalings of positions: their keys by our names."""
PLAIN = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "clip_qkv": None,
    "router_jitter_noise": 0.0,
}
"""Keys for which only this value, or none, can be followed."""
LACKING: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "shared experts": {
        "n_shared_experts": (0,),
        "num_shared_experts": (0,),
        "moe_num_shared_experts": (0,),
        "shared_expert_intermediate_size": (0,),
    },
    "layers without experts beside layers with them": {
        "first_k_dense_replace": (0,),
        "num_dense_layers": (0,),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
    },
    "balance of the experts by a bias": {
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_router_enable_expert_bias": (False,),
        "use_expert_bias": (False,),
    },
}
"""Parts of mixtures of experts that the bundled transformer lacks: the keys that ask
for them, and the values that do not."""
Whole = Annotated[int, Meta(ge=1)]
Above0 = Annotated[float, Meta(gt=0)]
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers"), Whole),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), Whole),
    **dict.fromkeys(("head_dim", "intermediate_size"), Whole),
    **dict.fromkeys(("num_experts", "num_local_experts"), Whole),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), Whole),
    "norm_topk_prob": bool,
    "router_aux_loss_coef": Annotated[float, Meta(ge=0)],
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), Whole),
    "sliding_window": Annotated[int, Meta(ge=0)],
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), bool),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq"), Above0),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), Above0),
    "partial_rotary_factor": Above0,
    "original_max_position_embeddings": Whole,
    **dict.fromkeys(("full_attention", "sliding_attention"), dict[str, Any]),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict[str, Any]),
    **dict.fromkeys(("hidden_act", "hidden_activation"), str),
    **dict.fromkeys(("rope_type", "type"), str),
    "layer_types": list[str],
    **dict.fromkeys(("image_size", "patch_size", "scale_factor"), Whole),
    "image_token_id": Annotated[int, Meta(ge=0)],
    "layer_norm_eps": Above0,
    "vision_config": dict[str, Any],
}
"""Types of the keys that are read, at any depth; null is as if the key were not there,
except that a null window is none."""
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A family of models: its fixed switches, and defaults of its config.json."""

    architecture: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Its keys of a mixture of experts, by our names."""
    windows: bool = False
    activation_key: str = "hidden_act"


EXPERTS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "experts_renormalised": "norm_topk_prob",
    "balance_loss": "router_aux_loss_coef",
}
FAMILIES = {
    "llama": ModelFamily(architecture="LlamaForCausalLM", fixed={"norm_gain": "scale"}),
    "qwen2": ModelFamily(
        architecture="Qwen2ForCausalLM",
        fixed={"norm_gain": "scale", "attention_bias": "qkv"},
    ),
    "qwen3": ModelFamily(
        architecture="Qwen3ForCausalLM",
        fixed={"norm_gain": "scale", "qk_norm": True},
        defaults={"head_dim": 128},
    ),
    # As a llama, which it leaves as; the first of them saw a window in every layer.
    "mistral": ModelFamily(
        architecture="MistralForCausalLM",
        fixed={"norm_gain": "scale"},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "gemma3_text": ModelFamily(
        architecture="Gemma3ForCausalLM",
        fixed={
            "norm_gain": "one_plus_scale",
            "qk_norm": True,
            "post_norms": True,
            "scaled_embeddings": True,
        },
        # The published files leave out what is as in transformers' class.
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        windows=True,
        activation_key="hidden_activation",
    ),
    "mixtral": ModelFamily(
        architecture="MixtralForCausalLM",
        fixed={
            "norm_gain": "scale",
            "attention_bias": "none",
            "mlp_bias": False,
            "experts_renormalised": True,
        },
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": 0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        experts={
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_dim": "intermediate_size",
            "balance_loss": "router_aux_loss_coef",
        },
    ),
    "qwen3_moe": ModelFamily(
        architecture="Qwen3MoeForCausalLM",
        fixed={"norm_gain": "scale", "qk_norm": True, "mlp_bias": False},
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        experts=EXPERTS,
    ),
    "olmoe": ModelFamily(
        architecture="OlmoeForCausalLM",
        fixed={
            "norm_gain": "scale",
            "qk_norm": True,
            "qk_norm_whole": True,
            "mlp_bias": False,
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        experts=EXPERTS | {"expert_dim": "intermediate_size"},
    ),
}
MULTIMODAL = {"gemma3": "gemma3_text", "idefics3": "llama", "smolvlm": "llama"}
"""Models with a picture encoder, and the family of the decoder inside."""
WITH_TOWER = ("idefics3", "smolvlm")
"""Those whose tower is read, too; they compute the same, and leave as the first."""
TOWER = {
    "layers": ("num_hidden_layers", 12),
    "width": ("hidden_size", 1152),
    "heads": ("num_attention_heads", 16),
    "mlp_dim": ("intermediate_size", 3072),
    "side": ("image_size", 224),
    "patch": ("patch_size", 32),
}
"""Sizes of a tower by our names: their keys, and the defaults of transformers."""
TOWER_PLAIN = {
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": vision.EPSILON,
    "num_channels": 3,
}
"""Keys of a tower for which only this value, or none, can be followed."""
UNSAID = {
    "do_image_splitting": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 1,
    "rescale_factor": 1 / 255,
}
"""Settings of a processor that decide what a model sees, besides its two sizes, as they
are where a file leaves them out; filter 1 is Lanczos."""
OUTER = (
    "tie_word_embeddings",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys of the whole model, which count before those of the decoder inside."""


def text_config(found: Json) -> Json:
    """Return the part of a config.json that describes the decoder."""
    kind = str(found.get("model_type"))
    if kind not in MULTIMODAL:
        return found
    if not isinstance(inner := found.get("text_config"), dict):
        raise ConfigError(
            f"config.json: text_config = {inner!r}, but a {kind} has its decoder "
            f"there; copy the folder again"
        )
    outer = {key: found[key] for key in OUTER if found.get(key) is not None}
    return {**inner, **outer, "model_type": MULTIMODAL[kind]}


def read(found: Json, where: str) -> ModelConfig:
    """Return the model that a config.json describes.

    where: the file, for messages. Raises ConfigError, naming the key, for an unknown
    family, a missing size, or a switch that the bundled transformer lacks.
    """
    tower = _read_tower(found, where)
    found = text_config(found)
    kind = str(found.get("model_type"))
    _require_none_lacking(where, found)
    if kind not in FAMILIES:
        known = [*FAMILIES, *MULTIMODAL]
        raise ConfigError(
            f"{where}: model_type = {kind!r} is no known family{suggest(kind, known)}; "
            f"there are {', '.join(known)}"
        )
    family = FAMILIES[kind]
    found = _checked(found, where)
    if family.experts and "num_local_experts" in found:  # As transformers 5 writes it.
        found = {"num_experts": found["num_local_experts"], **found}
    found = {**DEFAULTS, **family.defaults, **found}
    found = {"num_key_value_heads": found.get("num_attention_heads"), **found}
    if not found.get("head_dim") and found.get("num_attention_heads"):
        heads = found["num_attention_heads"]
        found = {**found, "head_dim": found.get("hidden_size", 0) // heads}
    _require_plain(where, found)
    sizes = {}
    for ours, theirs in {**SIZES, **family.experts}.items():
        if theirs not in found:
            raise ConfigError(f"{where} has no {theirs}; copy the folder again")
        sizes[ours] = found[theirs]
    _require(
        where,
        "query_pre_attn_scalar",
        found.get("query_pre_attn_scalar", sizes["head_dim"]),
        (sizes["head_dim"],),
    )
    if family.fixed.get("qk_norm_whole"):
        width = sizes["d_model"] // sizes["num_heads"]
        _require(where, "head_dim", sizes["head_dim"], (width,))
    key = family.activation_key
    activation = found.get(key, "silu")
    _require(where, key, activation, tuple(ACTIVATIONS))
    biases = "qkvo" if found.get("attention_bias") else "none"
    return ModelConfig(
        **{
            **sizes,
            "activation": ACTIVATIONS[activation],
            "attention_bias": biases,
            "mlp_bias": bool(found.get("mlp_bias")),
            **_read_rope(found, where),
            **_read_windows(found, family, where),
            **family.fixed,
            **tower,
        }
    )


def _checked(found: Json, where: str) -> dict[str, Any]:
    """Return it without nulls; raise ConfigError for a value of a wrong type."""
    kept: dict[str, Any] = {k: v for k, v in found.items() if v is not None}
    if found.get("sliding_window", 0) is None:
        kept["sliding_window"] = 0
    for key in kept.keys() & TYPES.keys():
        try:
            msgspec.convert(kept[key], TYPES[key])
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{where}: {key} = {kept[key]!r}: {error}; copy the folder again"
            ) from error
        if isinstance(kept[key], dict):
            kept[key] = _checked(kept[key], f"{where}, {key}")
    return kept


def write(model: ModelConfig, length: int) -> dict[str, Any]:
    """Return the config.json of a model. length: tokens of its training sequences.

    A family whose norms multiply by a plain scale also serves a model that adds 1 to
    it. Raises ConfigError if no family has the model's switches.
    """
    if model.vision.layers:
        return _write_tower(model, length)
    nearest: list[str] = []
    for kind, family in FAMILIES.items():
        if bool(family.experts) != bool(model.experts):
            continue
        written = _write(kind, family, model, length)
        again = read(written, kind)
        wanted = as_written(model, again)
        lacking = [
            f"{field.name} = {getattr(model, field.name)!r}"
            for field in dataclasses.fields(model)
            if getattr(again, field.name) != getattr(wanted, field.name)
        ]
        if not lacking:
            return written
        nearest = min(nearest or lacking, lacking, key=len)
    raise ConfigError(
        f"no family of {', '.join(FAMILIES)} is like this model, the nearest lacks "
        f"model.{', model.'.join(nearest)}; read its parameters with "
        f"diloco_jax.evaluation.load_params"
    )


def as_written(model: ModelConfig, written: ModelConfig) -> ModelConfig:
    """Return the model as a reader of its files sees it: without settings that have no
    effect, and with plain scales if the files have gains."""
    changes: dict[str, Any] = {"weights": "", "train": ()}
    if written.norm_gain == "scale":
        changes["norm_gain"] = "scale"
    unused: list[str] = [] if model.experts else list(EXPERTS)
    if model.experts:
        changes["mlp_dim"] = written.mlp_dim
    if not model.qk_norm:
        unused += ["qk_norm_whole"]
    if not model.window:
        unused += ["window_pattern", "rope_window_base"]
    unused += SCALINGS["llama3"].keys() - SCALINGS[model.rope_scaling].keys()
    changes |= {name: getattr(ModelConfig(), name) for name in unused}
    return dataclasses.replace(model, **changes)


def _write(
    kind: str, family: ModelFamily, model: ModelConfig, length: int
) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    written = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{
            theirs: getattr(model, ours)
            for ours, theirs in {**SIZES, **family.experts}.items()
        },
        family.activation_key: activations[model.activation],
        "attention_bias": model.attention_bias == "qkvo",
        "mlp_bias": model.mlp_bias,
        "max_position_embeddings": length,
        "rope_theta": model.rope_base,
        "rope_scaling": None,
    }
    if scaling := SCALINGS[model.rope_scaling]:
        written["rope_scaling"] = {
            "rope_type": model.rope_scaling,
            **{theirs: getattr(model, ours) for ours, theirs in scaling.items()},
        }
    if "sliding_window" in family.defaults:
        written["sliding_window"] = None
    if family.fixed.get("qk_norm_whole"):  # Its norms have the width of the stream.
        written["head_dim"] = model.d_model // model.num_heads
    if family.windows:
        written |= {
            "query_pre_attn_scalar": model.head_dim,
            "rope_local_base_freq": model.rope_window_base,
            "sliding_window": model.window,
            "sliding_window_pattern": model.window_pattern,
            "layer_types": _layer_types(model, model.num_layers),
        }
    return written


def _read_tower(found: Json, where: str) -> dict[str, Any]:
    """Return the tower that a config.json describes; {} if it has none, or one that is
    left out."""
    kind = str(found.get("model_type"))
    if kind not in WITH_TOWER:
        return {}
    outer = {"scale_factor": 2, **_checked(found, where)}
    inner = _checked(outer.get("vision_config", {}), f"{where}, vision_config")
    for key, value in TOWER_PLAIN.items():
        _require(f"{where}, vision_config", key, inner.get(key, value), (value,))
    if "image_token_id" not in outer:
        raise ConfigError(f"{where} has no image_token_id; copy the folder again")
    family = str((found.get("text_config") or {}).get("model_type"))
    _require(f"{where}, text_config", "model_type", family, (MULTIMODAL[kind],))
    sizes = {ours: inner.get(*theirs) for ours, theirs in TOWER.items()}
    shuffle, token = outer["scale_factor"], outer["image_token_id"]
    return {"vision": VisionConfig(shuffle=shuffle, token=token, **sizes)}


def _write_tower(model: ModelConfig, length: int) -> dict[str, Any]:
    kind = WITH_TOWER[0]
    decoder = dataclasses.replace(model, vision=VisionConfig(), train=())
    text = write(decoder, length)
    if text["model_type"] != MULTIMODAL[kind]:
        raise ConfigError(
            f"a model with pictures leaves as an {kind}, whose decoder is a "
            f"{MULTIMODAL[kind]}, and this model's is a {text['model_type']}; read its "
            f"parameters with diloco_jax.evaluation.load_params"
        )
    own = model.vision
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": kind,
        "scale_factor": own.shuffle,
        "image_token_id": own.token,
        "tie_word_embeddings": model.tied_embeddings,
        "text_config": text,
        "vision_config": {
            "model_type": f"{kind}_vision",
            **{theirs: getattr(own, ours) for ours, (theirs, _) in TOWER.items()},
            **TOWER_PLAIN,
        },
    }


def processor(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """Return the files, by name, that tell other tools how a model with pictures takes
    them: each becomes one square by one resize, as it does here."""
    side = model.vision.side
    kind = {"processor_class": "Idefics3Processor"}
    return {
        PREPROCESSOR: {
            **kind,
            "image_processor_type": "Idefics3ImageProcessor",
            "do_convert_rgb": True,
            "do_pad": True,
            **UNSAID,
            "do_image_splitting": False,
            "max_image_size": {"longest_edge": side},
            "size": {"height": side, "width": side},
        },
        PROCESSOR: {**kind, "image_seq_len": model.vision.tokens_per_picture},
    }


def require_processor(folder: Path, model: ModelConfig) -> None:
    """Raise ConfigError, naming file and settings, if a folder's files have pictures
    treated otherwise than this package does; pass where they say nothing."""
    if not model.vision.layers:
        return
    for name in (PREPROCESSOR, PROCESSOR):
        if not (folder / name).is_file():
            continue
        whole = read_json(folder / name)
        found = whole.get("image_processor", whole if name == PREPROCESSOR else None)
        if not isinstance(found, dict):
            continue
        wanted = processor(model)[PREPROCESSOR]
        wrong = {
            key: wanted[key]
            for key in (*UNSAID, "max_image_size", "size")
            if found.get(key, UNSAID.get(key)) != wanted[key]
        }
        if wrong:
            told = ", ".join(f"{key} = {found.get(key)!r}" for key in wrong)
            raise ConfigError(
                f"{folder / name}: {told}: pictures are one square here, not split "
                f"and resized once, with values from -1 to 1; write {json.dumps(wrong)}"
            )


def _read_rope(found: Json, where: str) -> dict[str, Any]:
    parameters: Json = found.get("rope_parameters") or {}
    local = parameters.get("sliding_attention", {})
    own = parameters.get("full_attention", {} if local else parameters)
    older: Json = found.get("rope_scaling") or {}
    if own and not _with_type(older).items() <= _with_type(own).items():
        # Readers do not agree which of them counts, and for which key.
        raise ConfigError(
            f"{where}: rope_parameters has {own} and rope_scaling {older}; write the "
            f"keys that are meant into rope_parameters, and leave rope_scaling out"
        )
    scaling: Json = _with_type(own or older)
    kind = scaling.get("rope_type", "default")
    _require(where, "rope_type", kind, ("default", "linear", "llama3"))
    _require(where, "rope_type", local.get("rope_type", "default"), ("default",))
    for part in (scaling, local):
        _require_plain(where, part)
    rope = {"rope_base": float(scaling.get("rope_theta", found["rope_theta"]))}
    base = local.get("rope_theta", found.get("rope_local_base_freq"))
    if base is not None:
        rope["rope_window_base"] = float(base)
    kind = "none" if kind == "default" else kind
    for ours, theirs in SCALINGS[kind].items():
        if theirs not in scaling:
            raise ConfigError(
                f"{where}: the scaling of positions has no {theirs} (its keys are "
                f"{', '.join(scaling)}); copy the folder again"
            )
        rope[ours] = type(getattr(ModelConfig(), ours))(scaling[theirs])
    return {**rope, "rope_scaling": kind}


def _with_type(scaling: Json) -> dict[str, Any]:
    """Return it with `rope_type` for the older name of that key."""
    kept = {key: value for key, value in scaling.items() if key != "type"}
    return {"rope_type": scaling["type"], **kept} if "type" in scaling else kept


def _read_windows(found: Json, family: ModelFamily, where: str) -> dict[str, Any]:
    kinds = found.get("layer_types") or []
    if not family.windows:
        other = next((kind for kind in kinds if kind != "full_attention"), None)
        _require(where, "layer_types", other or "full_attention", ("full_attention",))
        if "sliding_window" in family.defaults and found["sliding_window"]:
            raise ConfigError(
                f"{where}: sliding_window = {found['sliding_window']}, which the "
                f"bundled transformer lacks in this family; set it to null if no text "
                f"is longer: the window then hides nothing"
            )
        return {}
    pattern = found.get("sliding_window_pattern", found.get("_sliding_window_pattern"))
    if "full_attention" in kinds:
        pattern = kinds.index("full_attention") + 1
    windows: dict[str, Any] = {
        "window": found["sliding_window"] or 0,
        "window_pattern": pattern or 6,
    }
    if kinds and "sliding_attention" not in kinds:
        windows["window"] = 0
    made = ModelConfig(**windows)
    if kinds and kinds != _layer_types(made, found["num_hidden_layers"]):
        raise ConfigError(
            f"{where}: layer_types = {kinds}; only a full_attention after every so "
            f"many of sliding_attention can be followed"
        )
    return windows


def _layer_types(model: ModelConfig, count: int) -> list[str]:
    """Return what the first layers see, as config.json names it."""
    kinds = "full_attention", "sliding_attention"
    return [kinds[model.is_windowed(layer)] for layer in range(count)]


def _require_none_lacking(where: str, found: Json) -> None:
    for part, keys in LACKING.items():
        for key, plain in keys.items():
            if (value := found.get(key)) is not None and value not in plain:
                raise ConfigError(
                    f"{where}: {key} = {value!r} asks for {part}, which the bundled "
                    f"transformer lacks; its families of experts are "
                    f"{', '.join(name for name in FAMILIES if FAMILIES[name].experts)}"
                )


def _require_plain(where: str, found: Json) -> None:
    for key, value in PLAIN.items():
        _require(where, key, found.get(key) or value, (value,))


def _require(where: str, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{where}: {key} = {value!r}; the bundled transformer has "
            f"{' or '.join(map(repr, known))}"
        )
