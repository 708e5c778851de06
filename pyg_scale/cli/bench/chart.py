"""One picture of a loader benchmark: batches per second, ours beside PyG's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyg_scale.cli.bench import report

_OURS = ("#9cc3e6", "#4a90c9", "#1b5e96")
_PYG, _STATED, _LIMIT, _INK = "#b9b9b9", "#ffffff", "#c2542d", "#2b2b2b"


def draw(found: Mapping[str, Any], path: str) -> None:
    """Draw the loader's (and sampler's) rates of every graph form as bars into a PNG.

    Raises:
        SystemExit: If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib: pip install matplotlib ({error})") from error

    panels = [
        (group, title)
        for group, title in (("loader", "Loader"), ("sampler", "Sampling only"))
        if any(c["group"] == group and c["rates"] for c in found["cases"])
    ]
    bars = {group: _bars(found, group) for group, _ in panels}
    heights = [len(bars[group]) + 1.2 for group, _ in panels]
    figure = Figure(figsize=(9, 1.5 + 0.30 * sum(heights)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (group, title) in zip(axes, panels):
        _panel(axis, bars[group], title)
        if group == "loader":
            _limit(axis, found)
    axes[-1].set_xlabel("batches per second (median; line from the lowest to the highest round)")
    figure.suptitle(_caption(found), x=0.01, ha="left", fontsize=9, color=_INK)
    figure.savefig(path, facecolor="white")


def _bars(found: Mapping[str, Any], group: str) -> list[dict[str, Any]]:
    bars = []
    for case in found["cases"]:
        if case["group"] == group and case["rates"]:
            ours = case["side"] == "pyg_scale"
            shade = _OURS[min(case["workers"] or 0, 2)] if group == "loader" else _OURS[2]
            bars.append(
                {
                    "label": f"{case['label']}  ({case['variant']})",
                    "rate": case["batches_per_s"],
                    "low": case["batches_per_s_low"],
                    "high": case["batches_per_s_high"],
                    "color": shade if ours else _PYG,
                    "ours": ours,
                }
            )
    if report.stated_applies(found):
        bars += [
            {
                "label": f"{label}  (stated, not this run)",
                "rate": rate,
                "low": rate,
                "high": rate,
                "color": _STATED,
                "ours": False,
            }
            for stated, label, rate in report.STATED["rows"]
            if stated == group
        ]
    return bars


def _panel(axis: Any, bars: list[dict[str, Any]], title: str) -> None:
    rows = range(len(bars))
    axis.barh(
        rows,
        [b["rate"] for b in bars],
        color=[b["color"] for b in bars],
        height=0.72,
        zorder=2,
        edgecolor=["#8a8a8a" if b["color"] == _STATED else b["color"] for b in bars],
        hatch=["////" if b["color"] == _STATED else "" for b in bars],
        linewidth=0.6,
    )
    top = max(b["high"] for b in bars)
    for row, bar in zip(rows, bars):
        axis.plot([bar["low"], bar["high"]], [row, row], color=_INK, linewidth=1.1, zorder=3)
        axis.text(
            bar["high"] + top * 0.012,
            row,
            f"{bar['rate']:.1f}",
            va="center",
            fontsize=8,
            color=_INK,
            fontweight="bold" if bar["ours"] else "normal",
        )
    axis.set_yticks(rows, [b["label"] for b in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, top * 1.12)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", color=_INK)
    axis.grid(axis="x", color="#e4e4e4", zorder=0)
    axis.tick_params(length=0, colors=_INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _limit(axis: Any, found: Mapping[str, Any]) -> None:
    rates = [c["batches_per_s"] for c in found["cases"] if c["group"] == "limit" and c["rates"]]
    if rates:
        limit = max(rates)
        axis.axvline(limit, color=_LIMIT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
        axis.set_xlim(0, max(axis.get_xlim()[1], limit * 1.12))
        axis.annotate(
            f"limit {limit:.1f}: sampling and a plain copy",
            (limit, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            ha="right",
            textcoords="offset points",
            fontsize=7.5,
            color=_LIMIT,
        )


def _caption(found: Mapping[str, Any]) -> str:
    graph, settings, env = found["graph"], found["settings"], found["environment"]
    loud = "" if env["quiet"] else "   NOT A QUIET MACHINE"
    return (
        f"pyg-scale bench {found['benchmark']}: {graph['nodes'] / 1e6:.2g} M nodes, "
        f"{graph['edges'] / 1e6:.3g} M directed edges, {graph['features']} features, "
        f"batch {settings['batch_size']}, {settings['num_neighbors']}\n"
        f"{env['cpu']}, {env['cpus']} CPUs, torch {env['versions']['torch']}, "
        f"commit {env['commit'] or 'unknown'}{loud}"
    )
