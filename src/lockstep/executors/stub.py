"""Stub model: simulates a model with a byte tokenizer, without files, with configurable latencies and faults.

It is part of the package: benchmarks, replay, the cluster's examples and tests use it. It ignores the KV pool, and its
answers depend only on the request, so it can test data flow but not arithmetic. All tokens of a prompt are equally
likely.

Texts are tokenised byte by byte. Answers are, too, if they then end within ``max_tokens``. Otherwise each constant part
of an answer is one token (`HEAD_ID`, `MAX_ID`), so that it still ends normally with 8 tokens.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np

from lockstep.artifacts.model import Adapter, TokenizerParts
from lockstep.artifacts.task import MERGE
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, ExecutorError, UsageError
from lockstep.executors.base import Blocks, Geometry, Logits, StepBatch
from lockstep.option_fields import Range, option_types
from lockstep.spelling import MAX_LISTED, did_you_mean

SCHEME = "stub://"
SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
USER_ID, END_ID = 257, 259
HEAD_ID, MAX_ID = 260, 261
"""Tokens for the parts of an answer before and after its length. Texts never contain them, since no merge creates
them."""
VOCAB_SIZE = 262
DECLARED_BYTES = 800_000_000
"""Size of the weights that a stub model declares."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KEYWORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("refund", "charged", "invoice"), "billing"),
    (("error", "login"), "technical"),
    (("contract", "clause"), "legal"),
)
NONE_OF_THESE = "none"
MAX_ANSWERS_BYTES = 16 << 20
"""Maximum size of a file of answers."""
BYTES_PER_RANK = 1 << 20
"""Memory that a stub declares for each rank of an adapter."""
_MAX = " max="
_CHOSEN_LOGIT = 100.0


@dataclass(frozen=True, slots=True)
class StubOptions:
    """Options of a stub model, from ``stub://NAME?field=value&...``."""

    name: str
    field: str = ""
    """Field of an entry model's answers ``<field>=<id>``; empty: the stub is not an entry model."""
    ids: tuple[str, ...] = ()
    """Ids of the specialists that an entry model may name."""
    step_ms: Annotated[float, Range(0)] = 0.0
    """Duration of every step."""
    token_us: Annotated[float, Range(0)] = 0.0
    """Additional duration for every token of a step."""
    load_ms: Annotated[float, Range(0)] = 0.0
    fail_every: Annotated[int, Range(0)] = 0
    """Every n-th step fails; 0: none."""
    nan_every: Annotated[int, Range(0)] = 0
    """Every n-th sampled row is NaN; 0: none."""
    max_model_len: Annotated[int, Range(2)] = 8192
    block_size: Annotated[int, Range(1)] = 16
    answers: str = ""
    """Path of a file of scripted answers; see `read_answers`. Empty: there is none."""

    @classmethod
    def parse(cls, source: str) -> StubOptions:
        """Parse a ``stub://`` source.

        Raises:
            UsageError: it has unknown options or invalid values; the message lists all of them.
        """
        if MERGE in source:
            raise UsageError(f"{source}: a stub has no weights that an adapter can be merged into; omit {MERGE}…")
        parts = urlsplit(source)
        types = {name: type_ for name, type_ in option_types(cls).items() if name != "name"}
        values: dict[str, Any] = {"name": parts.netloc or "stub"}
        faults: list[str] = []
        for key, text in parse_qsl(parts.query, keep_blank_values=True):
            if key not in types:
                hint = did_you_mean(key, types)
                faults.append(f"unknown stub option {key!r}{hint and f' ({hint})'}")
            elif not text:
                faults.append(f"{key} has no value")
            elif key == "ids":
                values[key] = tuple(text.split(","))
            else:
                try:
                    values[key] = types[key].parse(text)
                except ValueError:
                    values[key] = None
                if not types[key].fits(values[key]):
                    faults.append(f"{key} is {text!r} and must be {types[key].right()}")
        if faults:
            shown = [*faults[:MAX_LISTED], "…"] if len(faults) > MAX_LISTED else faults
            raise UsageError(f"{source}: {'; '.join(shown)}; known: {', '.join(types)}")
        return cls(**values)


class ScriptedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of answers."""

    answer: str
    when: str | tuple[str, ...] = ()
    """Texts that the prompt must contain, all of them; empty: every prompt matches."""

    def fits(self, prompt: str) -> bool:
        texts = (self.when,) if isinstance(self.when, str) else self.when
        return all(text in prompt for text in texts)


def read_answers(options: StubOptions) -> tuple[ScriptedAnswer, ...]:
    """Read the scripted answers of a stub: JSON lines such as ``{"when": "text of the prompt", "answer": "text"}``. A
    prompt gets the first one that matches. If none does, the stub answers as without a file.

    Raises:
        ArtifactError: the file cannot be read, is too large, or has an invalid line.
    """
    if not options.answers:
        return ()
    path = Path(options.answers).expanduser()
    try:
        if path.stat().st_size > MAX_ANSWERS_BYTES:
            raise CorruptArtifactError(
                f"the file of answers has more than {MAX_ANSWERS_BYTES} bytes; make it shorter", path=path
            )
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ArtifactNotFoundError(
            f"the file of answers cannot be read: {error.strerror or error}", path=path
        ) from None
    answers: list[ScriptedAnswer] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                answers.append(msgspec.json.decode(line, type=ScriptedAnswer))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CorruptArtifactError(
                    f'{error}; a line is {{"when": "text of the prompt", "answer": "text"}}', path=f"{path}:{number}"
                ) from None
    return tuple(answers)


def stub_tokenizer_parts(name: str = "stub") -> TokenizerParts:
    """The byte tokenizer: token id = byte value, then the special tokens, then the parts of this stub's answers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {_head_of(name): HEAD_ID, _MAX: MAX_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return TokenizerParts(tokenizer, CHAT_TEMPLATE, None, "<|end|>", (END_ID,))


def reply_of(
    options: StubOptions, prompt_ids: Sequence[int], max_output_tokens: int, answers: Sequence[ScriptedAnswer] = ()
) -> Sequence[int]:
    """The whole answer without its end token, as a pure function of the request: in bytes, or in parts if only they
    leave room for the end.

    Args:
        answers: scripted answers from `read_answers`.
    """
    if answers:
        prompt = bytes([token for token in prompt_ids if token < 256]).decode(errors="replace")
        scripted = next((each.answer for each in answers if each.fits(prompt)), None)
        if scripted is not None:
            return scripted.encode()
    if options.field:
        begin = len(prompt_ids) - prompt_ids[::-1].index(USER_ID) if USER_ID in prompt_ids else 0
        text = bytes([token for token in prompt_ids[begin:] if token < 256]).decode(errors="replace").lower()
        return f"{options.field}={_route(text, options.ids)}".encode()
    num_bytes = b"%d" % sum([token < 256 for token in prompt_ids])
    most = b"%d" % max_output_tokens
    whole = _head_of(options.name).encode() + num_bytes + _MAX.encode() + most
    pieces = (HEAD_ID, *num_bytes, MAX_ID, *most)
    return pieces if len(pieces) < max_output_tokens <= len(whole) else whole


def open_stub_adapter(name: str, path: str) -> Adapter:
    """Open an adapter of a stub: a folder with adapter_config.json, of which a stub uses ``r``, ``lora_alpha`` and
    ``alora_invocation_tokens``. Its fingerprint covers all files of the folder.

    Raises:
        ArtifactError: there is no such folder, or its configuration is not valid.
    """
    folder = Path(path).expanduser()
    try:
        files = sorted(each for each in folder.iterdir() if each.is_file())
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=_StubAdapterConfig)
        contents = [each.read_bytes() for each in files]
    except OSError as error:
        raise ArtifactNotFoundError(f"no adapter can be read here: {error.strerror or error}", path=path) from None
    except msgspec.DecodeError as error:
        raise CorruptArtifactError(f"{error}", path=folder / "adapter_config.json") from None
    digest = blake2b(digest_size=16)
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    tokens = tuple(config.alora_invocation_tokens or ())
    scale, num_bytes = config.lora_alpha / config.r, sum(map(len, contents))
    return Adapter(name, folder, digest.hexdigest(), config.r, scale, {}, num_bytes, tokens)


def stub_adapter_bytes(rank: int) -> int:
    """Memory that a stub declares for an adapter of this rank."""
    return rank * BYTES_PER_RANK


class _StubAdapterConfig(msgspec.Struct, frozen=True):
    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: float = 1.0
    alora_invocation_tokens: list[int] | None = None


def _head_of(name: str) -> str:
    return f"[stub:{name}] ok len="


