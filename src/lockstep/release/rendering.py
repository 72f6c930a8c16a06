"""Verdicts as the one report document, for terminal, Markdown and page, and as JUnit for continuous integration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from lockstep.release.observation import SIDES
from lockstep.release.verdict import Decision, Figures, SegmentSummary, Verdict
from lockstep.report.document import (
    ABSENT,
    Cell,
    Document,
    Finding,
    Number,
    Paragraph,
    Plots,
    Section,
    Style,
    Table,
    Tile,
    Tiles,
    changes,
    numbers,
    words,
)

FIGURE_WORDS = {
    "error_rate": ("error rate", "%"),
    "latency_p95_ms": ("p95 latency", "ms"),
    "ttft_p95_ms": ("p95 first token", "ms"),
    "decode_p95_ms": ("p95 gap between tokens", "ms"),
    "kv_pressure_p95": ("p95 KV pressure", ""),
    "queue_depth_p95": ("p95 queue depth", ""),
}
MAX_SEGMENT_ROWS = 50


def document_of(verdict: Verdict, plots: Sequence[Plots] = ()) -> Document:
    """A verdict as a report.

    Args:
        plots: for a page, between figures and records.
    """
    blocks = [_finding(verdict), _figures(verdict.summary)]
    sections = [Section("Verdict", (_tiles(verdict), *blocks))]
    if verdict.triage:
        sections.append(Section("Triage", (_triage(verdict),), id="triage"))
    if len(verdict.segments) > 1:
        sections.append(Section("Segments", (_segments(verdict),), id="segments"))
    if plots:
        sections.append(Section("Distributions and evidence over time", tuple(plots), id="plots"))
    sections.append(Section("Records", (_joining(verdict), _sides(verdict)), id="records-and-sides"))
    return Document(
        title=f"{verdict.decision.value}: {verdict.reason}",
        sections=sections,
        notes=verdict.notes,
    )


def _finding(verdict: Verdict) -> Finding:
    reasons = tuple(f"{each.response.value}: {each.sentence}{_where(each.segment)}" for each in verdict.signals)
    states = (f"evidence: {verdict.evidence}", f"guarantee: {verdict.guarantee}")
    return Finding(
        "everything is within policy" if not reasons else "outside policy:", reasons, states, rest=tuple(_rest(verdict))
    )


def _where(segment: str) -> str:
    return "" if segment == "all" else f" (in {segment})"


def _rest(verdict: Verdict) -> Iterator[str]:
    first = verdict.first_mismatch
    if first is not None:
        where = ""
        if "token_index" in first:
            tokens = [ABSENT if first[name] is None else first[name] for name in ("baseline_token", "candidate_token")]
            where = f", at token {first['token_index']}: {tokens[0]} and {tokens[1]}"
        yield f"first differing answer: request {first['request']}{where}"
    for transition in verdict.transitions:
        yield f"model version: {transition}"


def _tiles(verdict: Verdict) -> Tiles:
    summary = verdict.summary
    return Tiles(
        (
            Tile("decision", verdict.decision.value),
            Tile("pairs", f"{summary.pairs:,}", f"{summary.healthy:,} healthy"),
            Tile("same answers", f"{summary.same:,}", f"{summary.differing:,} differ"),
            Tile("segments", f"{len(verdict.segments):,}"),
        )
    )


def _figures(summary: SegmentSummary) -> Table:
    has_bounds = any(each.lower is not None for each in summary.figures.values())
    bounds = changes("mean change at least", "at most") if has_bounds else ()
    columns = (*words("figure"), *numbers("baseline", "candidate"), *changes("change"), *bounds)
    table = Table("Figures", columns, id="figures")
    for name, (label, unit) in FIGURE_WORDS.items():
        figure = summary.figures[name]
        if figure.baseline is None and figure.candidate is None:
            continue
        row: list[Cell] = [f"{label}, {unit}" if unit else label]
        row += [_number(figure.baseline), _number(figure.candidate), _change(name, figure)]
        if has_bounds:
            row += [_bound(name, figure.lower), _bound(name, figure.upper)]
        table.rows.append(tuple(row))
    return table


def _number(value: float | None) -> Cell:
    return ABSENT if value is None or value != value or abs(value) == float("inf") else Number(value, Style.SHORT)


def _change(name: str, figure: Figures) -> str:
    if figure.difference is None:
        return ABSENT
    if name == "error_rate":
        return f"{figure.difference:+.4g} points"
    return f"{100 * (figure.ratio - 1):+.3g} %" if figure.ratio is not None else f"{figure.difference:+.4g}"


def _bound(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:+.3g} points" if name == "error_rate" else f"{100 * (value - 1):+.3g} %"


def _segments(verdict: Verdict) -> Table:
    columns = (*words("segment"), *numbers("pairs", "differ"), *changes("p95 latency", "p95 first token", "errors"))
    table = Table("Segments", columns, id="segment-figures", can_sort=True)
    for each in verdict.segments[:MAX_SEGMENT_ROWS]:
        cells = [_change(name, each.figures[name]) for name in ("latency_p95_ms", "ttft_p95_ms", "error_rate")]
        table.rows.append((each.name, Number(each.pairs), Number(each.differing), *cells))
    return table


def _triage(verdict: Verdict) -> Table:
    table = Table("Triage", words("signal", "segment", "evidence", "owner", "next"), id="triage-items")
    for each in verdict.triage:
        examples = f" (e.g. {', '.join(each.examples)})" if each.examples else ""
        table.rows.append((each.signal, each.segment, each.evidence + examples, each.owner, each.action))
    return table


def _joining(verdict: Verdict) -> Table:
    joining = verdict.joining
    table = Table("Records", (*words("side", "what became of them"), *numbers("records")), id="records")
    for side in SIDES:
        keys = ", ".join(joining["by_key"]) or "nothing"
        table.rows.append((side, f"in pairs, by {keys}", Number(joining["pairs"])))
        for each in joining["unjoined"]:
            if each["side"] == side:
                what = f"{each['reason']}: {', '.join(each['examples'])}"
                table.rows.append((side, what, Number(each["count"])))
    return table


def _sides(verdict: Verdict) -> Table | Paragraph:
    names = sorted({name for side in verdict.sides.values() for name in side})
    if not names:
        return Paragraph("Neither side says which model, route or scheduler answered.")
    table = Table("Sides", words("", *SIDES), id="sides")
    for name in names:
        values = [", ".join(verdict.sides[side].get(name, ())) or ABSENT for side in SIDES]
        table.rows.append((name.replace("_", " "), *values))
    return table


def to_junit(verdict: Verdict) -> bytes:
    """A test suite with a case per signal that is outside policy, and one for the decision."""
    failures = [each for each in verdict.signals if each.response is not Decision.PROMOTE]
    suite = ElementTree.Element("testsuite", name="lockstep gate", tests=str(len(failures) + 1))
    suite.set("failures", str(len(failures) + (verdict.decision is not Decision.PROMOTE)))
    case = ElementTree.SubElement(suite, "testcase", classname="gate", name="decision")
    if verdict.decision is not Decision.PROMOTE:
        ElementTree.SubElement(case, "failure", type=verdict.decision.value, message=_plain(verdict.reason))
    for each in failures:
        name = f"{each.name}{_where(each.segment)}"
        case = ElementTree.SubElement(suite, "testcase", classname="gate.signals", name=_plain(name))
        failure = ElementTree.SubElement(case, "failure", type=each.response.value, message=_plain(each.sentence))
        failure.text = _plain(", ".join(each.examples))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"


def _plain(text: str) -> str:
    """Text that XML can hold."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
