"""Emulations of several settings with several seeds, compared pair by pair.

Chance moves a small run by a percent and more, so one seed of each setting tells
little. Runs of one seed begin with the same parameters and read the same data, so the
differences seed by seed spread less than the losses do.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.history import Over, plot_losses
from diloco_jax.observability.terminal import bar
from diloco_jax.simulation.emulate import Emulation, check, emulate
from diloco_jax.simulation.emulation_options import EmulationOptions, options_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

EVALUATIONS = 20
"""Evaluations of the merged model in a run of a sweep, unless the options say."""
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Results of `sweep`; docs/python.md has an example."""

    seeds: tuple[int, ...]
    runs: Mapping[str, tuple[Emulation, ...]]
    """Emulations by setting, one per seed."""

    def table(self) -> pandas.DataFrame:
        """Return a row for each setting, in their order.

        Columns: loss (validation, nats per token, mean over seeds), over_first (percent
        of the first setting's loss, mean over pairs of one seed), half (of its 95 %
        interval by Student's t; NaN for one seed), runs, before_flush (loss before
        the last merges, on `placement.evaluate_batches` batches as a plot has it),
        merges, goodput and seconds (virtual; means).
        """
        import pandas

        losses = {
            label: [run.summary["eval_loss"] for run in runs]
            for label, runs in self.runs.items()
        }
        first = next(iter(losses.values()))
        rows = {}
        for label, runs in self.runs.items():
            over = [
                100 * (own / base - 1)
                for own, base in zip(losses[label], first, strict=True)
            ]
            rows[label] = {
                "loss": statistics.fmean(losses[label]),
                "over_first": statistics.fmean(over),
                "half": half_interval(over),
                "runs": len(runs),
                "before_flush": statistics.fmean(
                    float(run.history.evaluations["loss"][-2:][0]) for run in runs
                ),
                **{
                    column: statistics.fmean(run.summary[key] for run in runs)
                    for column, key in COLUMNS.items()
                },
            }
        return pandas.DataFrame.from_dict(rows, orient="index")

    def plot_loss(
        self,
        *,
        over: Over = "tokens",
        title: str | None = None,
        axes: Axes | None = None,
    ) -> Axes:
        """Draw the merged model's validation loss; as `plot_losses`, but titled by what
        the table tells apart from the first setting."""
        histories = {
            label: [run.history for run in runs] for label, runs in self.runs.items()
        }
        title = title or f"{self._finding()}; dotted: the flush"
        return plot_losses(histories, over=over, title=title, axes=axes)

    def _finding(self) -> str:
        """Say which settings end apart from the first, by their intervals."""
        table, (first, *others) = self.table(), self.runs
        over, count = table.over_first, len(self.seeds)
        apart = [name for name in others if abs(over[name]) > table.half[name]]
        if not others:
            return f"{first} ends at {table.loss[first]:.3f}"
        if not apart:
            seeds = f"{count} seed{'s' * (count > 1)}"
            return f"{seeds}: no setting ends apart from {first}"
        if len(apart) > 2:
            return f"{len(apart)} of {len(others)} settings end apart from {first}"
        ways = (
            f"{abs(over[n]):.1f} % {'above' if over[n] > 0 else 'below'}" for n in apart
        )
        named = zip(apart, ways, strict=True)
        return "; ".join(f"{name} ends {way} {first}" for name, way in named)

    def _repr_html_(self) -> str:
        shown = self.table().round({"loss": 4, "over_first": 2, "half": 2})
        return str(shown.to_html(float_format=lambda number: f"{number:g}"))


COLUMNS = {"merges": "merges", "goodput": "goodput", "seconds": "wall_seconds"}
"""Key in a run's summary of each column that is a mean."""


def sweep(
    config: Config,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Iterable[int] = range(3),
    options: EmulationOptions | None = None,
) -> Sweep:
    """Emulate each setting with each seed. A bar on standard error shows how far it is.

    Args:
      config: what the settings have in common.
      settings: by label, the fields that differ, as `Config.replace` takes them; {} for
        the config as it is. The first one is what the others are compared with.
      seeds: of parameters and data; one run of each setting for each of them.
      options: as for `emulate`; without `evaluate_every_tokens` the merged model is
        evaluated 20 times a run, and after its last merge.

    Raises:
      ConfigError: naming the setting, field, values and remedy; mostly before any run.
    """
    options = options_of(options)
    if not isinstance(settings, Mapping) or not all(
        isinstance(fields, Mapping) for fields in settings.values()
    ):
        raise ConfigError(
            f"settings = {settings!r}; give a dict with the fields of each label, as "
            f"in {{'K = 2': {{}}, 'K = 1': {{'sync.quorum': 1}}}}"
        )
    if not isinstance(seeds, Iterable):
        raise ConfigError(f"seeds = {seeds!r}; give each of them, as in range(3)")
    seeds = tuple(seeds)
    if not settings or not seeds:
        raise ConfigError(
            f"settings has {len(settings)} entries and seeds has {len(seeds)}; a sweep "
            f"needs one of each at least"
        )
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds = {seeds}: one comes twice, and is no second run")
    if not options.evaluate_every_tokens:
        every = max(1, config.run.total_tokens // EVALUATIONS)
        options = dataclasses.replace(options, evaluate_every_tokens=every)
    configs = {}
    for label, fields in settings.items():
        if own := {"seed", "run.seed"} & {*fields}:
            raise ConfigError(
                f"setting {label!r} has {own.pop()!r}; give seeds = (...), with which "
                f"each setting runs"
            )
        try:
            configs[label] = config.replace(fields)
            for seed in seeds:
                check(configs[label].replace("seed", seed), options)
            resolved = resolve(configs[label]).run
            build_plan(resolved, build(resolved))
        except ConfigError as error:
            raise ConfigError(f"setting {label!r}: {error}") from error
    runs: dict[str, list[Emulation]] = {label: [] for label in configs}
    with bar(Console(stderr=True), "sweep") as show:
        for done, seed in enumerate(seeds):
            for number, (label, one) in enumerate(configs.items()):
                show((done * len(configs) + number) / (len(seeds) * len(configs)))
                try:
                    run = emulate(one.replace("seed", seed), options=options)
                except ConfigError as error:
                    raise ConfigError(f"setting {label!r}: {error}") from error
                runs[label].append(run)
    return Sweep(seeds=seeds, runs={label: tuple(own) for label, own in runs.items()})


def half_interval(values: list[float]) -> float:
    """Return half of the 95 % interval of a mean, by Student's t; NaN for one value."""
    if len(values) < 2:
        return float("nan")
    from scipy import stats

    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
