"""`lockstep run`: an answer or a chat in the terminal, vectors or scores, with a model in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins

from lockstep.artifacts.task import ADAPTER_FORMS
from lockstep.cli import options as flags
from lockstep.cli.conversation import (
    ANY_VOCABULARY,
    ChatAnswer,
    Conversation,
    Message,
    answer_one,
    converse,
    prompt_of,
    system_of,
)
from lockstep.cli.flag_groups import SWITCH, Flag, with_flags
from lockstep.cli.progress import loading_progress
from lockstep.cli.run_vectors import VectorFlags, print_scores, print_vectors, texts_of
from lockstep.cli.terminal import Piece
from lockstep.engine.options import AdapterSource, LoadOptions
from lockstep.errors import UsageError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lockstep.engine.llm import LLM
    from lockstep.engine.outputs import RequestOutput


NO_PROMPT = "--json requires a prompt: add -p TEXT, or -p - for standard input"
MAX_TEXTS_AT_ONCE = 16
"""Maximum number of texts that share a step."""
Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="A prompt, texts for an embedding model, or a query and its documents for a reranker. Texts and "
        "documents may also come from standard input, one per line.",
    ),
]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Flags for fields of `SamplingParams`; None: the model's default."""

    max_tokens: int | None = None
    """Maximum number of new tokens."""
    min_tokens: int = 0
    """Minimum number of new tokens."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens; 0: all."""
    top_p: float | None = None
    """Sample from the most likely tokens whose total probability is this value."""
    min_p: float | None = None
    """Drop tokens whose probability is below this share of the most likely token's."""
    repetition_penalty: float | None = None
    """Penalty on tokens of prompt and answer; above 1 makes them less likely, 1 is off."""
    presence_penalty: float = 0.0
    """Number subtracted from the logit of each token of the answer, -2 to 2."""
    frequency_penalty: float = 0.0
    """Number subtracted once per occurrence of a token in the answer, -2 to 2."""
    seed: int | None = None
    """Seed of the sampling; equal seeds give equal answers."""
    stop: list[str] | None = None
    """Text before which the answer ends; may be repeated."""
    ignore_eos: Annotated[bool, SWITCH] = False
    """Continue after the model's end-of-sequence token."""

    def params(self, constraint: Constraint | None) -> SamplingParams:
        """Sampling parameters; InvalidParameterError for values that are invalid for every model."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        params = SamplingParams(**{**given, "stop": tuple(self.stop or ()), "constraint": constraint})
        params.validate(ANY_VOCABULARY)
        return params


@dataclass(frozen=True, slots=True)
class ConstraintFlags:
    """Flags for a constraint of the answer. At most one may be given."""

    json_schema: Annotated[str | None, Flag(metavar="FILE|JSON")] = None
    """JSON schema of the answer, as a file or as JSON."""
    regex: str | None = None
    """Pattern that the whole answer matches."""
    choice: list[str] | None = None
    """Permitted answer; repeat the flag for several."""
    grammar: Annotated[Path | None, Flag(metavar="FILE")] = None
    """File with a Lark grammar that the answer matches."""

    def constraint(self) -> Constraint | None:
        """Constraint of the given flag; None if no flag is given.

        Raises:
            UsageError: several flags are given, or a file cannot be read.
        """
        flags = {
            "--json-schema": self.json_schema,
            "--regex": self.regex,
            "--choice": self.choice or None,
            "--grammar": self.grammar,
        }
        given = [name for name, value in flags.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given; give only one of them")
        if self.json_schema is not None:
            is_json = self.json_schema.lstrip().startswith("{")
            schema = self.json_schema if is_json else _read("--json-schema", Path(self.json_schema))
            return Constraint.json_schema(schema)
        if self.regex is not None:
            return Constraint.regex(self.regex)
        if self.choice:
            return Constraint.choice(self.choice)
        return None if self.grammar is None else Constraint.lark(_read("--grammar", self.grammar))


@dataclass(frozen=True, slots=True)
class RunFlags:
    """Flags of `lockstep run`."""

    model: flags.Model
    texts: Texts = None
    prompt: flags.Prompt = None
    system: flags.System = None
    raw: Annotated[bool, SWITCH] = False
    """Complete the prompt without the chat template."""
    lora: Annotated[str | None, Flag(metavar="PATH")] = None
    """LoRA adapter of the model: a PEFT directory, a GGUF file, hf://org/name or pocket://NAME."""
    vectors: VectorFlags = field(default_factory=VectorFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    constraint: ConstraintFlags = field(default_factory=ConstraintFlags)
    local: flags.LocalModelFlags = field(default_factory=flags.LocalModelFlags)
    as_json: flags.Json = False
    verbose: flags.Verbose = False
    debug: flags.Debug = False


@with_flags
def run(given: RunFlags) -> None:
    """Answer a prompt, chat, or print vectors or scores of texts."""
    params = given.sampling.params(given.constraint.constraint())  # a fault is reported before the model is loaded
    local = given.local
    variables = local.template_variables()
    texts, system = texts_of(given.texts, given.prompt), system_of(given.system)
    load = local.load_options(max_num_seqs=max(1, min(len(texts), MAX_TEXTS_AT_ONCE)))
    if given.as_json and not texts and sys.stdin.isatty():
        raise UsageError(NO_PROMPT)
    with _load(given.model, _with_adapter(given.model, load, given.lora)) as llm:
        given.vectors.check(llm.model.task)
        if llm.model.task != "generate":
            _check_no_answer(llm.model.task, given)
            show = print_vectors if llm.model.task == "embed" else print_scores
            show(llm, texts, given.vectors, given.as_json)
            return
        if len(texts) > 1:
            raise UsageError("this model answers one prompt; write it in quotes, as one TEXT")
        if given.as_json and not texts:
            raise UsageError(NO_PROMPT)
        answerer = LocalAnswerer(variables, local.reasoning, given.raw, local.chat_template, llm, given.lora)
        conversation = Conversation(answerer, params, system, is_verbose=given.verbose)
        if not texts:
            converse(conversation)
        elif given.as_json:
            print(json.dumps(_as_json(llm, answerer, conversation, texts[0]), ensure_ascii=False))
        else:
            answer_one(conversation, texts[0])


def _check_no_answer(task: str, given: RunFlags) -> None:
    """UsageError if a flag for generated text is given, which has no effect on a model with another task."""
    groups = (given.sampling, given.constraint)
    names = [each.name for group in groups for each in fields(group) if getattr(group, each.name) != each.default]
    names += [name for name in ("system", "raw", "verbose") if getattr(given, name)]
    if names:
        flag = f"--{names[0].replace('_', '-')}"
        raise UsageError(f"{flag} is for models that generate text; this model's task is {task!r}")
    if given.lora is not None:
        raise UsageError(
            "--lora applies to generated text only; for vectors and scores, use lockstep serve --lora-modules NAME=PATH"
        )


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error}; it must be a text file in UTF-8") from None


