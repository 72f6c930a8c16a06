"""`lockstep chat`: the terminal as a client of any OpenAI-compatible server."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import bench_options as remote_flags
from lockstep.cli import options as flags
from lockstep.cli.answers import AnswerWriter
from lockstep.cli.conversation import converse, prompt_of, system_of, whole_text
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.bench.remote import Remote

CHAT_PATH, RAW_PATH = "/v1/chat/completions", "/v1/completions"


def chat(
    base_url: remote_flags.BaseUrl = remote_flags.DEFAULT_URL,
    model: remote_flags.RemoteModel = None,
    api_key: remote_flags.ApiKey = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this and exit; - reads it from standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as it is, by /v1/completions.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer, where the server promises it.")] = None,
    extra_body: remote_flags.ExtraBody = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print the figures of each answer.")] = False,
    debug: flags.Debug = False,
) -> None:
    """Chat with a server that speaks OpenAI's language; ours is the default."""
    from lockstep.bench.remote import Remote
    from lockstep.bench.target import Target

    if raw and system is not None:
        raise UsageError("--system has no place in a prompt that is completed as it is: leave out --raw")
    asked = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    fields = {name: value for name, value in asked.items() if value is not None}
    fields |= remote_flags.extra_fields(extra_body)
    with Remote(Target.parse(base_url, api_key)) as remote:
        session = RemoteSession(remote, remote.model_or_first(model), system_of(system), fields, raw=raw)
        if prompt is None:
            converse(session, _figures if verbose else None)
            return
        answer = session.answer(prompt_of(prompt), AnswerWriter())
        print(flush=True)
        if verbose:
            print(_figures(answer), file=sys.stderr)


@dataclass(slots=True)
class RemoteAnswer:
    """An answer as far as it came."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float = 0.0


class RemoteSession:
    """A conversation with a server; its history is kept here."""

    def __init__(self, remote: Remote, model: str, system: str | None, fields: dict[str, Any], *, raw: bool) -> None:
        self._remote = remote
        self._fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._raw = raw
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    @property
    def has_history(self) -> bool:
        return not self._raw

    def clear(self) -> None:
        self._messages = list(self._start)

    def answer(self, text: str, writer: AnswerWriter | None) -> RemoteAnswer:
        """Stream the answer; Ctrl-C closes the stream, which ends the generation there, and keeps what came."""
        self._messages.append({"role": "user", "content": whole_text(text, "the message")})
        answer, started_s = RemoteAnswer(), time.perf_counter()
        body = self._fixed | ({"prompt": text} if self._raw else {"messages": self._messages})
        try:
            with closing(self._remote.stream(RAW_PATH if self._raw else CHAT_PATH, body)) as chunks:
                for chunk in chunks:
                    for choice in chunk.choices[:1]:
                        if choice.brings_tokens and answer.ttft_s is None:
                            answer.ttft_s = time.perf_counter() - started_s
                        answer.text += choice.content
                        answer.finish_reason = choice.finish_reason or answer.finish_reason
                        if writer is not None:
                            writer.add(choice.content, choice.thoughts, is_final=False)
                    if chunk.usage is not None:
                        answer.prompt_tokens = chunk.usage.prompt_tokens
                        answer.output_tokens = chunk.usage.completion_tokens
        except KeyboardInterrupt:
            answer.finish_reason = "abort"
        except BaseException:
            self._messages.pop()
            raise
        finally:
            answer.total_s = time.perf_counter() - started_s
            if writer is not None:
                writer.add("", "", is_final=True)
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


def _figures(answer: RemoteAnswer) -> str:
    num_new, first_s = answer.output_tokens, answer.ttft_s
    rate = "unknown"
    if num_new is not None and num_new > 1 and first_s is not None:
        rate = f"{(num_new - 1) / max(answer.total_s - first_s, 1e-9):.1f}"
    counts = ["unknown" if count is None else str(count) for count in (answer.prompt_tokens, num_new)]
    return (
        f"{counts[0]} prompt tokens, {counts[1]} new, {rate} tokens/s, first after {(first_s or 0.0) * 1e3:.0f} ms, "
        f"ended by {answer.finish_reason or 'nothing'}"
    )
