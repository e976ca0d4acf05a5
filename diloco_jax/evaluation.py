"""`diloco eval`: the loss of a run's global parameters on all validation text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
from etils import epath
from etils.epath import Path as Folder

from diloco_jax import checkpoint, files, run_files
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator import snapshots
from diloco_jax.coordinator.holding import fragment_snapshots
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.fragments import FragmentPlan, Params, Piece, from_pieces
from diloco_jax.data.loading import Data, load_data
from diloco_jax.data.reader import ValidationBatches
from diloco_jax.data.source import Source
from diloco_jax.files import json_number
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.loop import Evaluation, evaluate_all
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.model import Model
from diloco_jax.protocol.messages import Version
from diloco_jax.workdir import read_config

BATCH_SIZE = 32
COPY = "copy the workdir again"


def run(
    config: Config,
    workdir: Path,
    cycle: int | None = None,
    report: Callable[[float], None] = lambda share: None,
    reading: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Return `eval_loss` (nats per token) and `eval_bits_per_byte` of the newest
    snapshot or of a kept cycle, and the `eval_tokens` and `eval_merges` in its
    parameters.

    report: told the share of the text that is evaluated; reading: that of the
    parameters that is read.

    Raises ConfigError if the workdir has no snapshot, or does not keep the cycle.
    """
    model, trainer = build_trainer(config.run, IslandConfig(batch_size=BATCH_SIZE))
    params, facts = params_of(config, workdir, model, cycle, reading)
    found = whole_validation(config, trainer, trainer.place_params(params), report)
    return {
        **as_json(found),
        "eval_tokens": facts["tokens"],
        "eval_merges": facts["merges"],
    }


def load_params(
    workdir: str | Path, cycle: int | None = None, *, trust_code: bool = False
) -> Params:
    """Return the global parameters of a run's newest snapshot, or of a kept cycle: a
    nested dict of f32 arrays, as the model's `init` makes it (layers stacked on a
    leading axis).

    trust_code: execute code that the run's config names, whoever wrote it.

    Raises:
      ConfigError: the workdir has no snapshot, or does not keep the cycle; its model
        cannot be built, or is not the one that was trained; or its config names code
        and another user wrote it.
    """
    config = read_config(Path(workdir), trust_code=trust_code)
    return params_of(config, Path(workdir), build(config.run), cycle)[0]


