"""Files of other projects that pages of ours need: unchanged, with their licences beside them. Data only."""

from __future__ import annotations

from importlib.resources import files


def read_vendored(path: str) -> str:
    """The text of a file by its path in this folder, such as ``uplot/uPlot.min.css``."""
    return files("lockstep.vendored").joinpath(path).read_text(encoding="utf-8")
