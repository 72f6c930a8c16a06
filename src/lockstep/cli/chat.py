"""`lockstep chat`: chat in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import to_builtins

from lockstep.cli import options as flags
from lockstep.cli.conversation import (
    ANY_VOCABULARY,
    ChatAnswer,
    Conversation,
    Message,
    answer_one,
    converse,
    system_of,
)
from lockstep.cli.flag_groups import SWITCH, with_flags
from lockstep.cli.terminal import Piece
from lockstep.errors import RemoteError, UsageError
from lockstep.executors.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lockstep.bench.remote import RemoteServer

CHAT_PATH, RAW_PATH = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """Flags of `lockstep chat`."""

    base_url: flags.BaseUrl = flags.DEFAULT_URL
    model: flags.RemoteModel = None
    api_key: flags.ApiKey = None
    prompt: flags.Prompt = None
    system: flags.System = None
    raw: Annotated[bool, SWITCH] = False
    """Complete the prompt without the chat template, with /v1/completions."""
    max_tokens: int | None = None
    """Maximum number of new tokens."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Sample from the most likely tokens whose total probability is this value."""
    seed: int | None = None
    """Seed of the sampling; a server may return different answers despite equal seeds."""
    extra_body: flags.ExtraBody = None
    verbose: flags.Verbose = False
    debug: flags.Debug = False


@with_flags
def chat(given: ChatFlags) -> None:
    """Chat with a server that has the OpenAI API, by default a local Lockstep."""
    from lockstep.bench.protocol import Target
    from lockstep.bench.remote import RemoteServer

    if given.raw and given.system is not None:
        raise UsageError("--system does not apply to --raw, which completes the prompt without a chat template")
    names = ("max_tokens", "temperature", "top_p", "seed")
    params = SamplingParams(**{name: getattr(given, name) for name in names})
    params.validate(ANY_VOCABULARY)
    with RemoteServer(Target.parse(given.base_url, given.api_key)) as remote:
        extra = flags.extra_fields(given.extra_body)
        answerer = RemoteAnswerer(remote, remote.model_or_first(given.model), extra, has_roles=not given.raw)
        conversation = Conversation(answerer, params, system_of(given.system), is_verbose=given.verbose)
        if given.prompt is None:
            converse(conversation)
        else:
            answer_one(conversation, given.prompt)


class RemoteAnswerer:
    """Answers of a server's model. Sampling parameters override fields of --extra-body."""

    def __init__(self, remote: RemoteServer, model: str, extra: dict[str, Any], *, has_roles: bool) -> None:
        self.model = model
        self.has_roles = has_roles
        self._remote = remote
        self._fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **extra}

    @property
    def defaults(self) -> Mapping[str, object]:
        """Empty mapping, because the server does not report its defaults."""
        return {}

    def facts(self) -> Mapping[str, str]:
        """Server, context length and chat template of the model, as far as the server reports them."""
        try:
            context = self._remote.context_of(self.model)
        except RemoteError:
            context = None
        return {
            "server": self._remote.target.url,
            "context": "unknown" if context is None else f"{context} tokens",
            "chat template": "the server's" if self.has_roles else "none; each message is completed alone",
        }

    def generate(self, messages: Sequence[Message], params: SamplingParams, answer: ChatAnswer) -> Generator[Piece]:
        """Stream the answer. Closing the generator closes the connection, which ends the generation on the server."""
        body = self._fixed | to_builtins(params)
        if self.has_roles:
            path, body["messages"] = CHAT_PATH, messages
        else:
            path, body["prompt"] = RAW_PATH, messages[-1]["content"]
        with closing(self._remote.stream(path, body)) as chunks:
            for chunk in chunks:
                for choice in chunk.choices[:1]:
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
                    if choice.brings_tokens:
                        yield Piece(choice.content, choice.thoughts)
                if chunk.usage is not None:
                    answer.prompt_tokens = chunk.usage.prompt_tokens
                    answer.output_tokens = chunk.usage.completion_tokens
