"""Rendering of verdicts: converts them to a report document (terminal, Markdown, HTML page) and to JUnit for CI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from lockstep.release.decisions import FIGURES
from lockstep.release.observation import METRICS, SIDES
from lockstep.release.sequential import amount
from lockstep.release.series import RATIOS
from lockstep.release.verdict import ALL, Caveat, Decision, Figures, SegmentSummary, Triage, Verdict
from lockstep.report.document import (
    ABSENT,
    Block,
    Cell,
    Document,
    Finding,
    Number,
    Paragraph,
    Plots,
    Section,
    Style,
    Table,
    changes,
    numbers,
    words,
)
from lockstep.shown import printable, signed_percent

FIGURE_WORDS = {
    "error_rate": ("error rate", "%"),
    **{each.figure: (f"p95 {each.label or each.words}", each.unit) for each in METRICS},
    "output_tokens_mean": ("mean tokens of an answer", ""),
}
ANSWERS = ("same", "tolerated", "differing", "incomparable")
MAX_SEGMENT_ROWS = 50
SERIES_STATES = ("outside", "changing", "undecided", "no-evidence", "within")


def document_of(verdict: Verdict, plots: Sequence[Plots] = ()) -> Document:
    """Report document of a verdict.

    Args:
        plots: plots of an HTML page, placed before the records.
    """
    sections = [
        Section("Triage", tuple(map(_item, verdict.triage)), id="triage"),
        Section("Warnings", tuple(map(_warning, verdict.warnings)), id="warnings"),
        Section("Figures", (_basis(verdict), _figures(verdict.summary))),
    ]
    if verdict.series:
        sections.append(Section("Series", (_series(verdict),), id="evidence-by-series"))
    if verdict.decisions is not None:
        sections.append(Section("Decisions", tuple(_decisions(verdict.decisions)), id="decisions"))
    if len(verdict.segments) > 1:
        sections.append(Section("Segments", (_segments(verdict),), id="segments"))
    if plots:
        sections.append(Section("Distributions and evidence over time", tuple(plots), id="plots"))
    sections.append(Section("Records", (_joining(verdict), _sides(verdict)), id="records-and-sides"))
    return Document(
        title=f"{verdict.decision.value}: {verdict.reason}",
        sections=sections,
        notes=(*verdict.notes, *_advice(verdict)),
    )


def _warning(each: Caveat) -> Finding:
    return Finding(f"warning: {each.sentence}{_where(each.segment)}", _requests(each))


def _advice(verdict: Verdict) -> Iterator[str]:
    names = {each.name for each in verdict.signals}
    if names and names <= RATIOS.keys() and verdict.policy["mode"] == "threshold":
        yield (
            "only times are outside, and on a machine that others use two runs of one server may differ as much: judge "
            "the baseline against itself (a second run of it as --aa FILE), allow what differs there "
            "(max_ttft_p95_ratio and its like), or judge more pairs with mode=sequential"
        )


def _item(item: Triage) -> Finding:
    """Triage item with its evidence, owner, action and example requests."""
    response = "prediction" if item.response == Decision.PROMOTE else item.response
    reasons = (f"for {item.owner}: {item.action}", *_requests(item))
    return Finding(f"{response}: {item.evidence}{_where(item.segment)}", reasons)


def _requests(of: Caveat | Triage) -> tuple[str, ...]:
    return (f"requests: {', '.join(of.examples)}",) if of.examples else ()


def _where(segment: str) -> str:
    return "" if segment == ALL else f" (in {segment})"


def _basis(verdict: Verdict) -> Finding:
    """Counts of pairs and answers, with the kind of evidence and the guarantee."""
    summary = verdict.summary
    found = ", ".join(f"{getattr(summary, kind):,} {kind}" for kind in ANSWERS if getattr(summary, kind))
    counts = f"{summary.pairs:,} pairs, {summary.healthy:,} of them answered by both sides; answers: {found or 'none'}"
    states = [f"evidence: {verdict.evidence}", f"guarantee: {verdict.guarantee}"]
    first = verdict.first_mismatch
    if first is not None:
        where = ""
        if "token_index" in first:
            tokens = [ABSENT if first[name] is None else first[name] for name in ("baseline_token", "candidate_token")]
            where = f", at token {first['token_index']}: {tokens[0]} and {tokens[1]}"
        states.append(f"first differing answer: request {first['request']}{where}")
    states += [f"model version: {transition}" for transition in verdict.transitions]
    return Finding(counts, states=tuple(states))


def _figures(summary: SegmentSummary) -> Table:
    columns = (*words("figure"), *numbers("pairs", "baseline", "candidate"), *changes("change"))
    table = Table("Figures", columns, id="figures")
    for name, (label, unit) in FIGURE_WORDS.items():
        figure = summary.figures[name]
        if figure.baseline is None and figure.candidate is None:
            continue
        figures = Number(figure.pairs), _number(figure.baseline), _number(figure.candidate)
        table.rows.append((f"{label}, {unit}" if unit else label, *figures, _change(name, figure)))
    return table


def _series(verdict: Verdict) -> Table:
    """Table of the sequential gate's series; series that are not within their bounds come first."""
    columns = (*words("series", "segment", "state"), *changes("mean", "at least", "at most", "bound"))
    table = Table("Evidence at the last look", columns, id="series")
    ranked = sorted(verdict.series, key=lambda each: SERIES_STATES.index(each.state))
    for each in ranked[:MAX_SEGMENT_ROWS]:
        means = [amount(each.unit, value) for value in (each.effect, each.lower, each.upper, each.bound)]
        table.rows.append((each.signal, each.segment, each.state, *means))
    return table


