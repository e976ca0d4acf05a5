"""The first parameters of a run: drawn, or from files, or from another run.

`--init hf:DIR` names a folder with config.json and safetensors, `--init hf:OWNER/NAME`
a model of the Hugging Face Hub, `--init run:WORKDIR` the newest snapshot of a run of
this package. Of a folder in a bucket there is a copy on this machine for as long as
somebody reads it.

A name becomes `hf://OWNER/NAME@COMMIT` before anything starts, and stands so in the
run's config: a coordinator that comes back reads the same files. They lie in the hub's
own cache (`HF_HOME`), where an interrupted download goes on and other tools find them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils.epath import Path as Folder

from diloco_jax import files, run_files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    Placement,
    RunConfig,
    differences,
    shared_fields,
)
from diloco_jax.config.run import FROM_ISLAND, HUB, read_init
from diloco_jax.coordinator import snapshots
from diloco_jax.core.fragments import Piece, get_piece
from diloco_jax.data.prepared import is_prepared, read_manifest, tokenizer_of
from diloco_jax.data.tokenizers import find_tokenizer, kept_name, open_tokenizer
from diloco_jax.files import is_bucket
from diloco_jax.models.build import build
from diloco_jax.models.model import Model, Params
from diloco_jax.models.vision import part_of
from diloco_jax.weights import families, tensor_files
from diloco_jax.weights.tensor_files import (
    BESIDE,
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    ExpertStack,
    read_index,
    read_json,
    read_tensors,
)

logger = logging.getLogger(__name__)


def started_from(config: Config, source: str, *, trust_code: bool = False) -> Config:
    """Return the config of a run that starts from a source, with the source's model.

    A source that is an island has no model of its own, and the config's stays.
    trust_code: see `workdir.read_config`. Raises ConfigError if the source cannot be
    found, or if its model is of an unknown kind.
    """
    if source.startswith(FROM_ISLAND):
        island = source.removeprefix(FROM_ISLAND)
        if not island:
            raise ConfigError(
                f"--init {FROM_ISLAND} names no island; write {FROM_ISLAND}NAME, one "
                f"of {', '.join(config.islands)}"
            )
        if config.run.model.weights:
            raise ConfigError(
                f"--init {source} with model.weights = {config.run.model.weights!r}: a "
                f"run has its first parameters from one of both; leave the other one "
                f"out"
            )
        placement = dataclasses.replace(config.placement, first_from=island)
        return dataclasses.replace(config, placement=placement)
    kind, folder = read_init(pinned(source))
    with at_hand(kind, folder, arrays=False) as here:
        if kind == "hf":
            model = families.read(read_json(here / CONFIG), f"{folder}/{CONFIG}")
        else:
            from diloco_jax.workdir import read_config

            model = read_config(here, trust_code=trust_code).run.model
    own = config.run.model
    model = dataclasses.replace(
        model,
        weights=f"{kind}:{folder}",
        lora_rank=own.lora_rank,
        lora_alpha=own.lora_alpha,
        train=own.train,
        frozen_digest="",
    )
    require_source(model)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, model=model))


def require_repeatable(placement: Placement, what: str) -> None:
    """Raise ConfigError if an island gave the first parameters, since no file has them.

    what: names the command that is to repeat the run.
    """
    if placement.first_from:
        raise ConfigError(
            f"the run has its first parameters from island {placement.first_from!r} "
            f"(placement.first_from), and {what} has only what is drawn or in files; "
            f"give it a run that began without {FROM_ISLAND}NAME"
        )


def first_params(run: RunConfig, model: Model) -> Params:
    """Return the first parameters, f32, layers stacked."""
    if not run.model.weights or run.model.lora_rank:
        drawn: Params = jax.jit(model.init)(jax.random.key(run.seed))
        return drawn
    return whole(first_pieces(run, model))


def first_pieces(run: RunConfig, model: Model, scratch: Path | None = None) -> Params:
    """Return the first parameters for `core.fragments.get_piece`.

    Those that are drawn are as `Model.draw` says. Those of a folder are views of its
    mapped files in the dtype that they have there, and a stacked parameter is a list of
    its layers: nothing is read before it is needed. Those of a run lie in a nameless
    file in `scratch`, or in memory. What is in a bucket is copied into `scratch` first.

    Raises ConfigError, naming the tensor, if the files are not those of the model.
    """
    if not run.model.weights or run.model.lora_rank:
        draw = model.draw or jax.jit(model.init)
        drawn: Params = draw(jax.random.key(run.seed))
        return drawn
    trained = run.model.train
    if trained:
        run = dataclasses.replace(run, model=_all_trained(run.model))
        model = build(run)
    kind, folder = read_init(run.model.weights)
    with at_hand(kind, folder, arrays=True, scratch=scratch) as here:
        if kind == "hf":
            found = read_folder(here, run.model)
        else:
            found = _read_run(here, run.model, model, scratch)
    return {
        name: own
        for name, own in found.items()
        if not trained or part_of((name,)) in trained
    }


def _all_trained(model: ModelConfig) -> ModelConfig:
    """Return the model as its source has it, of which every part is trained."""
    if not model.train:
        return model
    return dataclasses.replace(model, train=(), frozen_digest="")


def require_source(model: ModelConfig) -> None:
    """Raise ConfigError unless the source of a model's weights is there and fits it;
    read no weights. Of a source in a bucket only its config is looked at."""
    kind, folder = read_init(model.weights)
    if not kind:
        return
    model = _all_trained(model)
    of_hub = folder.startswith(HUB)
    if of_hub and (meant := pinned(model.weights)) != f"{kind}:{folder}":
        raise ConfigError(
            f"model.weights = {model.weights!r} names no commit, and the run would not "
            f"find the same files later; write {meant!r}, which it is now"
        )
    with at_hand(kind, folder, arrays=of_hub) as here:
        if kind == "run":
            config = _config_of(here, model)
            if not is_bucket(folder):
                from diloco_jax.evaluation import newest_plan

                newest_plan(config, here, build(config.run))
        elif of_hub or not is_bucket(folder):
            read_folder(here, model)


def keep_source(weights: str, workdir: Path) -> None:
    """Copy the small files of the folder that a run starts from into its workdir.
    Exports of the run need them.
    """
    if not weights:
        return
    kind, folder = read_init(weights)
    with at_hand(kind, folder, arrays=False) as here:
        origin = here if kind == "hf" else here / run_files.SOURCE
        names = (name for name in (CONFIG, *BESIDE) if (origin / name).is_file())
        for name in names:
            (workdir / run_files.SOURCE).mkdir(exist_ok=True)
            shutil.copyfile(origin / name, workdir / run_files.SOURCE / name)


def keep_tokenizer(data: DataConfig, workdir: Path) -> None:
    """Keep the files of the data's tokenizer in its workdir, for exports, unless the
    folder that the run started from had one. Tokens that end answers of the data's
    chats join those that end a text."""
    folder = workdir / run_files.SOURCE
    path = tokenizer_of(data)
    if path and not (folder.is_dir() and find_tokenizer(folder) is not None):
        folder.mkdir(exist_ok=True)
        for file in open_tokenizer(path).files:
            shutil.copyfile(file, folder / kept_name(file))
    found = [read_manifest(path) for path in data.paths if is_prepared(path)]
    if taught := [end for prepared in found for end in prepared.ends]:
        own: Sequence[int | None] = end_tokens(folder) or [found[0].tokenizer.end]
        ends = [end for end in (*own, *taught) if end is not None]
        said = folder / GENERATION
        settings = read_json(said) if said.is_file() else {}
        settings["eos_token_id"] = list(dict.fromkeys(ends))
        files.write_text(json.dumps(settings, indent=2) + "\n", said)


def end_tokens(folder: Path) -> list[int]:
    """Return the tokens that end a text, as the files of a model's folder have them.

    Raises ConfigError, naming the file, if they are no tokens."""
    for name in (GENERATION, CONFIG):
        if (folder / name).is_file():
            ends = families.text_config(read_json(folder / name)).get("eos_token_id")
            if ends is None:
                continue
            found = ends if isinstance(ends, list) else [ends]
            if not all(type(end) is int for end in found):
                raise ConfigError(
                    f"{folder / name}: eos_token_id = {ends!r}; it is a number of a "
                    f"token, or a list of them: copy the file again"
                )
            return found
    return []


def fill(params: Params, piece: Piece, value: np.ndarray) -> None:
    """Write a piece into arrays, or views of arrays, that are there already."""
    place = get_piece(params, dataclasses.replace(piece, band=-1, bands=None))
    if isinstance(place, ExpertStack):
        joined = np.asarray(place)
        whole_piece = dataclasses.replace(piece, path=("",), layer=-1)
        if piece.bands is not None:
            fill({"": joined}, whole_piece, value)
        place.write(value if piece.bands is None else joined)
        return
    if piece.bands is not None:
        # Splitting an axis makes a view, as joining the band's part would not.
        place = piece.bands.striped(place)[piece.bands.index(piece.band)]
        value = piece.bands.striped(value)
    np.copyto(place, value, casting="same_kind")


def _read_run(
    workdir: Path, model: ModelConfig, built: Model, scratch: Path | None
) -> Params:
    """Return a run's newest parameters, read a fragment at a time."""
    from diloco_jax.evaluation import newest_pieces

    def empty(leaf: Any) -> np.ndarray:
        if scratch is None:
            return np.empty(leaf.shape, np.float32)
        # It is gone with the array.
        with tempfile.TemporaryFile(dir=scratch) as file:
            return np.memmap(file, np.float32, "w+", shape=leaf.shape)

    params: Params = jax.tree.map(empty, built.shapes())
    config = _config_of(workdir, model)
    for piece, value in newest_pieces(config, workdir, build(config.run)):
        fill(params, piece, value)
    return params


