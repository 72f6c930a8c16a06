"""Command-line options that several verbs share, and their conversion to values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.artifacts.task import Task
from lockstep.cli.flag_groups import Flag, OptionFlags
from lockstep.engine.options import EngineOptions, LoadOptions, check_limits, check_sizes
from lockstep.errors import UsageError
from lockstep.executors.options import ExecutorOptions

SIZE_FLAGS = {"kv_cache_memory_bytes": "--kv-cache-memory-bytes", "host_kv_memory_bytes": "--swap-space-bytes"}
MODEL_HELP = (
    "A .gguf file, a Hugging Face directory, hf://org/name[@revision][#file], pocket:// or stub://NAME. "
    "MODEL+lora=ADAPTER merges a LoRA adapter into its weights."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
POOL = OptionFlags(EngineOptions, {"max_model_len": Flag(), "kv_cache_memory_bytes": Flag()})
EXECUTOR = OptionFlags(
    ExecutorOptions,
    {
        "isa": Flag(is_hidden=True),
        "threads": Flag(),
        "kv_cache_precision": Flag("kv_cache_dtype"),
        "quantize": Flag(),
    },
)
Pool = Annotated[EngineOptions, POOL]
Executor = Annotated[ExecutorOptions, EXECUTOR]
Quantize = Annotated[ExecutorOptions, OptionFlags(ExecutorOptions, {"quantize": Flag()})]
CacheDir = Annotated[
    Path | None,
    typer.Option(envvar="LOCKSTEP_CACHE_DIR", help="Directory for packed weights.", show_default="the user's cache"),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja file that replaces the model's chat template."),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Variables for the chat template, e.g. '{\"enable_thinking\": false}'."),
]
TaskFlag = Annotated[
    Task | None,
    typer.Option("--task", help="What the model is for: generate, embed or rerank (default: what its files say)."),
]
Reasoning = Annotated[
    Literal["auto", "off"], typer.Option(help="auto separates the reasoning from the answer; off does not.")
]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="Answer this prompt and exit; - reads standard input.")
]
System = Annotated[str | None, typer.Option(help="System message.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print token counts and times of each answer.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

DEFAULT_URL = "http://127.0.0.1:9000"
BaseUrl = Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="URL of the server, with or without /v1.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key (bearer token).", show_envvar=True)]
RemoteModel = Annotated[str | None, typer.Option("--model", help="Model name; by default the first of /v1/models.")]
ExtraBody = Annotated[str | None, typer.Option(metavar="JSON", help="Further fields of each request's body.")]


@dataclass(frozen=True, slots=True)
class LocalModelFlags:
    """Flags for a model that a command loads into its own process: chat template, KV pool, executor."""

    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    reasoning: Reasoning = "auto"
    task: TaskFlag = None
    pool: Pool = field(default_factory=EngineOptions)
    executor: Executor = field(default_factory=ExecutorOptions)
    cache_dir: CacheDir = None

    def load_options(self, max_num_seqs: int) -> LoadOptions:
        """Options of loading the model; ConfigError and UsageError for values that no engine can satisfy."""
        engine = checked(replace(self.pool, max_num_seqs=max_num_seqs))
        return LoadOptions(engine, self.executor, self.cache_dir, read_template(self.chat_template), self.task)

    def template_variables(self) -> dict[str, Any]:
        """Value of --chat-template-kwargs; UsageError if it is not a JSON object."""
        return template_kwargs(self.chat_template_kwargs)


def checked(options: EngineOptions) -> EngineOptions:
    """Check and return the options; ConfigError, with the flag of a size, for values that no engine can satisfy."""
    from lockstep.executors.machine import machine_memory_bytes

    check_limits(options)
    check_sizes(options, machine_memory_bytes(), SIZE_FLAGS)
    return options


def template_kwargs(text: str | None) -> dict[str, Any]:
    """Value of --chat-template-kwargs; UsageError if it is not a JSON object."""
    return json_object("--chat-template-kwargs", text, '{"enable_thinking": false}')


def extra_fields(text: str | None) -> dict[str, Any]:
    """Value of --extra-body; UsageError if it is not a JSON object."""
    return json_object("--extra-body", text, '{"top_k": 1}')


def json_object(flag: str, text: str | None, example: str) -> dict[str, Any]:
    """Value of a flag that takes a JSON object; empty if the flag is not given. UsageError shows the example."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{flag} is {text!r}; it must be a JSON object, e.g. {example}")
    return value


def read_template(path: Path | None) -> str | None:
    """Content of the file of --chat-template; UsageError if it cannot be read."""
    if path is None:
        return None
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--chat-template {path} cannot be read ({error}); a Jinja file in UTF-8 is expected"
        ) from error
