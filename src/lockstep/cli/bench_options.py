"""The options of `lockstep bench serve`, and those that all clients of a server share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.cli.options import json_object

DEFAULT_URL = "http://127.0.0.1:9000"

BaseUrl = Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="The server, with or without /v1.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.", show_envvar=True)]
SaveResult = Annotated[bool, typer.Option("--save-result", help="Write the result as a JSON file.")]
ResultFile = Annotated[Path | None, typer.Option("--result-filename", help="Its name; implies --save-result.")]
MoreGoals = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")]
"""The second goal and further ones, as vLLM writes them: ``--goodput ttft:500 tpot:50``."""
Backend = Annotated[
    Literal["openai-chat", "openai"] | None, typer.Option(help="openai-chat or openai, which is /v1/completions.")
]
Endpoint = Annotated[str | None, typer.Option(help="Path of the endpoint, by default the backend's.")]
RemoteModel = Annotated[str | None, typer.Option("--model", help="By default the first of /v1/models.")]
Dataset = Annotated[str, typer.Option("--dataset", "--dataset-name", help="random, trace:FILE or jsonl:FILE.")]
RandomInputLen = Annotated[int, typer.Option(help="Tokens of a prompt, without the chat template's.")]
RandomOutputLen = Annotated[int, typer.Option(help="Tokens of an answer; also of JSONL lines that do not say.")]
RandomRangeRatio = Annotated[float, typer.Option(help="Lengths vary by this part, 0 to below 1.")]
RandomPrefixLen = Annotated[int, typer.Option(help="Tokens that all prompts share, in front.")]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        "--num-prompts", "--trace-limit", help="Requests at most.", show_default="100 random ones, files whole"
    ),
]
RequestRate = Annotated[float, typer.Option(help="Requests per second; inf sends all at once.")]
Burstiness = Annotated[float, typer.Option(help="Shape of the gaps: 1 is Poisson, less is burstier.")]
MaxConcurrency = Annotated[int | None, typer.Option(help="Requests that are open at once.")]
Seed = Annotated[int, typer.Option(help="Same seed, same requests at the same times.")]
Goodput = Annotated[str, typer.Option(help="Goals in ms, such as ttft:500,tpot:50 (also e2el).")]
PercentileMetrics = Annotated[str, typer.Option(help="Which of these to report.")]
MetricPercentiles = Annotated[str, typer.Option(help="Which percentiles to report.")]
SaveDetailed = Annotated[bool, typer.Option("--save-detailed", help="The same with the figures of each request.")]
NumWarmups = Annotated[int, typer.Option(help="Requests before the run that are not measured.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of the whole length.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
ExtraBody = Annotated[str | None, typer.Option(metavar="JSON", help="Further fields of each request.")]
TraceSpeed = Annotated[float, typer.Option(help="Replay a trace so many times as fast.")]
TraceSpread = Annotated[
    bool, typer.Option("--trace-spread", help="Spread requests of one timestamp up to the next, for coarse clocks.")
]


def extra_fields(text: str | None) -> dict[str, Any]:
    """The value of --extra-body; UsageError where it is not a JSON object."""
    return json_object("--extra-body", text, '{"top_k": 1}')
