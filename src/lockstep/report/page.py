"""Writer of documents as self-contained HTML files, with their data, scripts and style.

The template escapes texts, and `_json_for_script` escapes data. A page's content security policy forbids network access
and all scripts except its own, which the policy lists by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from lockstep.report.document import (
    Chart,
    Column,
    Document,
    Number,
    Scatter,
    Section,
    Table,
    Tables,
    Timeline,
    cell_text,
)
from lockstep.report.plot import to_svg
from lockstep.shown import printable
from lockstep.vendored import read_vendored
from lockstep.version import __version__

_PLOTS, _PLOT_STYLE = "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"
"""Third-party files that pages with a timeline include."""


def to_html(document: Document) -> str:
    """The document as an HTML page. Equal documents give equal pages."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    data = {type(block).__name__.lower(): chart for block, chart in _charts(document)}
    has_plots = "timeline" in data
    style = (read_vendored(_PLOT_STYLE) if has_plots else "") + page_style()
    sources = [read_vendored(_PLOTS)] if has_plots else []
    sources += [_asset(f"{name}.js") for name in data]
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        loader=FunctionLoader(_asset),
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "drawing": lambda plot: Markup(to_svg(plot)),
        "text": cell_text,
        "css_class": _css_class,
        "kind": _kind,
    }
    # Only files of this package and escaped JSON are inserted without escaping.
    return environment.get_template("page.html.jinja").render(
        page=document,
        sections=list(filter(_has_content, document.sections)),
        policy=policy_of(sources, [style]),
        style=Markup(style),
        scripts=[Markup(source) for source in sources],
        data=Markup(_json_for_script(data)),
        has_plots=has_plots,
        version=__version__,
    )


def _charts(document: Document) -> Iterator[tuple[Timeline | Scatter, Mapping[str, Any]]]:
    """Blocks that scripts draw, with their data; at most one of each kind."""
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Timeline):
                yield block, {**block.data, "charts": [_chart_data(chart) for chart in block.charts if chart.series]}
            elif isinstance(block, Scatter):
                yield block, _scatter_data(block)


def _chart_data(chart: Chart) -> dict[str, Any]:
    return chart._asdict() | {"series": [series._asdict() for series in chart.series]}


def _scatter_data(block: Scatter) -> dict[str, Any]:
    return {
        "metrics": {
            printable(axis.name): {"label": printable(axis.label), "better": axis.better} for axis in block.axes
        },
        "rows": [
            {
                "label": printable(point.label),
                "is_chosen": point.is_chosen,
                "figures": {
                    printable(axis.name): point.figures[axis.name] for axis in block.axes if axis.name in point.figures
                },
            }
            for point in block.points
        ],
    }


def _has_content(section: Section) -> bool:
    """True if a section has more than empty tables."""
    return any(not isinstance(block, Table | Tables) or not _is_empty(block) for block in section.blocks)


def _is_empty(block: Table | Tables) -> bool:
    return not block.rows if isinstance(block, Table) else not any(table.rows for table in block.tables)


def _kind(value: object) -> str:
    """Name of the type of a block or a cell, for the template."""
    return type(value).__name__


def _css_class(cell: object, column: Column) -> str:
    if isinstance(cell, Number) and cell.value == 0:
        return "zero"
    return {"alarm": "word alarm", "number": ""}.get(column.kind, column.kind)


def policy_of(scripts: Iterable[str], styles: Iterable[str], *more: str) -> str:
    """Content security policy of a page that permits only the given scripts and styles.

    Args:
        more: further rules.
    """

    def digests(texts: Iterable[str]) -> str:
        found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{each}'" for each in found)

    rules = ("default-src 'none'", f"script-src {digests(scripts)}", f"style-src {digests(styles)}", "img-src data:")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'", *more])


def page_style() -> str:
    """Style of a page: colours, tiles, cards and tables, light and dark."""
    return _asset("page.css")


def _asset(name: str) -> str:
    return files("lockstep.report").joinpath("assets", name).read_text(encoding="utf-8")


def _json_for_script(data: Mapping[str, Any]) -> str:
    """JSON that is safe in a script element: it cannot end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
