"""How figures look and how they are written. Importing this needs matplotlib."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engines import BenchmarkError

try:
    import matplotlib
except ImportError:
    raise BenchmarkError("plots need matplotlib: pip install 'jaxspec-llm[bench]'") from None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: small files, and words that can be found
    "svg.hashsalt": "jaxspec",  # the same figure is the same file
}


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, drawn without a display."""
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes the file that the name's ending says: .svg, .png or .pdf."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def svg_text(figure: "Figure") -> str:
    """The figure as an <svg> element that can stand in a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