def _route(text: str, ids: tuple[str, ...]) -> str:
    """Route by a keyword, or by the id in the text: the longest one; ids that are whole words come before those within
    words."""
    for words, specialist in KEYWORDS:
        if specialist in ids and any(word in text for word in words):
            return specialist
    named = [specialist for specialist in ids if specialist.lower() in text]
    whole = [each for each in named if re.search(rf"(?<![\w-]){re.escape(each.lower())}(?![\w-])", text)]
    return max(whole or named, key=len, default=NONE_OF_THESE)


class _Script(msgspec.Struct, frozen=True):
    prompt_len: int
    reply: tuple[int, ...]
    adapted: bytes
    """Answer with an adapter, after the adapter's fingerprint."""


class StubExecutor:
    """Executor and SequenceObserver that computes each sequence's whole answer when it begins."""

    def __init__(self, options: StubOptions) -> None:
        self._options = options
        self._answers = read_answers(options)
        self.environment: Mapping[str, str] = {"executor": "stub", "model": options.name}
        self.machine: Mapping[str, str] = {}
        self._scripts: dict[int, _Script] = {}
        self._heads: dict[int, bytes] = {}
        """Beginning of the answers with the adapter in each slot."""
        self._sizes: dict[int, int] = {}
        self._num_steps = 0
        self._num_rows = 0
        self.geometry = Geometry(options.block_size, options.block_size, 1, options.max_model_len, VOCAB_SIZE)
        time.sleep(options.load_ms / 1e3)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """See the protocol. A stub's blocks hold no data."""

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        return np.zeros((len(blocks), self.geometry.bytes_per_block), np.uint8)

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """See the protocol. A stub's blocks hold no data."""

    def begin(self, seq_id: int, prompt_ids: Sequence[int], max_output_tokens: int) -> None:
        reply = tuple(reply_of(self._options, prompt_ids, max_output_tokens, self._answers))
        num_bytes = sum([token < 256 for token in prompt_ids])
        self._scripts[seq_id] = _Script(len(prompt_ids), reply, b"] ok len=%d" % num_bytes)

    def end(self, seq_id: int) -> None:
        self._scripts.pop(seq_id, None)

    def execute(self, batch: StepBatch) -> Logits:
        options, plan = self._options, batch.plan
        self._num_steps += 1
        if options.step_ms or options.token_us:
            time.sleep(options.step_ms / 1e3 + options.token_us / 1e6 * plan.num_tokens)
        if options.fail_every and self._num_steps % options.fail_every == 0:
            raise ExecutorError(f"stub {options.name}: step {plan.step} fails because fail_every={options.fail_every}")
        logits = np.zeros((len(batch.rows), VOCAB_SIZE), np.float32)
        drafts = plan.drafts or (0,) * len(plan.seq_ids)
        last: list[tuple[int, int, int]] = []
        further: list[tuple[int, int, int]] = []
        rows = zip(plan.seq_ids, plan.starts, plan.lengths, drafts, plan.samples, strict=True)
        token = -1
        for seq_id, start, length, count, samples in rows:
            token += length
            if samples:
                sampled = [(seq_id, start + length - back, token - back) for back in range(count, -1, -1)]
                last.append(sampled[0])
                further += sampled[1:]
        for row, (seq_id, position, token) in enumerate(last + further):
            script = self._scripts[seq_id]
            index = position - script.prompt_len
            slot = 0 if batch.adapters is None else int(batch.adapters[token])
            reply = self._heads[slot] + script.adapted if slot and not options.field else script.reply
            logits[row, reply[index] if index < len(reply) else END_ID] = _CHOSEN_LOGIT
            self._num_rows += 1
            if options.nan_every and self._num_rows % options.nan_every == 0:
                logits[row] = np.nan
        return logits

    def load_adapter(self, adapter: Adapter) -> int:
        """See `AdapterHost`. The answer of a stub with an adapter begins with its name and the adapter's fingerprint,
        unless it routes."""
        slot = next(slot for slot in itertools.count(1) if slot not in self._heads)
        self._heads[slot] = f"[stub:{self._options.name}+{adapter.fingerprint[:8]}".encode()
        self._sizes[slot] = adapter.num_bytes
        return slot

    def unload_adapter(self, slot: int) -> None:
        del self._heads[slot], self._sizes[slot]

    @property
    def adapter_bytes(self) -> int:
        return sum(self._sizes.values())

    def prompt_logits(self, first: int, last: int) -> Logits:
        """See the protocol. For a stub, every prompt is equally likely."""
        return np.zeros((last - first, VOCAB_SIZE), np.float32)

    def close(self) -> None:
        self._scripts.clear()