def _number(value: float | None) -> Cell:
    return ABSENT if value is None else Number(value, Style.SHORT)


def _change(name: str, figure: Figures) -> str:
    if figure.difference is None:
        return ABSENT
    if name == "error_rate":
        return f"{figure.difference:+.4g} points"
    return signed_percent(figure.ratio - 1) if figure.ratio is not None else f"{figure.difference:+.4g}"


def _segments(verdict: Verdict) -> Table:
    columns = (*words("segment"), *numbers("pairs", "differ"), *changes("p95 latency", "p95 first token", "errors"))
    table = Table("Segments", columns, id="segment-figures", can_sort=True)
    for each in verdict.segments[:MAX_SEGMENT_ROWS]:
        cells = [_change(name, each.figures[name]) for name in ("latency_p95_ms", "ttft_p95_ms", "error_rate")]
        table.rows.append((each.name, Number(each.pairs), Number(each.differing), *cells))
    return table


def _decisions(decisions: Mapping[str, Any]) -> Iterator[Block]:
    """Different settings, first differing step and predicted figures, for each engine of two recordings."""
    for engine in decisions["engines"]:
        settings = [f"{name}: {a} -> {b}" for name, (a, b) in engine["settings"].items()]
        difference, prediction = engine["difference"], engine["prediction"]
        if difference.get("identical"):
            head = f"all {difference['equal_steps']:,} steps are decided the same"
        elif "unknown" in difference:
            head = f"steps were not compared: {difference['unknown']}"
        else:
            change = difference.get("change", "engine")
            head = f"equal for {difference['equal_steps']:,} steps; then another {change} (A: baseline, B: candidate):"
        reasons = tuple(filter(None, (*difference.get("reasons", ()), difference.get("input"))))
        states = (f"settings: {'; '.join(settings) or 'the same on both sides'}",)
        forecast = f"no prediction: {prediction['unknown']}" if "unknown" in prediction else prediction["trust"]
        rest = (forecast, *prediction.get("notes", ()))
        yield Finding(f"engine {engine['engine']} ({engine['model']}): {head}", reasons, states, rest=rest)
        if "figures" in prediction:
            yield _prediction(engine["engine"], prediction)
    if decisions["notes"]:
        yield Paragraph("; ".join(decisions["notes"]))


def _prediction(engine: int, prediction: Mapping[str, Any]) -> Table:
    columns = (
        *words("figure"),
        *numbers("measured", "replayed", "on the candidate's settings"),
        *changes("predicted change", "error of the replay"),
    )
    title = f"The baseline's load, {prediction['requests']:,} requests"
    table = Table(title, columns, id=f"prediction-{engine}")
    for name, figure in prediction["figures"].items():
        shares = [ABSENT if figure[each] is None else signed_percent(figure[each]) for each in ("change", "error")]
        values = [_number(figure[each]) for each in ("measured", "baseline", "candidate")]
        unit = ", ms" if name.endswith("_ms") else ""
        table.rows.append((f"{FIGURES[name]}{unit}", *values, *shares))
    return table


def _joining(verdict: Verdict) -> Table:
    joining = verdict.joining
    table = Table("Records", (*words("side", "what became of them"), *numbers("records")), id="records")
    for side in SIDES:
        keys = ", ".join(joining.by_key) or "nothing"
        table.rows.append((side, f"in pairs, by {keys}", Number(joining.pairs)))
        for each in joining.unjoined:
            if each.side == side:
                table.rows.append((side, f"{each.reason.value}: {', '.join(each.examples)}", Number(each.count)))
    return table


def _sides(verdict: Verdict) -> Table | Paragraph:
    names = sorted({name for side in verdict.sides.values() for name in side})
    if not names:
        return Paragraph("Neither side names the model, route or scheduler that answered.")
    table = Table("Sides", words("", *SIDES), id="sides")
    for name in names:
        values = [", ".join(verdict.sides[side].get(name, ())) or ABSENT for side in SIDES]
        table.rows.append((name.replace("_", " "), *values))
    return table


def to_junit(verdict: Verdict) -> bytes:
    """JUnit test suite with one test case per signal, and one for the decision."""
    suite = ElementTree.Element("testsuite", name="lockstep gate", tests=str(len(verdict.signals) + 1), errors="0")
    suite.set("failures", str(len(verdict.signals) + (verdict.decision is not Decision.PROMOTE)))
    case = ElementTree.SubElement(suite, "testcase", classname="gate", name="decision")
    if verdict.decision is not Decision.PROMOTE:
        ElementTree.SubElement(case, "failure", type=verdict.decision.value, message=printable(verdict.reason))
    for each in verdict.signals:
        name = printable(f"{each.name}{_where(each.segment)}")
        case = ElementTree.SubElement(suite, "testcase", classname="gate.signals", name=name)
        failure = ElementTree.SubElement(case, "failure", type=each.response.value, message=printable(each.sentence))
        failure.text = printable(", ".join(each.examples))
    ElementTree.indent(suite)
    return f"{ElementTree.tostring(suite, encoding='unicode', xml_declaration=True)}\n".encode()
