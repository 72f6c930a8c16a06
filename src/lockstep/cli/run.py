"""`lockstep run`: one answer, or a chat in the terminal, from a model in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from lockstep.cli import constraints
from lockstep.cli import options as flags
from lockstep.cli.answers import AnswerWriter
from lockstep.cli.conversation import converse, prompt_of, system_of
from lockstep.cli.progress import loading_progress
from lockstep.engine.chat import chat_request
from lockstep.engine.llm import LLM
from lockstep.engine.loading import LoadOptions
from lockstep.engine.outputs import GenerationRequest, RequestOutput, TokenOutput
from lockstep.errors import UsageError
from lockstep.executors.sampling_params import SamplingParams

Message = dict[str, str]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="Answer this and exit; - reads it from standard input.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")]
_ANY_VOCABULARY = 1 << 31


def run(
    model: flags.Model,
    prompt: Prompt = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Raw = False,
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
    json_schema: constraints.JsonSchema = None,
    regex: constraints.Regex = None,
    choice: constraints.Choice = None,
    grammar: constraints.Grammar = None,
    chat_template: flags.ChatTemplate = None,
    chat_template_kwargs: flags.ChatTemplateKwargs = None,
    reasoning: flags.Reasoning = "auto",
    max_model_len: flags.MaxModelLen = None,
    kv_cache_memory_bytes: flags.KvBytes = None,
    threads: flags.Threads = None,
    device: flags.Device = "auto",
    kv_cache_dtype: flags.KvDtype = "f16",
    quantize: flags.Quantize = None,
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
        constraint=constraints.constraint_of(json_schema, regex, choice, grammar),
    )
    params.validate(_ANY_VOCABULARY)  # what is wrong whatever the model is said before it is loaded
    ask = _Ask(params, system_of(system), raw, flags.template_kwargs(chat_template_kwargs), reasoning)
    load = flags.load_options(
        max_model_len=max_model_len,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        threads=threads,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        quantize=quantize,
        cache_dir=cache_dir,
        probe=probe,
        max_num_seqs=1,
        chat_template=chat_template,
    )
    if prompt is None and as_json:
        raise UsageError("--json needs a prompt: add -p TEXT (or -p - for standard input)")
    with _load(model, load) as llm:
        _talk(_Session(llm, ask), prompt, as_json, verbose)


def _load(model: str, options: LoadOptions) -> LLM:
    with loading_progress(model) as progress:
        return LLM(model, options, progress=progress)


@dataclass(frozen=True, slots=True)
class _Ask:
    """How every answer of this run is asked for."""

    params: SamplingParams
    system: str | None
    raw: bool
    """Prompts are completed as they are."""
    template_kwargs: Mapping[str, Any]
    reasoning: str


class _Session:
    """A conversation with its history; one answer at a time."""

    def __init__(self, llm: LLM, ask: _Ask) -> None:
        self.llm = llm
        self._ask = ask
        self._plain = ask.raw or not llm.model.tokenizer.has_chat_template
        if self._plain and ask.system is not None:
            raise UsageError("--system needs a chat template: the model has none, or --raw turned it off")
        self._start: list[Message] = [] if ask.system is None else [{"role": "system", "content": ask.system}]
        self._messages = list(self._start)

    @property
    def has_history(self) -> bool:
        return not self._plain

    def clear(self) -> None:
        self._messages = list(self._start)

    def answer(self, text: str, writer: AnswerWriter | None) -> RequestOutput:
        """Stream the answer through ``writer``; Ctrl-C ends it early and keeps what came."""
        self._messages.append({"role": "user", "content": text})
        try:
            output = self._generate(self._request(text), writer)
        except BaseException:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": output.text})
        return output

    def _request(self, text: str) -> GenerationRequest:
        ask = self._ask
        if self._plain:
            return GenerationRequest(text, ask.params)
        return chat_request(
            self.llm.model.tokenizer,
            self._messages,
            ask.params,
            template_kwargs=ask.template_kwargs,
            reasoning=ask.reasoning,
        )

    def _generate(self, request: GenerationRequest, writer: AnswerWriter | None) -> RequestOutput:
        engine = self.llm.engine
        outputs: list[TokenOutput] = []
        request_id = engine.submit(request, outputs.append)
        written = 0
        while not engine.is_complete(request_id):
            try:
                engine.step()
                for output in outputs[written:]:
                    written += 1
                    if writer is not None:
                        writer.write(output)
            except KeyboardInterrupt:
                engine.abort(request_id)
        last = outputs[-1]
        if last.error is not None:
            raise last.error
        assert last.request is not None, "the last output of a request carries the whole answer"
        return last.request


def _talk(session: _Session, prompt: str | None, as_json: bool, verbose: bool) -> None:
    if prompt is None:
        converse(session, _figures if verbose else None)
        return
    output = session.answer(prompt_of(prompt), None if as_json else AnswerWriter())
    if as_json:
        print(json.dumps(_as_json(session.llm, output), ensure_ascii=False))
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
        "reasoning_content": completion.reasoning or None,
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
