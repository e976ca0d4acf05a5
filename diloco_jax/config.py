"""What a run is, as frozen values.

`RunConfig` is what all islands must agree on: it has one fingerprint. `IslandConfig`
is announced by each island at join. `Placement` says where processes live and what
goes wrong on purpose; it is nobody's business but this machine's. A `configs/*.py`
file is a function `config()` that returns a `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from diloco_jax.launch.config import LaunchConfig as LaunchConfig

FragmentBy = Literal["size", "layer", "tensor"]
Schedule = Literal["cosine", "constant"]
PartialMerges = Literal["scaled", "full"]
GraceWindow = Literal["alike", "overlap"]
AnchorMemory = Literal["device", "pinned_host"]

# A field with this metadata is local to a machine and outside the fingerprint.
LOCAL = {"local": True}
# Of a field with this metadata, the folder in front is local to a machine.
CODE = {"code": True}


class ConfigError(ValueError):
    """A configuration that cannot run: names the field, its value and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer (sizes in elements), or a model of one's own."""

    factory: str = dataclasses.field(default="", metadata=CODE)
    """What makes the model, "package.module:function" or "path/to/file.py:function"
    (docs/models.md); empty: the bundled transformer."""
    vocab_size: int = 256
    d_model: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_dim: int = 512
    tied_embeddings: bool = False
    rope_base: float = 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus. `digest` is filled in when the run is created."""

    paths: tuple[str, ...] = dataclasses.field(default=(), metadata=LOCAL)
    """Text files or folders, or `.npy` files of tokens; empty means the Python standard
    library's sources."""
    validation_fraction: float = 0.02
    """Share of the documents held out for validation."""
    digest: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The inner optimizer; its learning rate follows the progress of the run."""

    optimizer: str = "adamw"
    """"adamw", "lion", "sgd", "muon", or another one by its name in optax or
    optax.contrib."""
    arguments: tuple[tuple[str, bool | int | float | str], ...] = ()
    """More of what that function takes: pairs of name and value, or a mapping."""
    learning_rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.05
    """Share of the run's progress over which the learning rate rises from 0."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    rewarm_steps: int = 10
    """Steps over which a fresh or returned island's learning rate rises."""
    beta1: float = 0.9
    beta2: float = 0.95
    """The betas are those of Muon, and of all that optax gives a b1 and a b2."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the first moment; optax keeps second ones in float32 ("adafactor" keeps them
    factored), and "sgd" has neither."""
    weight_decay: float = 0.1
    """Of parameters with at least two axes; taken times the learning rate."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(dict(self.arguments).items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The outer optimizer. None = by `core.outer.presets`: after the merges that a
    fragment will see, the cycle and the merge rule."""

    optimizer: str | None = dataclasses.field(default=None, metadata=CODE)
    """"sgd", "nesterov", the name of one in optax or optax.contrib, or one of your own
    as "path/to/file.py:function" (docs/extending.md)."""
    learning_rate: float | None = None
    momentum: float | None = None
    warmup_merges: int = 0
    """Merges of a fragment over which the outer learning rate rises."""
    norm_guard: float = 10.0
    """A merged delta longer than this many times the running mean is cut; 0 = never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How islands' work is put together."""

    steps_per_cycle: int = 24
    """H: inner steps of the pacing island between two merges of one fragment."""
    fragments: int = 24
    """P."""
    fragment_by: FragmentBy = "size"
    """What goes into a fragment by itself, so that all are about equally large: a
    tensor of one layer, a whole layer, or a tensor with all its layers."""
    overlap_steps: int = 2
    """tau: steps an island may do between its take and the adoption."""
    quorum: int = 1
    """K: deltas without which a fragment is not merged."""
    grace: float = 0.8
    """gamma: share of the slack spent on waiting for more than K; 0 = none."""
    grace_window: GraceWindow = "alike"
    """What is waited for more than K if gamma is not 0: "overlap", the slack alone, as
    published; "alike", also islands of about the pacing one's speed, until they can
    have answered, even if that makes an adoption late."""
    max_staleness: int = 1
    """Versions by which a delta's base may lag the version it is merged into."""
    weighting: str = dataclasses.field(default="tokens", metadata=CODE)
    """How much a delta counts: "tokens", "tokens_times_rate", "uniform". This field,
    `merge`, `adopt` and the codecs also name what is not in the package, as
    "path/to/file.py:name" or "package.module:name" (docs/extending.md)."""
    partial_merges: PartialMerges = "scaled"
    """How far a merge goes that some live islands are not in: "scaled" by the share of
    all tokens per second that is in it, or "full"."""
    merge: str = dataclasses.field(default="rda", metadata=CODE)
    """How deltas become one: "rda", "mean", "trimmed_mean"."""
    adopt: str = dataclasses.field(default="keep", metadata=CODE)
    """What an adoption does with the island's own steps. "keep" and "rebase" lose none;
    they differ where its last delta missed the merge: see `core/adopt/`."""
    blend_alpha: float = 0.5
    """Share of the local value kept by `adopt = "blend"`."""
    codec_up: str = dataclasses.field(default="int8", metadata=CODE)
    codec_down: str = dataclasses.field(default="int8", metadata=CODE)
    """How deltas and publishes are encoded: "f32", "bf16", "int8", "int4"."""
    error_feedback: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that islands must agree on."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    sequence_length: int = 128
    total_tokens: int = 1_000_000
    seed: int = 0

    def fingerprint(self) -> str:
        """16 hex digits over every field that is not local to a machine."""
        text = json.dumps(shared_fields(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandConfig:
    """One island: what it computes with. Free to differ between islands."""

    batch_size: int = 8
    """Sequences per step, over all devices and accumulation rounds."""
    accumulation: int = 1
    """Rounds of gradient accumulation that a batch is cut into."""
    mesh_data: int = 1
    """Devices over which sequences are spread, each with its own parameters."""
    mesh_fsdp: int = 1
    """Devices over which sequences and parameters are spread."""
    mesh_tensor: int = 1
    """Devices over which the work on a sequence is spread."""
    hosts: int = 1
    """Host processes of the island, each with an equal share of its devices."""
    remat: Literal["none", "full", "dots", "attention"] = "none"
    """What the backward pass computes again of a layer: nothing, all, all but the
    products with weights, all but attention."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "dot_product", "splash"] = "auto"
    """"splash" is a kernel for TPUs, which "auto" takes there."""
    loss_chunk: int | None = None
    """Tokens of each sequence whose logits stand at a time; 0 = all, None = as many
    as the vocabulary allows."""
    anchor_memory: AnchorMemory = "device"
    """Where anchors, bases and residuals lie between takes and adoptions."""
    step_seconds: float = 0.0
    """Emulated step time: a step takes at least this long; 0 = as fast as it goes."""
    stands_for: str = ""
    """What this island stands in for, for people: "v6e-16"."""
    topology: str = ""
    """The TPU slice it runs on: "v5p:4x4x4", "v6e:16x16"; empty = this machine's
    devices."""

    @property
    def devices(self) -> int:
        """Devices of the island's mesh."""
        return self.mesh_data * self.mesh_fsdp * self.mesh_tensor

    @property
    def batch_multiple(self) -> int:
        """What `batch_size` must be a multiple of: each device has as many sequences
        in each round of accumulation."""
        return self.mesh_data * self.mesh_fsdp * self.accumulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where processes live, how long they wait, and what is broken on purpose."""

    workdir: str = ""
    """Folder of the run; empty = `runs/<config>-<time>`."""
    bind: str = "127.0.0.1:0"
    """Coordinator's address; port 0 = any free one."""
    advertise: str = ""
    """Address that islands dial, where it is not the bound one."""
    certificates: str = ""
    """Folder made by `diloco certs`; required on any but a loopback address."""
    insecure: bool = False
    """Serve a non-loopback address without TLS."""
    bulk_channels: int = 4
    """Connections per island for fragments, besides the control one."""
    time_budget_s: float = 10.0
    """The one time budget: silence after which a peer counts as gone. Leases,
    retries and deadlines are derived from it."""
    outage_budget_s: float = 60.0
    """Seconds of data an island holds, to train through a coordinator's outage."""
    compile_budget_s: float = 600.0
    """Longest time that an island may report "compiling", its hosts waiting for each
    other included."""
    notice_s: float = 0.0
    """Seconds that an island has, once its machine is to be taken away, to send what is
    open of it and to say goodbye. Above 0, the notice is SIGTERM or the cloud's
    metadata server, and ends the island with exit code 1, to be started again."""
    merge_buffer_bytes: int = 4 << 30
    """Bytes of memory for encoded deltas that wait for their merge. What is beyond
    waits on the disk of the workdir: two deltas of everything per island, at most."""
    checkpoints: str = ""
    """Folder, or gs://BUCKET/FOLDER, of the coordinator's snapshots and the islands'
    checkpoints; empty = `checkpoints` in the workdir."""
    snapshot_every_s: float = 30.0
    """Seconds between two snapshots of the coordinator."""
    snapshots_kept: int = 2
    checkpoint_every_s: float = 600.0
    """Seconds between two checkpoints of an island; 0 = none, and a returned island
    begins with fresh moments."""
    checkpoints_kept: int = 2
    evaluate_every_steps: int = 0
    """Local steps between an island's own validation passes; 0 = none."""
    evaluate_batches: int = 8
    baseline_learning_rate: float = 0.0
    """Of `diloco run --baseline`, swept for its batch size; 0 = the inner one."""
    restarts: int = 5
    """Times in a row that `diloco run` restarts one crashed process; ten minutes in
    which it ran end the row."""
    restart_delay_s: float = 1.0
    faults: tuple[str, ...] = ()
    """Faults to inject, `WHO@STEP:ACTION`: `v5p-a@40:kill`, `v5p-a@40:pause15`,
    `coordinator@12:kill` (its step is a merge)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, its islands by name, and where they live."""

    run: RunConfig = RunConfig()
    islands: dict[str, IslandConfig] = dataclasses.field(
        default_factory=lambda: {"a": IslandConfig()}
    )
    placement: Placement = Placement()
    launch: LaunchConfig = dataclasses.field(default_factory=LaunchConfig)

    def validate(self) -> Config:
        """Returns self; raises ConfigError naming field, values and remedy."""
        from diloco_jax.validation import validate

        validate(self)
        return self

    def island(self, name: str) -> IslandConfig:
        """The island's config; ConfigError with the nearest name if there is none."""
        if name not in self.islands:
            raise ConfigError(
                f"no island {name!r} in this config{suggest(name, self.islands)}; "
                f"it has {', '.join(self.islands)}"
            )
        return self.islands[name]

    def merges_per_fragment(self) -> float:
        """Merges each fragment will see if all islands are equally fast."""
        per_step = sum(i.batch_size for i in self.islands.values())
        steps = self.run.total_tokens / (per_step * self.run.sequence_length)
        return steps / self.run.sync.steps_per_cycle


def own_code(section: Any) -> dict[str, str]:
    """Fields of a section that name something in a file of this machine, by name."""
    values = {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(section)
        if field.metadata.get("code")
    }
    return {name: value for name, value in values.items() if ".py:" in (value or "")}


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """`; did you mean 'x'?` or the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def shared_fields(config: Any) -> dict[str, Any]:
    """A dataclass as nested builtins, without the fields local to a machine. A whole
    number in a field of floats is a float, as it is when `config.json` is read."""
    shared: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("local"):
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = shared_fields(value)
        elif isinstance(value, tuple):
            # As it is when it is read from JSON or a message.
            value = [list(v) if isinstance(v, tuple) else v for v in value]
        elif field.metadata.get("code") and value is not None:
            value = value.rpartition("/")[2]
        elif isinstance(value, int) and "float" in str(field.type):
            value = float(value)
        shared[field.name] = value
    return shared


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """`field: ours here, theirs there` for every leaf in which two configs differ."""
    found = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{name}.{line}" for line in differences(a, b)]
        elif a != b:
            found.append(f"{name}: {a!r} here, {b!r} there")
    return found
