"""Advice on a config that does not fit, or whose parts do not suit each other."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_jax.config import Config, IslandConfig, SyncConfig
from diloco_jax.core.codecs import CODECS
from diloco_jax.core.codecs.codec import Codec
from diloco_jax.planning.goodput import LATENCY_S
from diloco_jax.planning.results import PlannedIsland, RunPlan

TILE = 1 << 14
"""Elements of a tile of a large tensor."""
UNBALANCED = 1.15
"""Ratio of the longest step to the shortest from which advice is given."""
GB = 1e9


def advise(
    config: Config, islands: dict[str, PlannedIsland], run: RunPlan
) -> list[str]:
    """Return sentences of advice, each with the field to change."""
    return [
        *(
            line
            for name, island in islands.items()
            for line in _to_fit(name, config.islands[name], island)
        ),
        *(
            line
            for name, island in islands.items()
            for line in _to_run_well(name, config.islands[name], island)
        ),
        *_to_balance(config, islands),
        *_to_carry(config.run.sync, islands, run),
    ]


def _to_fit(name: str, config: IslandConfig, island: PlannedIsland) -> Iterator[str]:
    hbm = island.compiled.hbm
    if island.compiled.fits:
        return
    where = f"islands.{name}"
    short = f"{where} lacks {hbm.missing / GB:.2f} GB of HBM per chip"
    if config.remat != "full":
        yield (
            f"{short}: set remat = 'full', now {config.remat!r}; the backward pass "
            f"then computes a layer's activations again"
        )
    sequences = config.batch_size // config.batch_multiple
    if sequences > 1:
        factor = _smallest_factor(sequences)
        yield (
            f"{short}: set accumulation = {config.accumulation * factor}, now "
            f"{config.accumulation}; activations take 1/{factor} of their memory"
        )
    if config.mesh_data > 1:
        state = hbm.parameters + hbm.optimizer
        saved = state * (1 - 1 / config.mesh_data)
        yield (
            f"{short}: set mesh_fsdp = {config.mesh_fsdp * config.mesh_data} and "
            f"mesh_data = 1, now {config.mesh_fsdp} and {config.mesh_data}; parameters "
            f"and optimizer take {saved / GB:.2f} GB less"
        )
    exchange = hbm.anchors + hbm.residuals + hbm.open_takes
    if config.anchor_memory == "device":
        yield (
            f"{short}: set anchor_memory = 'pinned_host'; anchors, residuals and open "
            f"takes, {exchange / GB:.2f} GB, then lie in the host's memory"
        )
    if config.batch_size > config.batch_multiple:
        yield f"{short}: lower batch_size, now {config.batch_size}"
    if config.batch_size == config.batch_multiple and config.mesh_data == 1:
        yield f"{short}: choose a larger topology than {island.compiled.topology}"


def _to_run_well(
    name: str, config: IslandConfig, island: PlannedIsland
) -> Iterator[str]:
    compiled, where = island.compiled, f"islands.{name}"
    roofline = compiled.roofline
    if not compiled.fits or island.step_seconds > roofline.step_seconds:
        return
    if roofline.binding == "ici":
        yield (
            f"{where} is bound by its links ({roofline.ici_seconds:.3g} s of "
            f"collectives, {roofline.compute_seconds:.3g} s of compute per step): "
            f"raise batch_size, now {config.batch_size}, so that each gathered weight "
            f"is used more"
        )
    if roofline.binding == "hbm":
        yield (
            f"{where} is bound by HBM ({roofline.hbm_seconds:.3g} s of traffic, "
            f"{roofline.compute_seconds:.3g} s of compute per step): raise batch_size, "
            f"now {config.batch_size}"
        )


def _to_balance(config: Config, islands: dict[str, PlannedIsland]) -> Iterator[str]:
    """Suggest batches with which every step would take as long as the shortest one."""
    times = {name: island.step_seconds for name, island in islands.items()}
    fastest = min(times, key=lambda name: times[name])
    for name, seconds in times.items():
        own = config.islands[name]
        if seconds <= UNBALANCED * times[fastest] or own.step_seconds >= seconds:
            continue
        wanted = own.batch_size * times[fastest] / seconds
        batch = round(wanted / own.batch_multiple) * own.batch_multiple
        how = f"lower islands.{name}.batch_size from {own.batch_size} to {batch}"
        if not 0 < batch < own.batch_size:
            quick = config.islands[fastest]
            raised = quick.batch_size * seconds / times[fastest]
            batch = round(raised / quick.batch_multiple) * quick.batch_multiple
            how = (
                f"raise islands.{fastest}.batch_size from {quick.batch_size} to {batch}"
            )
        yield (
            f"a step of {name} takes {seconds:.3g} s, one of {fastest} "
            f"{times[fastest]:.3g} s; for steps of equal length {how}"
        )


def _to_carry(
    sync: SyncConfig, islands: dict[str, PlannedIsland], run: RunPlan
) -> Iterator[str]:
    round_trip = 2 * LATENCY_S
    if run.cycle_seconds < 2 * round_trip:
        cycle = int(2 * round_trip / run.pacing_step_seconds) + 1
        yield (
            f"a cycle of {run.cycle_seconds:.2g} s is shorter than two round trips of "
            f"{round_trip:g} s, so that little is merged in time: raise "
            f"sync.steps_per_cycle from {sync.steps_per_cycle} to {cycle}"
        )
    link = run.goodput.assumptions.link_gbit_per_s
    means = {
        name: max(island.network.up.mean, island.network.down.mean)
        for name, island in islands.items()
    }
    peaks = {
        name: max(island.network.up.peak, island.network.down.peak)
        for name, island in islands.items()
    }
    busiest = max(peaks, key=lambda name: peaks[name])
    if peaks[busiest] > link >= means[busiest]:
        overlap = int(max(1, sync.overlap_steps) * peaks[busiest] / link) + 1
        longer = f"raise sync.overlap_steps from {sync.overlap_steps} to {overlap}"
        if overlap >= sync.steps_per_cycle:
            longer = f"raise sync.steps_per_cycle from {sync.steps_per_cycle}"
        yield (
            f"islands.{busiest} needs {peaks[busiest]:.3g} Gbit/s while the largest "
            f"fragment is under way, its link has {link:g}, so that this fragment is "
            f"adopted late: {longer}{_smaller_codec(sync)}"
        )


def _smaller_codec(sync: SyncConfig) -> str:
    options = [
        f"sync.{field} = '{smaller}'"
        for field in ("codec_up", "codec_down")
        if (smaller := _next_smaller(getattr(sync, field)))
    ]
    return f", or set {' and '.join(options)}" if options else ""


def _next_smaller(codec: str) -> str:
    """Return the largest codec of the table that makes fewer bytes, or ""."""
    sizes = {name: Codec(name).tile_bytes(TILE) for name in (*CODECS.table, codec)}
    smaller = [name for name in sizes if sizes[name] < sizes[codec]]
    return max(smaller, key=lambda name: sizes[name], default="")


def _smallest_factor(number: int) -> int:
    return next(f for f in range(2, number + 1) if number % f == 0)
