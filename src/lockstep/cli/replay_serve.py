"""`lockstep replay --serve RECORDING`: a server without a model that returns recorded answers."""

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
"""Engine options that accept priorities of requests, as the recorded server may have done. They have no effect, because
requests do not wait."""


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """Flags for the times of answers, and for the requests that get them."""

    speed: Annotated[float, Flag(metavar="X"), Range(0)] = 1.0
    """Speed-up of answers: recorded times are divided by this number; 0: no waiting."""
    strict: Annotated[bool, SWITCH] = False
    """Answer only requests whose prompt, parameters and seed are recorded."""
    manifest: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Manifest of the recorded server, for its names, personas and routing."""


@dataclass(frozen=True, slots=True)
class ReplayServeFlags:
    """Flags of `lockstep replay --serve`."""

    recording: Annotated[
        str, typer.Argument(metavar="RECORDING", help="Directory or file of `lockstep serve --trace-content`.")
    ]
    answers: AnswerFlags = field(default_factory=AnswerFlags)
    listen: ListenFlags = field(default_factory=ListenFlags)
    model_flags: ModelFlags = field(default_factory=ModelFlags)
    limits: Annotated[ServerOptions, LIMITS] = field(default_factory=ServerOptions)
    report: ReportFlags = field(default_factory=ReportFlags)
    debug: flags.Debug = False


@with_flags
def replay_serve(given: ReplayServeFlags) -> None:
    """Serve recorded answers without a model, token by token at their recorded times."""
    recording, answers, model_flags, report = given.recording, given.answers, given.model_flags, given.report
    options = server_options(given.listen, model_flags, EVERYTHING, given.limits, report)
    if answers.manifest is not None and model_flags.served_model_name:
        raise UsageError("--served-model-name does not apply to --manifest, which names its models; remove it")
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
        raise UsageError(f"{recording} has no complete answer; record at least one request to its end")
    texts = _texts(found, trace.files[0].parent, flags.read_template(model_flags.chat_template))
    backend = RecordedBackend(*_models(found, partial(_model, texts=texts, answers=answers)))
    manifest = _manifest(found, aliases) if answers.manifest is None else read_manifest(answers.manifest)
    cluster = Cluster(_without_budgets(manifest), ClusterOptions(backend, environment=os.environ, is_fixed=True))
    log_to_stderr(report.log_format, report.log_level, "server")
    progress = ServingProgress.of_process(report.log_format)
    with progress.running():
        run_server(cluster, options, progress.announce)


def _notes(found: RecordedAnswers) -> Iterable[str]:
    yield from found.notes
    if found.num_unended:
        yield f"{found.num_unended:,} requests have no complete answer in the recording and are left out"
    if found.num_others:
        yield f"{found.num_others:,} requests for embeddings are left out, because a recording has no vectors"
    for each in found.by_name.values():
        yield f"{each.name}: {each.index.num_answers:,} answers to {each.index.num_prompts:,} prompts"


Make = Callable[[str, "RecordedName"], "RecordedModel"]


def _models(found: RecordedAnswers, make: Make) -> tuple[Mapping[str, RecordedModel], Callable[[str], RecordedModel]]:
    """Models by recorded name, and a function for other names, whose models use the tokenizer of the first."""
    from lockstep.cluster.recorded_index import RecordedIndex

    first = next(iter(found.by_name.values()))
    models = {name: make(name, each) for name, each in found.by_name.items()}
    return models, lambda name: make(name, replace(first, name=name, index=RecordedIndex()))


def _texts(found: RecordedAnswers, folder: Path, template: str | None) -> Mapping[str, Tokenizer]:
    """Tokenizers of the recorded engines, by the name of the text file; names of the same model share a tokenizer."""
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
    """Rename the only recorded model to the first name; returns its aliases: the other names and the recorded one."""
    if not names or not found.by_name:
        return ()
    if len(found.by_name) > 1:
        raise UsageError(
            f"--served-model-name applies to a single model, but {', '.join(found.by_name)} were recorded; remove it, "
            "or give --manifest with the manifest of the recorded server"
        )
    ((recorded, model),) = found.by_name.items()
    model.name = names[0]
    found.by_name = {names[0]: model}
    return *names[1:], recorded


def _manifest(found: RecordedAnswers, aliases: tuple[str, ...]) -> Manifest:
    """Manifest with the recorded names, in the order of their first requests."""
    from lockstep.cluster.manifest import Manifest, ModelEntry

    first, *others = found.by_name
    made = Manifest.of_model(first, (first, *aliases))
    return replace(made, entries=(*made.entries, *(ModelEntry(name, name) for name in others)))


def _without_budgets(manifest: Manifest) -> Manifest:
    """The manifest without budgets and hosts, which a server without models does not need."""

    from lockstep.cluster.manifest import Resources

    return replace(manifest, resources=Resources(), hosts=None)
