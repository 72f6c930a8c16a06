"""`lockstep replay --serve RECORDING`: a server without a model, which answers recorded requests again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import SWITCH, Flag, with_flags
from lockstep.cli.manifests import read_manifest
from lockstep.cli.progress import ServingProgress
from lockstep.cli.replay_options import open_with_notes, print_notes
from lockstep.cli.serve import server_options
from lockstep.cli.serve_flags import LIMITS, ListenFlags, ModelFlags, ReportFlags
from lockstep.engine.options import EngineOptions
from lockstep.errors import UsageError
from lockstep.option_fields import Range
from lockstep.server.options import ServerOptions

if TYPE_CHECKING:
    from lockstep.cluster.manifest import Manifest
    from lockstep.cluster.recorded import RecordedModel
    from lockstep.engine.tokenizer import Tokenizer
    from lockstep.replay.answers import RecordedAnswers, RecordedName

EVERYTHING = EngineOptions(order="priority")
"""Priorities of requests are taken as the recorded server took them; nothing waits for anything here."""


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """Answers: their times, and the requests that get them."""

    speed: Annotated[float, Flag(metavar="X"), Range(0)] = 1.0
    """Divides recorded times; 0: nothing is waited for."""
    strict: Annotated[bool, SWITCH] = False
    """Answer recorded requests only, with their prompt, parameters and seed."""
    manifest: Annotated[Path | None, Flag(metavar="FILE")] = None
    """The manifest that was served: its names, personas and routing."""


@dataclass(frozen=True, slots=True)
class ReplayServeFlags:
    """Flags of `lockstep replay --serve`."""

    recording: Annotated[
        str, typer.Argument(metavar="RECORDING", help="A directory of `lockstep serve --trace-content`, or one file.")
    ]
    answers: AnswerFlags = field(default_factory=AnswerFlags)
    listen: ListenFlags = field(default_factory=ListenFlags)
    model_flags: ModelFlags = field(default_factory=ModelFlags)
    limits: Annotated[ServerOptions, LIMITS] = field(default_factory=ServerOptions)
    report: ReportFlags = field(default_factory=ReportFlags)
    debug: flags.Debug = False


@with_flags
def replay_serve(given: ReplayServeFlags) -> None:
    """Answer recorded requests again, token by token with their recorded times: a server without a model."""
    recording, answers, model_flags, report = given.recording, given.answers, given.model_flags, given.report
    options = server_options(given.listen, model_flags, EVERYTHING, given.limits, report)
    if answers.manifest is not None and model_flags.served_model_name:
        raise UsageError("--served-model-name applies to one model; in a manifest each model has its own name")
    from lockstep.cluster.cluster import Cluster
    from lockstep.cluster.recorded import RecordedBackend
    from lockstep.cluster.state import ClusterOptions
    from lockstep.replay.answers import read_answers
    from lockstep.server.run import run_server
    from lockstep.worker.logs import log_to_stderr

    trace = open_with_notes(Path(recording).expanduser())
    trace.check_as_recorded("--serve")
    found = read_answers(trace)
    aliases = _rename(found, model_flags.served_model_name or [])
    print_notes(_notes(found))
    if not found.by_name:
        raise UsageError(f"{recording}: no request in it has come to its end, so there is nothing to answer with")
    texts = _texts(found, trace.files[0].parent, flags.read_template(model_flags.chat_template))
    backend = RecordedBackend(*_models(found, partial(_model, texts=texts, answers=answers)))
    manifest = _manifest(found, aliases) if answers.manifest is None else read_manifest(answers.manifest)
    cluster = Cluster(_without_budgets(manifest), ClusterOptions(backend, environment=os.environ, is_fixed=True))
    log_to_stderr(report.log_format, report.log_level, "server")
    progress = ServingProgress.for_this(report.log_format)
    with progress.running():
        run_server(cluster, options, progress.announce)


def _notes(found: RecordedAnswers) -> Iterable[str]:
    yield from found.notes
    if found.num_unended:
        yield f"{found.num_unended:,} requests have no end in the recording, and are not answered"
    if found.num_others:
        yield f"{found.num_others:,} requests for embeddings are not answered: a recording has no vectors"
    for each in found.by_name.values():
        yield f"{each.name}: {each.index.num_answers:,} answers to {each.index.num_prompts:,} prompts"


Make = Callable[[str, "RecordedName"], "RecordedModel"]


def _models(found: RecordedAnswers, make: Make) -> tuple[Mapping[str, RecordedModel], Callable[[str], RecordedModel]]:
    """Models by recorded name; one without recorded requests gets the text side of the first."""
    from lockstep.cluster.recorded_index import RecordedIndex

    first = next(iter(found.by_name.values()))
    models = {name: make(name, each) for name, each in found.by_name.items()}
    return models, lambda name: make(name, replace(first, name=name, index=RecordedIndex()))


def _texts(found: RecordedAnswers, folder: Path, template: str | None) -> Mapping[str, Tokenizer]:
    """Tokenizers of the recorded engines by the names of their texts; names of one model share one."""
    from lockstep.engine.tokenizer import Tokenizer
    from lockstep.worker.flight.content import read_text

    texts: dict[str, Tokenizer] = {}
    for each in found.by_name.values():
        if each.engine.text not in texts:
            parts = read_text(folder, each.engine.text).parts()
            texts[each.engine.text] = Tokenizer(parts if template is None else replace(parts, chat_template=template))
    return texts


def _model(name: str, recorded: RecordedName, texts: Mapping[str, Tokenizer], answers: AnswerFlags) -> RecordedModel:
    from lockstep.cluster.recorded import RecordedModel, RecordedText

    engine = recorded.engine
    text = RecordedText(texts[engine.text], engine.config.max_model_len)
    return RecordedModel(name, text, recorded.index, answers.speed, is_strict=answers.strict)


def _rename(found: RecordedAnswers, names: Sequence[str]) -> tuple[str, ...]:
    """Call the one recorded model otherwise; returns its aliases, the recorded name among them."""
    if not names or not found.by_name:
        return ()
    if len(found.by_name) > 1:
        raise UsageError(
            f"--served-model-name applies to one model, and {', '.join(found.by_name)} were recorded; leave it out, "
            "or give the --manifest that was served"
        )
    ((recorded, model),) = found.by_name.items()
    model.name = names[0]
    found.by_name = {names[0]: model}
    return *names[1:], recorded


def _manifest(found: RecordedAnswers, aliases: tuple[str, ...]) -> Manifest:
    """A manifest of the recorded names, in the order of their first requests."""
    from lockstep.cluster.manifest import Manifest, ModelEntry

    first, *others = found.by_name
    made = Manifest.of_model(first, (first, *aliases))
    return replace(made, entries=(*made.entries, *(ModelEntry(name, name) for name in others)))


def _without_budgets(manifest: Manifest) -> Manifest:
    """The same names, rules and personas, without what only computing needs."""
    from lockstep.cluster.manifest import Resources

    return replace(manifest, resources=Resources(), hosts=None)