def whole_validation(
    config: Config,
    trainer: Trainer,
    params: Params,
    report: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Evaluate on the whole validation split, every token predicted once.

    Raises ConfigError if the data here is not the run's.
    """
    data = load_data(config.run)
    return of_data(data, config.run.sequence_length, trainer, params, report)


def of_data(
    data: Data,
    sequence_length: int,
    trainer: Trainer,
    params: Params,
    report: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Evaluate on all that is held out, and on each source of a mixture."""

    def batches(source: Source) -> ValidationBatches:
        return ValidationBatches(
            source,
            trainer.batch_size,
            trainer.fields,
            sequence_length,
            bytes_per_token=data.bytes_per_token,
        )

    held_out = data.held_out or {"": data.validation}
    parts = {name: batches(source) for name, source in held_out.items()}
    found = evaluate_all(trainer, params, parts, report)
    return found if data.held_out else found._replace(by_source=None)


def params_of(
    config: Config,
    workdir: Path,
    model: Model,
    cycle: int | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> tuple[Params, Mapping[str, Any]]:
    """Return theta of a run's newest snapshot, or of a kept cycle, and its facts.
    report: told the share that is read."""
    plan = build_plan(config.run, model)
    if cycle is None:
        _, facts = newest_plan(config, workdir, model)
        found = newest_pieces(config, workdir, model)
    else:
        facts = kept_facts(workdir, cycle)
        found = kept_pieces(config, workdir, model, cycle)
    arrays, read = {}, 0
    for piece, value in found:
        arrays[piece.name] = value
        read += value.size
        report(read / plan.total)
    return from_pieces(plan, arrays), facts


def newest_pieces(
    config: Config, workdir: Path, model: Model
) -> Iterator[tuple[Piece, npt.NDArray[Any]]]:
    """Yield the pieces of theta of a run's newest snapshot, a fragment at a time.

    Raises ConfigError, before the first one, if there is no snapshot, or if the run is
    over and a fragment is not as it was at the end."""
    plan, facts = newest_plan(config, workdir, model)
    folder = checkpoint.snapshots_folder(config.placement, workdir)
    store = Store(config.run, plan, None, pin_s=0.0)
    found = [snapshots.versions(folder, f) for f in range(len(plan.fragments))]
    if lacking := [fragment for fragment, versions in enumerate(found) if not versions]:
        raise ConfigError(
            f"{folder} has no snapshot of fragments {lacking}: workers on other "
            f"machines have them until the run ends, or the worker that held them lost "
            f"its disk, and the run ended before an island gave them back; give a kept "
            f"cycle, or another copy of the workdir"
        )
    # A replay that was saved has no state of a coordinator.
    state = facts.get("state", {"phase": "", "fragments": ()})
    versions = [Version(*of_fragment["version"]) for of_fragment in state["fragments"]]
    cycles = fragment_snapshots.describe_cycles(
        fragment_snapshots.cycle_numbers(workdir / run_files.KEPT)
    )
    for fragment, last in enumerate(versions):
        newest = found[fragment][-1]
        if state["phase"] == "done" and newest < last:
            raise ConfigError(
                f"{folder} has version {tuple(newest)} of fragment {fragment}, and the "
                f"run ended with {tuple(last)}: start the coordinator again, which "
                f"fetches it if the worker that held it has it; or give a kept cycle "
                f"(there are: {cycles}), or bring "
                f"{snapshots.fragment_path(folder, fragment, last)} back from another "
                f"copy of the workdir"
            )
    for fragment, of_fragment in enumerate(plan.fragments):
        path = snapshots.fragment_path(folder, fragment, found[fragment][-1])
        yield from _pieces(path, of_fragment, store.room(fragment))


def kept_pieces(
    config: Config, workdir: Path, model: Model, cycle: int
) -> Iterator[tuple[Piece, npt.NDArray[Any]]]:
    """Yield the pieces of theta of a cycle that was kept in a workdir, a fragment at a
    time.

    Raises ConfigError, before the first one, if it is not kept there."""
    plan = build_plan(config.run, model)
    folder = kept_folder(workdir, cycle)
    checkpoint.refuse_other_model(
        epath.Path(folder), cycle, kept_facts(workdir, cycle), plan.digest()
    )
    store = Store(config.run, plan, None, pin_s=0.0)
    for fragment, of_fragment in enumerate(plan.fragments):
        path = folder / fragment_snapshots.kept_name(fragment)
        room = {"theta": store.room(fragment)["theta"]}
        yield from _pieces(path, of_fragment, room)


def _pieces(
    path: Folder | Path, pieces: Sequence[Piece], arrays: Mapping[str, list[Any]]
) -> Iterator[tuple[Piece, npt.NDArray[Any]]]:
    """Read a fragment's file into these arrays; yield the pieces of theta."""
    try:
        files.read_sealed(path, snapshots.flat(arrays))
    except files.SealedError as error:
        raise files.SealedError(f"{error}; {COPY}") from error
    for piece, value in zip(pieces, arrays["theta"], strict=True):
        yield piece, piece.grid.from_tiles(value)


def kept_folder(workdir: Path, cycle: int) -> Path:
    """Return the folder of a kept cycle; raise ConfigError if it is not kept."""
    folder = workdir / run_files.KEPT
    if cycle not in (found := fragment_snapshots.cycle_numbers(folder)):
        raise ConfigError(
            f"--cycle {cycle}: {workdir} does not keep it; kept are "
            f"{fragment_snapshots.describe_cycles(found)}. placement.export_every "
            f"keeps cycles, and `diloco export HOST:PORT` keeps the present one of a "
            f"run that goes on"
        )
    return fragment_snapshots.cycle_path(folder, cycle)


def kept_facts(workdir: Path, cycle: int) -> Mapping[str, Any]:
    """Return the facts of a kept cycle: its run and model, merges and tokens."""
    path = kept_folder(workdir, cycle) / fragment_snapshots.CYCLE_FACTS
    try:
        facts: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); copy it again") from error
    return facts


def newest_plan(
    config: Config, workdir: Path, model: Model
) -> tuple[FragmentPlan, Mapping[str, Any]]:
    """Return the plan of the model's fragments, and the newest snapshot's facts."""
    folder = checkpoint.snapshots_folder(config.placement, workdir)
    plan = build_plan(config.run, model)
    found = snapshots.states(folder) if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder} has no snapshot; give the workdir of a run")
    try:
        facts = files.read_sealed_header(snapshots.state_path(folder, found[-1]))
    except files.SealedError as error:
        raise files.SealedError(f"{error}; {COPY}") from error
    checkpoint.refuse_other_model(folder, found[-1], facts, plan.digest())
    return plan, facts


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return the fields of `summary.json`; null where they are not finite."""
    found: dict[str, Any] = {
        "eval_loss": json_number(evaluation.loss),
        "eval_bits_per_byte": json_number(evaluation.bits_per_byte),
    }
    if evaluation.by_source is not None:
        found["eval_loss_by_source"] = {
            name: json_number(loss) for name, loss in evaluation.by_source.items()
        }
    return found