def _config_of(workdir: Path, model: ModelConfig) -> Config:
    """Return the config of a run whose parameters this model takes over."""
    from diloco_jax.workdir import read_config

    config = read_config(workdir)
    theirs = dataclasses.replace(config.run.model, weights=model.weights)
    if theirs != model:
        raise ConfigError(
            f"--init run:{workdir}: its model differs, "
            f"{'; '.join(differences(shared_fields(model), shared_fields(theirs)))}; "
            f"start from a run of the same model"
        )
    return config


def read_folder(folder: Path, model: ModelConfig) -> Params:
    """Return the parameters of a folder as `first_pieces` does."""
    if model.factory:
        raise ConfigError(
            f"model.weights = hf:{folder} with model.factory = {model.factory!r}: "
            f"files have the parameters of the bundled transformer alone; load them in "
            f"the factory's init"
        )
    families.require_processor(folder, model)
    wanted = {tensor.name: tensor.shape for tensor in tensor_files.tensors(model)}
    arrays = read_tensors(folder, lambda name: _plain_name(name) in wanted)
    arrays = _decoder(folder, arrays, model)
    for name, shape in wanted.items():
        if name not in arrays:
            raise ConfigError(
                f"{folder} has no tensor {name}, which the model of its config.json "
                f"needs; copy all of its files again"
            )
        if arrays[name].shape != shape:
            raise ConfigError(
                f"{folder}: {name} has shape {arrays[name].shape}, the config.json "
                f"says {shape}; both must be of one model"
            )
    if surplus := sorted(set(arrays) - set(wanted)):
        raise ConfigError(
            f"{folder} has the tensor {surplus[0]} and {len(surplus) - 1} others that "
            f"the model has no place for; its config.json must be that of its weights"
        )
    return tensor_files.views(model, arrays)


