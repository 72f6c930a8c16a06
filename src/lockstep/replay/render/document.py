"""HTML files that need nothing but themselves: a template, its data, and the scripts and the style within.

What comes from a workload is escaped: text by the template, data by `_json_for_script`. A page's policy forbids it the
network and every script but its own, which are named by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from lockstep.vendored import read_vendored
from lockstep.version import __version__

PLOTS = "uplot/uPlot.iife.min.js"
"""Others' code that pages with a timeline carry."""
_PLOT_STYLE = "uplot/uPlot.min.css"


def rendered(
    template: str, page: Mapping[str, Any], data: Mapping[str, Any], scripts: Sequence[str], *, has_plots: bool
) -> str:
    """A whole page; the same arguments give the same.

    Args:
        template: its name in `render/page`, as are those of the scripts.
        page: what the template reads.
        data: what the scripts read, from the element ``data``.
        has_plots: whether the scripts draw with uPlot.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    style = (read_vendored(_PLOT_STYLE) if has_plots else "") + _own("report.css")
    sources = [read_vendored(PLOTS)] if has_plots else []
    sources += map(_own, scripts)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, sources))}; style-src {_digest(style)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        loader=FunctionLoader(_own),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    # Only files of this package and escaped JSON are markup.
    return environment.get_template(template).render(
        page=page,
        policy=policy,
        style=Markup(style),
        scripts=[Markup(source) for source in sources],
        data=Markup(_json_for_script(data)),
        has_plots=has_plots,
        version=__version__,
    )


def _own(name: str) -> str:
    return files("lockstep.replay.render.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_for_script(data: Mapping[str, Any]) -> str:
    """JSON in which no sequence of characters ends a script element or begins a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
