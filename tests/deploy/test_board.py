"""The Grafana board asks for metrics that a real server has, and the example of Prometheus reads its page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "lockstep.json").read_text())
WORDS = {"and", "by", "histogram_quantile", "label_values", "le", "max", "on", "rate", "sum", "instance", "model_name"}
WORDS |= {"finished_reason", "status"}
"""What the expressions are made of beside metrics."""


def expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def metrics_in(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    return {word for word in re.findall(r"[a-zA-Z_][a-zA-Z0-9_:]*", bare) if word not in WORDS}


def test_every_metric_on_the_board_is_one_that_the_server_has(metric_names: set[str]) -> None:
    asked = {name for expression in expressions() for name in metrics_in(expression)}
    assert len(asked) > 20
    assert asked <= metric_names


def test_every_expression_is_balanced_and_chosen_by_the_variables() -> None:
    for expression in expressions():
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]")), expression
        assert "model_name" in expression or "instance" in expression, expression


def test_panels_have_their_own_ids_titles_and_places() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_what_an_operator_watches_is_on_it() -> None:
    text = " ".join(expressions())
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token", "inter_token_latency"):
        assert f"lockstep:{name}" in text


def test_prometheus_scrapes_the_page_of_metrics() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:9000"]
