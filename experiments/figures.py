"""Figures of a result as PNG files, in one style; matplotlib is the optional extra ``jaxmeth[viz]``."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmeth.train.files import write_atomically

STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e5e7eb",
    "axes.edgecolor": "#6b7280",
    "axes.labelcolor": "#374151",
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
# Okabe and Ito's palette: told apart with any colour vision.
PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000"]
MISSING = "figures not drawn: matplotlib is missing, install the extra jaxmeth[viz]"


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def save(figures: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw each figure into ``folder/figures/<name>.png``; returns the paths relative to ``folder``."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    written = []
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=PALETTE)}):
        for name, drawn in figures.items():
            figure = drawn
            if not isinstance(drawn, Figure):
                figure = Figure(figsize=(7, 4.2), layout="constrained")
                drawn(figure)
            path = folder / "figures" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=160)
            write_atomically(path, lambda file, png=png: file.write(png.getvalue()))
            written.append(f"figures/{name}.png")
    return written