def whole(
    pieces: Params, report: Callable[[float], None] = lambda share: None
) -> Params:
    """Return parameters as f32 arrays, with the layers of `first_pieces` stacked.
    report: told the share that is read."""

    total = sum(leaf.size for leaf in jax.tree.leaves(pieces))
    read = 0

    def join(leaf: Any) -> np.ndarray:
        nonlocal read
        array = np.stack(leaf) if isinstance(leaf, list) else np.asarray(leaf)
        array = array.astype(np.float32, copy=False)
        read += array.size
        report(read / total)
        return array

    joined: Params = jax.tree.map(
        join, pieces, is_leaf=lambda value: isinstance(value, list)
    )
    return joined


def _plain_name(name: str) -> str:
    """Return a tensor's name in a model without a picture encoder; files old and new
    name the decoder inside differently."""
    inner = name.replace("model.language_model.", "language_model.model.")
    return inner.removeprefix("language_model.")


def _decoder(
    folder: Path, arrays: dict[str, np.ndarray], model: ModelConfig
) -> dict[str, np.ndarray]:
    """Return the decoder's tensors under their plain names, without those that carry
    nothing: copies of the tied table, and tables of rotations.

    Raises ConfigError if a tied table and its copy differ."""
    inner = ("language_model.", "model.language_model.")
    of_more = any(name.startswith(inner) for name in arrays)
    arrays = {
        _plain_name(name): array
        for name, array in arrays.items()
        if not name.endswith("rotary_emb.inv_freq")
        and (not of_more or name.startswith((*inner, "lm_head.")))
    }
    head = tensor_files.OUTSIDE["unembedding"]
    table = tensor_files.decoder_name(model, tensor_files.OUTSIDE["embedding"])
    if not model.tied_embeddings or head not in arrays:
        return arrays
    copy = arrays.pop(head)
    if not _equal(copy, arrays.setdefault(table, copy)):
        raise ConfigError(
            f"{folder}: {head} and {table} differ, but {CONFIG} says that they are one "
            f"(tie_word_embeddings, whose default is the family's); set it to false, "
            f"or remove the tensor that is not meant"
        )
    return arrays


