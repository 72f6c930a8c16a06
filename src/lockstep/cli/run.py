"""`lockstep run`: one answer, or a chat in the terminal, from a model in this process."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli.progress import loading_progress
from lockstep.engine.llm import LLM
from lockstep.engine.outputs import GenerationRequest, RequestOutput, TokenOutput
from lockstep.errors import UsageError
from lockstep.executors.sampling_params import SamplingParams

Message = dict[str, str]
_ANY_VOCABULARY = 1 << 31
CHAT_HELP = "Type a message. /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run(
    model: flags.Model,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this and exit; - reads it from standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many new tokens.")] = None,
    min_tokens: Annotated[int, typer.Option(help="No end before so many new tokens.")] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this part of the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    presence_penalty: Annotated[float, typer.Option()] = 0.0,
    frequency_penalty: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    max_model_len: flags.MaxModelLen = None,
    kv_cache_memory_bytes: flags.KvBytes = None,
    threads: flags.Threads = None,
    device: flags.Device = "auto",
    kv_cache_dtype: flags.KvDtype = "f16",
    cache_dir: flags.CacheDir = None,
    probe: flags.Probe = True,
    as_json: flags.Json = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print the figures of each answer.")] = False,
    debug: flags.Debug = False,
) -> None:
    """Answer a prompt, or chat when there is none."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    params.validate(_ANY_VOCABULARY)  # what is wrong whatever the model is said before it is loaded
    load = flags.load_options(
        max_model_len=max_model_len,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        threads=threads,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        cache_dir=cache_dir,
        probe=probe,
        max_num_seqs=1,
    )
    if prompt is None and as_json:
        raise UsageError("--json needs a prompt: add -p TEXT (or -p - for standard input)")
    text = sys.stdin.read() if prompt == "-" else prompt
    with loading_progress(model) as progress:
        llm = LLM(model, load, progress=progress)
    with llm:
        session = _Session(llm, params, system, raw)
        if text is None:
            _chat(session, verbose)
        else:
            output = session.answer(text, None if as_json else _write)
            _report(llm, output, as_json, verbose)


class _Session:
    """A conversation with its history; one answer at a time."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, raw: bool) -> None:
        self._llm = llm
        self._params = params
        self._plain = raw or not llm.model.tokenizer.has_chat_template
        if self._plain and system is not None:
            raise UsageError("--system needs a chat template: the model has none, or --raw turned it off")
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    @property
    def has_history(self) -> bool:
        return not self._plain

    def clear(self) -> None:
        self._messages = list(self._start)

    def answer(self, text: str, write: Callable[[str], None] | None) -> RequestOutput:
        """Stream the answer through ``write``; Ctrl-C ends it early and keeps what came."""
        self._messages.append({"role": "user", "content": text})
        try:
            output = self._generate(self._prompt(text), write)
        except BaseException:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": output.text})
        return output

    def _prompt(self, text: str) -> str | Sequence[int]:
        return text if self._plain else self._llm.model.tokenizer.encode_chat(self._messages)

    def _generate(self, prompt: str | Sequence[int], write: Callable[[str], None] | None) -> RequestOutput:
        engine = self._llm.engine
        outputs: list[TokenOutput] = []
        request_id = engine.submit(GenerationRequest(prompt, self._params), outputs.append)
        written = 0
        while not engine.is_complete(request_id):
            try:
                engine.step()
                for output in outputs[written:]:
                    written += 1
                    if write is not None and output.text:
                        write(output.text)
            except KeyboardInterrupt:
                engine.abort(request_id)
        last = outputs[-1]
        if last.error is not None:
            raise last.error
        assert last.request is not None, "the last output of a request carries the whole answer"
        return last.request


def _chat(session: _Session, verbose: bool) -> None:
    with contextlib.suppress(ImportError):  # where it exists, importing it gives input() line editing and history
        import_module("readline")
    interactive = sys.stdin.isatty()
    if interactive:
        print(CHAT_HELP, file=sys.stderr)
        if not session.has_history:
            print("This model has no chat template: each message is completed on its own.", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print(file=sys.stderr)
            return
        if line == "/exit":
            return
        if line == "/clear":
            session.clear()
        elif line:
            output = session.answer(line, _write)
            print(flush=True)
            if verbose:
                print(_figures(output), file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(llm: LLM, output: RequestOutput, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(llm, output), ensure_ascii=False))
        return
    print(flush=True)
    if verbose:
        print(_figures(output), file=sys.stderr)


def _figures(output: RequestOutput) -> str:
    timings = output.timings
    rate = _tokens_per_second(output)
    return (
        f"{len(output.prompt_token_ids)} prompt tokens ({output.num_cached_tokens} cached), "
        f"{output.num_output_tokens} new, {0.0 if rate is None else rate:.1f} tokens/s, "
        f"first after {(timings.ttft_s or 0.0) * 1e3:.0f} ms"
    )


def _tokens_per_second(output: RequestOutput) -> float | None:
    timings = output.timings
    if timings.ttft_s is None or output.num_output_tokens < 2:
        return None
    return (output.num_output_tokens - 1) / max(timings.total_s - timings.ttft_s, 1e-9)


def _as_json(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    completion = output.completions[0]
    probe = llm.model.probe
    num_prompt, num_new = len(output.prompt_token_ids), output.num_output_tokens
    return {
        "model": llm.model.name,
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
        "timings": {
            "queue_ms": round(output.timings.queue_s * 1e3, 3),
            "ttft_ms": None if output.timings.ttft_s is None else round(output.timings.ttft_s * 1e3, 3),
            "total_ms": round(output.timings.total_s * 1e3, 3),
            "tokens_per_second": _tokens_per_second(output),
        },
        "deterministic": None if probe is None else probe.deterministic,
        "artifact": llm.model.fingerprint,
    }
