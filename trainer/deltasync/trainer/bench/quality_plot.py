"""The plot of quality against bytes."""

from pathlib import Path
from typing import Any

from deltasync.core.errors import NotFound


def draw(streams: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw AUC over bytes sent, a panel for each stream, into a PNG.

    Raises:
        NotFound: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NotFound(
            "the plot needs matplotlib: run `make install`, or pip install 'deltasync[bench]'"
        ) from error
    figure = Figure(figsize=(6.5 * len(streams), 4.5), layout="constrained")
    panels = figure.subplots(1, len(streams), squeeze=False)[0]
    for panel, (name, figures) in zip(panels, streams.items(), strict=True):
        _panel(panel, name, figures)
    figure.savefig(file, dpi=120)


def _panel(panel: Any, name: str, figures: dict[str, Any]) -> None:
    for line in figures["lines"]:
        panel.plot(line["bytes"] / 1e6, line["auc"], "o", label=line["policy"])
    panel.axvline(figures["full_push_bytes"] / 1e6, linestyle=":", color="gray", label="bytes of full pushes")
    for key, text in {"trainer_auc": "trainer", "frozen_auc": "frozen at half time"}.items():
        panel.axhline(figures[key], linestyle="--", color="gray", linewidth=1)
        panel.text(0.01, figures[key], text, transform=panel.get_yaxis_transform(), va="bottom", fontsize=9)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.legend(loc="center", fontsize=9)
    panel.set(title=f"{name}: quality against bytes", xlabel="MB sent to a replica", ylabel="AUC")