def _equal(one: np.ndarray, other: np.ndarray, rows: int = 4096) -> bool:
    """Tell if two tables are equal; hold few rows of them in memory."""
    return one.shape == other.shape and all(
        np.array_equal(one[begin : begin + rows], other[begin : begin + rows])
        for begin in range(0, len(one), rows)
    )


ENDPOINT = "HF_ENDPOINT"
"""Variable with the address of another hub, as its own tools read it."""
COMMIT = re.compile("[0-9a-f]{40}")
TIMEOUT_S = 30.0
MOST_SAID = 200
"""Characters of the hub's own message that are shown."""


def pinned(weights: str) -> str:
    """Return weights as `model.weights` has them, a model of the hub with its commit.

    Raises ConfigError, with the command to fetch it by hand, if the hub does not answer
    or has no such model or revision.
    """
    kind, folder = read_init(weights)
    if not folder.startswith(HUB):
        return f"{kind}:{folder}"
    name, revision = _parts(folder)
    if COMMIT.fullmatch(revision):
        return f"{kind}:{folder}"
    try:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get(ENDPOINT))
        found = api.model_info(name, revision=revision or None, timeout=TIMEOUT_S)
    except Exception as error:
        raise ConfigError(_cannot(folder, error)) from error
    return f"{kind}:{HUB}{name}@{found.sha}"


def _downloaded(folder: str, *, arrays: bool) -> Path:
    """Return a folder on this machine with the files of `hf://OWNER/NAME@COMMIT`; fetch
    those that the cache lacks, with a bar on standard error.

    arrays: those files of the weights that `read_tensors` reads, too. Raises
    ConfigError as `pinned` does.
    """
    name, revision = _parts(folder)

    def fetch(wanted: Sequence[str]) -> Path:
        try:
            from huggingface_hub import snapshot_download

            return Path(
                snapshot_download(
                    name,
                    revision=revision or None,
                    allow_patterns=list(wanted),
                    endpoint=os.environ.get(ENDPOINT),
                    etag_timeout=TIMEOUT_S,
                )
            )
        except Exception as error:
            raise ConfigError(_cannot(folder, error)) from error

    found = fetch([CONFIG, INDEX, *BESIDE, *([SINGLE] if arrays else [])])
    # Others may lie beside them: the same weights once more, in another layout.
    if arrays and not (found / SINGLE).is_file() and (found / INDEX).is_file():
        return fetch(
            [glob.escape(file) for file in sorted(set(read_index(found).values()))]
        )
    return found


def _parts(folder: str) -> tuple[str, str]:
    """Return OWNER/NAME and the revision, "" if there is none."""
    name, _, revision = folder.removeprefix(HUB).partition("@")
    return name, revision


def _cannot(folder: str, error: Exception) -> str:
    """Say what went wrong, and how to fetch the model by hand."""
    name, revision = _parts(folder)
    at = f" --revision {revision}" if revision else ""
    here = name.partition("/")[2]
    by_hand = f"`hf download {name}{at} --local-dir {here}` and --init hf:{here}"
    if isinstance(error, ImportError):
        return (
            f"--init hf:{name} needs the package huggingface-hub; pip install "
            f"'diloco-jax[text]', or fetch it on another machine: {by_hand}"
        )
    kind = type(error).__name__
    said = " ".join(str(error).split())[:MOST_SAID]
    where = os.environ.get(ENDPOINT) or "the Hugging Face Hub"
    if kind == "GatedRepoError":
        remedy = "accept its licence there, and `hf auth login` or set HF_TOKEN"
    elif kind == "RevisionNotFoundError":
        remedy = f"{name} has no revision {revision!r}; give a branch, tag or commit"
    elif kind == "RepositoryNotFoundError":
        remedy = (
            f"there is no folder {name} here and no such model there, or it is private "
            f"(`hf auth login`, or set HF_TOKEN); correct the name"
        )
    else:
        remedy = f"repeat the command, or fetch it where there is a network: {by_hand}"
    return f"--init hf:{name}: {where} does not give it ({kind}: {said}); {remedy}"