def _with_adapter(model: str, options: LoadOptions, path: str | None) -> LoadOptions:
    """Return the options with the adapter of `--lora`, under its path as a name."""
    if path is None:
        return options
    from lockstep.engine.loading import open_adapters, with_room_for

    if not path.strip():
        raise UsageError(f"--lora is empty; it must be {ADAPTER_FORMS}")
    source = AdapterSource(path, path)
    return with_room_for(replace(options, adapters=(source,)), open_adapters(model, (source,), options.cache_dir))


def _load(model: str, options: LoadOptions) -> LLM:
    from lockstep.engine.llm import LLM

    with loading_progress(model) as progress:
        return LLM(model, options, progress=progress)


class LocalAnswerer:
    """Answers of a model in this process."""

    def __init__(
        self,
        template_kwargs: Mapping[str, Any],
        reasoning: str,
        raw: bool,
        template: Path | None,
        llm: LLM,
        adapter: str | None = None,
    ) -> None:
        self.model = llm.model.name
        self.has_roles = llm.model.tokenizer.has_chat_template and not raw
        self.output: RequestOutput | None = None
        """Output of the last complete answer; None before it."""
        self._llm = llm
        self._template_kwargs = template_kwargs
        self._reasoning = reasoning
        self._template = template
        self._adapter = adapter

    @property
    def defaults(self) -> Mapping[str, object]:
        """Default sampling parameters of the artifact; neutral values for those that it does not set."""
        known: dict[str, object] = to_builtins(SamplingParams().resolve(self._llm.model.sampling_defaults))
        return known

    def facts(self) -> Mapping[str, str]:
        """Source, context length and chat template of the model."""
        model = self._llm.model
        template = "none; each message is completed alone"
        if self.has_roles:
            template = "the model's own" if self._template is None else str(self._template)
        context = f"{self._llm.engine.config.max_model_len} tokens"
        adapter = {} if self._adapter is None else {"adapter": self._adapter}
        return {"source": model.source, **adapter, "context": context, "chat template": template}

    def generate(self, messages: Sequence[Message], params: SamplingParams, answer: ChatAnswer) -> Generator[Piece]:
        """Stream the answer. Closing the generator aborts the request."""
        from lockstep.engine.request import Conversation as ChatPrompt
        from lockstep.engine.request import GenerationRequest

        if self.has_roles:
            prompt: ChatPrompt | str = ChatPrompt(messages, self._template_kwargs, self._reasoning)
        else:
            prompt = messages[-1]["content"]
        request = GenerationRequest(prompt, params, adapter=self._adapter or "")
        with closing(self._llm.stream(request)) as outputs:
            for output in outputs:
                if output.request is not None:
                    self.output = output.request
                    _fill_in(answer, output.request)
                yield Piece(output.text, output.reasoning)


def _fill_in(answer: ChatAnswer, output: RequestOutput) -> None:
    answer.finish_reason = output.completions[0].finish_reason.value
    answer.prompt_tokens, answer.cached_tokens = output.num_prompt_tokens, output.num_cached_tokens
    answer.output_tokens = output.num_output_tokens
    answer.ttft_s, answer.total_s = output.timings.ttft_s, output.timings.total_s


def _as_json(llm: LLM, answerer: LocalAnswerer, conversation: Conversation, prompt: str) -> dict[str, Any]:
    """Answer a prompt; returns the answer with its token counts, times and fingerprint."""
    answer = ChatAnswer()
    conversation.generate(prompt_of(prompt), None, answer)
    output = answerer.output
    assert output is not None, "an answer without an interrupt is complete"
    completion = output.completions[0]
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
            "tokens_per_second": answer.tokens_per_s,
        },
        "artifact": llm.model.fingerprint,
    }
