"""Write diloco.json, the dashboard for Grafana, with grafana-foundation-sdk.

    python launch/grafana/dashboard.py

Its queries name what docs/prometheus.md lists. Panels that belong together stand in a
row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

TARGET = Path(__file__).with_name("diloco.json")
WHICH = 'instance=~"$instance"'
TRAINS = 'state="training"'
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
WIDTH = 24
"""Columns of Grafana's grid."""


class Query(NamedTuple):
    """A query, and what its curves are called."""

    expr: str
    legend: str = "{{island}}"


class Plot(NamedTuple):
    """One panel."""

    title: str
    unit: str
    """One of Grafana's own, as "s", "bytes", "percentunit"."""
    queries: tuple[Query, ...]
    description: str = ""
    named: bool = False
    """Show the name of the curve, not its value."""


def of(name: str, more: str = "") -> str:
    """Return the selector of a metric, of the coordinators that are chosen."""
    return f"diloco_{name}{{{', '.join(filter(None, (WHICH, more)))}}}"


def rate(name: str) -> str:
    """Return the speed at which a counter grows."""
    return f"rate({of(name)}[$__rate_interval])"


FIGURES = (
    Plot(
        "Progress",
        "percentunit",
        (Query(f"{of('run_tokens')} / {of('run_tokens_wanted')}", ""),),
    ),
    Plot(
        "Time left",
        "s",
        (
            Query(
                f"({of('run_tokens_wanted')} - {of('run_tokens')}) / "
                f"(deriv({of('run_tokens')}[15m]) > 0)",
                "",
            ),
        ),
        "At the speed of the last 15 minutes.",
    ),
    Plot("Goodput", "percentunit", (Query(of("run_goodput_ratio"), ""),)),
    Plot(
        "Islands that train",
        "none",
        (Query(f"count({of('island_state', TRAINS)})", ""),),
    ),
    Plot(
        "Alerts, last hour", "none", (Query(f"increase({of('alerts_total')}[1h])", ""),)
    ),
    Plot(
        "Phase",
        "none",
        (Query(f"{of('run_phase')} == 1", "{{phase}}"),),
        named=True,
    ),
)
ROWS: dict[str, tuple[Plot, ...]] = {
    "What is learnt": (
        Plot("Loss of islands, nats per token", "none", (Query(of("island_loss")),)),
        Plot(
            "Validation loss, nats per token",
            "none",
            (
                Query(of("merged_model_loss"), "merged model"),
                Query(of("island_eval_loss")),
            ),
            "The merged model with placement.watch_every, islands' own parameters with "
            "placement.evaluate_every_steps.",
        ),
        Plot(
            "Cosine between deltas",
            "none",
            (Query(of("merge_cosine"), "last merge"),),
            "0: islands pull in unrelated directions. 1: in the same one.",
        ),
        Plot("Learning rate", "none", (Query(of("island_learning_rate")),)),
    ),
    "Who computes, and what becomes of it": (
        Plot("Tokens per second", "none", (Query(of("island_tokens_per_second")),)),
        Plot(
            "Islands by state",
            "none",
            (Query(f"count by (state) ({of('island_state')})", "{{state}}"),),
        ),
        Plot(
            "Tokens, merged and lost",
            "none",
            (
                Query(of("run_tokens_merged"), "merged"),
                Query(of("run_tokens_lost"), "lost: {{reason}}"),
            ),
        ),
        Plot(
            "Participation",
            "percentunit",
            (Query(of("island_participation_ratio")),),
            "Part of the merges during an island's training that it was in.",
        ),
        Plot("Time of a step", "s", (Query(of("island_step_seconds")),)),
        Plot(
            "Time outside steps",
            "percentunit",
            (Query(rate("island_stalled_seconds_total")),),
        ),
        Plot(
            "Steps that changed nothing",
            "none",
            (Query(f"increase({of('island_skipped_steps_total')}[10m])"),),
            "Their loss or gradient was not finite.",
        ),
        Plot("Silence", "s", (Query(of("island_silent_seconds")),)),
    ),
    "Merges and bandwidth": (
        Plot("Merges per second", "none", (Query(rate("run_merges_total"), "merges"),)),
        Plot("Time of a merge", "s", (Query(of("merge_seconds"), "last merge"),)),
        Plot(
            "Islands in a merge",
            "none",
            (Query(of("merge_islands"), "last merge"),),
        ),
        Plot(
            "Lag of the most outdated fragment, versions",
            "none",
            (Query(of("island_lag_versions")),),
        ),
        Plot("Deltas up", "Bps", (Query(rate("island_sent_bytes_total")),)),
        Plot("Publishes down", "Bps", (Query(rate("island_received_bytes_total")),)),
    ),
    "The coordinator": (
        Plot(
            "Memory",
            "bytes",
            (
                Query(of("coordinator_memory_bytes"), "lead"),
                Query(of("worker_memory_bytes"), "worker {{worker}}, at most"),
                Query(of("machine_memory_left_bytes"), "left on the machine"),
            ),
        ),
        Plot(
            "Disk free", "bytes", (Query(of("machine_disk_free_bytes"), "{{folder}}"),)
        ),
        Plot(
            "CPU of the lead, cores",
            "none",
            (
                Query(
                    f"rate(process_cpu_seconds_total{{{WHICH}}}[$__rate_interval])",
                    "lead",
                ),
            ),
        ),
        Plot(
            "Decisions that wait",
            "none",
            (Query(of("coordinator_events_waiting"), "events"),),
        ),
        Plot(
            "Workers that serve", "none", (Query(f"sum({of('worker_up')})", "workers"),)
        ),
    ),
}


def made() -> dict[str, Any]:
    """Return the dashboard as Grafana reads it."""
    board = (
        dashboard.Dashboard("Decoupled DiLoCo")
        .uid("diloco-run")
        .tags(["diloco"])
        .description("A run of diloco_jax, from its coordinator's metrics port.")
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource")
            .type("prometheus")
            .label("Source")
        )
        .with_variable(
            dashboard.QueryVariable("instance")
            .label("Coordinator")
            .datasource(SOURCE)
            .query("label_values(diloco_run_info, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(text="All", value="$__all"))
        )
    )
    for plot in FIGURES:
        panel = stat.Panel().height(4).span(WIDTH // len(FIGURES))
        panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        panel.text_mode(BigValueTextMode.NAME if plot.named else BigValueTextMode.VALUE)
        board.with_panel(_filled(panel, plot))
    for title, plots in ROWS.items():
        board.with_row(dashboard.Row(title))
        for plot in plots:
            panel = timeseries.Panel().height(8).span(WIDTH // 3).fill_opacity(0)
            panel.legend(
                common.VizLegendOptions()
                .show_legend(True)
                .display_mode(LegendDisplayMode.LIST)
                .placement(LegendPlacement.BOTTOM)
                .calcs([])
            )
            board.with_panel(_filled(panel, plot))
    found: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    return found


def _filled(panel: Any, plot: Plot) -> Any:
    panel.title(plot.title).unit(plot.unit).datasource(SOURCE)
    if plot.description:
        panel.description(plot.description)
    for number, query in enumerate(plot.queries):
        panel.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
    return panel


if __name__ == "__main__":
    TARGET.write_text(f"{json.dumps(made(), indent=1, sort_keys=True)}\n")