BLOCK_BYTES = 64 << 20
"""Bytes that are in memory at a time."""
PREFIX, SUFFIX = f"{run_files.SOURCE}.", ".tmp"
"""Beginning and end of a copy's name. A run that begins anew removes such folders."""


@contextlib.contextmanager
def at_hand(
    kind: str, folder: str, *, arrays: bool, scratch: Path | None = None
) -> Iterator[Path]:
    """Yield a source's folder on this machine: itself, that of the hub's cache, or a
    copy if it is in a bucket.

    The copy ends with the block; arrays that are mapped from it stay readable.

    Args:
      kind: "hf" or "run", as in `config.run.INIT_KINDS`.
      arrays: copy the arrays too, not only the small files that describe them.
      scratch: where the copy lies; None = the machine's folder of temporary files.

    Raises:
      ConfigError: no such source there, or it may not be read. Messages about the copy
        name the bucket. StorageAway: the bucket does not answer.
    """
    if not is_bucket(folder):
        yield Path(folder)
        return
    if folder.startswith(HUB):
        here = _downloaded(folder, arrays=arrays)
        try:
            yield here
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(here), folder)) from error
        return
    if scratch is not None:
        for left in scratch.glob(f"{PREFIX}*{SUFFIX}"):  # By a process that was killed.
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(SUFFIX, PREFIX, scratch) as made:
        try:
            _copy(kind, Folder(folder), Path(made), arrays=arrays)
            yield Path(made)
        except ConfigError as error:
            raise ConfigError(str(error).replace(made, folder)) from error


def _copy(kind: str, there: Folder, here: Path, *, arrays: bool) -> None:
    began, total = time.monotonic(), 0
    try:
        for path in _files(kind, there, arrays=arrays):
            target = here / path.relative_to(there)
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, BLOCK_BYTES)
            total += target.stat().st_size
            if arrays:
                seconds = max(time.monotonic() - began, 1e-3)
                logger.info(
                    "copied %s: %.3g GB so far, %.3g MB/s",
                    path,
                    total / 1e9,
                    total / seconds / 1e6,
                )
    except (ConfigError, FileNotFoundError) as error:
        raise ConfigError(
            f"{there} is no source of weights ({error}); give --init "
            f"{kind}:gs://BUCKET/FOLDER, or s3://, of a folder that has config.json"
        ) from error
    except Exception as error:
        # Each bucket backend has its own error classes, and S3's makes OSErrors of
        # them; a full disk is ours.
        files.raise_if_away(there, error)
        if isinstance(error, OSError) and error.errno and error.__cause__ is None:
            raise
        raise ConfigError(files.cannot_read(there, error)) from error


def _files(kind: str, there: Folder, *, arrays: bool) -> Iterator[Folder]:
    """Yield what a source consists of, the files that describe it first."""
    if kind == "run":
        yield there / run_files.CONFIG
        yield there / run_files.FACTS
        kept = there / run_files.SOURCE
        yield from sorted(kept.iterdir()) if kept.is_dir() else ()
        if arrays:
            yield from _newest(there / run_files.CHECKPOINTS / "coordinator")
        return
    names = {path.name for path in there.iterdir()}
    yield there / CONFIG
    yield from (there / name for name in (INDEX, *BESIDE) if name in names)
    if arrays:
        yield from (there / n for n in sorted(names) if n.endswith(".safetensors"))


def _newest(folder: Folder) -> Iterator[Folder]:
    """Yield the newest snapshots of a run, where its workdir has any."""
    states = snapshots.states(folder) if folder.is_dir() else []
    for number in states[-1:]:
        yield snapshots.state_path(folder, number)
        fragments = (path.name for path in folder.iterdir())
        for fragment in sorted(int(name) for name in fragments if name.isdecimal()):
            newest = snapshots.versions(folder, fragment)[-1]
            yield snapshots.fragment_path(folder, fragment, newest)
