"""Contents of requests in a recording: keyed digests, which can be compared but not read, or the whole content.

Two recordings with the same key show whether their servers received equal requests and gave equal answers, without
any tokens. A recording with content also contains what is needed to compute it again, but not the sender.

- The *secret* is the content of the operator's file (``--trace-key``), without surrounding white space; without such a
  file, 32 random bytes that are not stored. The key is the BLAKE2b-256 of the secret. Only the key's name is written,
  which is the digest of an empty input. Digests can be compared if their keys have the same name.
- A *digest* is BLAKE2b-64 with that key, and with the kind of its input as ``person``: ``key``, ``prompt``,
  ``parameters``, ``tokens``, ``vector`` or ``session``. Without the key a prompt cannot be guessed from its digest.
  The probability that two different inputs have the same digest is 2**-64.
- Tokens are unsigned numbers of four bytes, vectors floats of four bytes, both little-endian.
- Parameters are msgpack with text keys, sorted: an array of the `SamplingParams` that the request set, and its pooling,
  its `logit_ids` or nil, and the name of its adapter if it has one. Together with prompt and seed they determine the
  model's output. The seed is recorded separately, since it is drawn if the request sets none. ``n`` and ``logprobs`` do
  not affect the output and are left out.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zstandard
from msgspec.structs import replace

from lockstep.core.request import FinishReason
from lockstep.core.step import StepResult
from lockstep.engine.generation import Generation, LiveRequest
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import TraceError, UsageError
from lockstep.worker.flight.folder import TEXT_SUFFIX, FolderManifest, Listed, State, digest_of
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import TokenizerPayload
from lockstep.worker.wire import request_decoder, request_encoder

log = logging.getLogger(__name__)
DIGEST_BYTES = 8
MAX_TEXT_BYTES = 1 << 28
"""Maximum size of a vocabulary with its template, decompressed. The largest known ones have about 30 MB."""
_TEXT_BYTES = 8
_KEY_BYTES = 32
Key = TypeVar("Key", bytes, str)


class Digests:
    """Digests under one key.

    Args:
        secret: input from which the key is derived; empty: a random one.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = blake2b(secret or secrets.token_bytes(_KEY_BYTES), digest_size=_KEY_BYTES).digest()
        self.key_name = self._digest(b"key", b"").hex()

    def prompt(self, prompt_ids: Sequence[int]) -> bytes:
        return self._digest(b"prompt", _packed(prompt_ids))

    def parameters(self, request: GenerationRequest) -> bytes:
        return self._digest(b"parameters", parameters_as_bytes(request))

    def output(self, generation: Generation) -> bytes:
        """Return the digest of a sequence that has ended: of its vector for an embedding request, else of its
        tokens."""
        if not generation.live.request.gives_vector:
            return self._digest(b"tokens", _packed(generation.tokens[generation.prompt_len :]))
        return self._digest(b"vector", vector_of(generation) or b"")

    def session(self, name: str) -> str:
        return self._digest(b"session", name.encode(errors="surrogatepass")).hex()

    def _digest(self, person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=person).digest()


class Numbers(Generic[Key]):
    """Numbers for keys, assigned consecutively in order of first use; a forgotten key gets a new number."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._kept: dict[Key, int] | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, key: Key) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._next += 1
        if self._kept is not None:
            self._kept[key] = number
        return number

    def forget_others(self) -> None:
        """Start to remember which keys are used; `end_forgetting` drops all others."""
        self._kept = {}

    def end_forgetting(self) -> None:
        assert self._kept is not None, "`forget_others` was called before"
        self._numbers, self._kept = self._kept, None


def secret_of(options: TraceOptions) -> bytes:
    """Operator's secret; empty: there is none, or the file can no longer be read."""
    try:
        return options.secret()
    except UsageError as error:
        log.warning("%s; the recording uses a random key, so it cannot be compared with others", error)
        return b""


def parameters_as_bytes(request: GenerationRequest) -> bytes:
    """Encode everything in a request that affects its model's output, except prompt and seed, as msgpack."""
    params = replace(request.params, seed=None, n=1, logprobs=None)
    adapter = (request.adapter,) if request.adapter else ()
    values = (params, request.pooling or request.logit_ids or None, *adapter)
    plain = msgspec.to_builtins(values, str_keys=True, order="sorted")
    return msgspec.msgpack.encode(plain)


def encode_request(live: LiveRequest, name_of: Callable[[str], int]) -> bytes:
    """Encode a request as msgpack: token ids of the prompt, drawn seed, number of the salt, requested model name.

    Tenant, session and deadlines are left out, since their effects are recorded as commands; so are the caller's ids.
    """
    request = live.request
    return request_encoder().encode(
        replace(
            request,
            prompt=live.prompt_ids,
            params=replace(request.params, seed=live.seed),
            cache_salt=str(name_of(request.cache_salt)) if request.cache_salt else "",
            tenant="",
            deadline_s=None,
            queue_deadline_s=None,
            session_id=None,
            session_owner="",
            external_id="",
            segment="",
        )
    )


def decode_request(data: bytes) -> GenerationRequest:
    """Decode a recorded request.

    Raises:
        msgspec.MsgspecError: the data is not a request.
    """
    request = request_decoder().decode(data)
    assert not isinstance(request.prompt, (str, Conversation)), "a recorded prompt is token ids"
    return replace(request, prompt=tuple(request.prompt))


def write_text(manifest: FolderManifest, text: TokenizerPayload) -> str:
    """Write a model's vocabulary and template to a recording's folder, once for all recordings there, and list the
    file.

    Returns:
        Name of the text, for `read_text`.

    Raises:
        OSError: the file cannot be written.
    """
    data = msgspec.msgpack.encode(text)
    name = blake2b(data, digest_size=_TEXT_BYTES).hexdigest()
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    path = text_path(manifest.folder, name)
    manifest.put(Listed(path.name, State.OPEN))
    if not path.exists() or path.read_bytes() != packed:
        manifest.system.write_file(path, packed)
    manifest.put(Listed(path.name, State.CLOSED, len(packed), digest_of(packed)))
    return name


def text_path(folder: Path, name: str) -> Path:
    """Path of the file with a vocabulary and template."""
    return folder / f"{name}{TEXT_SUFFIX}"


def read_text(folder: Path, name: str) -> TokenizerPayload:
    """Read a vocabulary and template that `write_text` wrote.

    Raises:
        TraceError: the file is missing or unreadable, or differs from the one that was written.
    """
    if not name:
        raise TraceError(
            f"{folder}: the recording's vocabulary could not be written; the log of its server has the reason"
        )
    path = text_path(folder, name)
    try:
        packed = path.read_bytes()
        if not 0 <= zstandard.frame_content_size(packed) <= MAX_TEXT_BYTES:
            raise TraceError(f"{path}: not a vocabulary of a recording, which has at most {MAX_TEXT_BYTES} bytes")
        data = zstandard.ZstdDecompressor().decompress(packed)
    except OSError as error:
        raise TraceError(
            f"{path}: the recording's vocabulary cannot be read: {error.strerror}; copy the file to its folder"
        ) from None
    except zstandard.ZstdError as error:
        raise TraceError(f"{path}: the vocabulary of the recording is damaged: {error}") from None
    if blake2b(data, digest_size=_TEXT_BYTES).hexdigest() != name:
        raise TraceError(f"{path}: the content differs from the vocabulary that was recorded under this name")
    return msgspec.msgpack.decode(data, type=TokenizerPayload)


def tokens_of(result: StepResult, touched: Sequence[Generation]) -> list[tuple[int, ...]]:
    """Tokens of each row that sampled; without those of an error, and empty for a vector."""
    return [
        generation.early_ids if reason is FinishReason.ERROR or generation.pooler is not None else generation.step_ids
        for generation, reason in zip(touched, result.finishes, strict=True)
    ]


def vector_of(generation: Generation) -> bytes | None:
    """Vector of a sequence that has ended, as floats of four bytes; None: it gave none."""
    vector = generation.embedding()
    return None if vector is None else vector.astype("<f4").tobytes()


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)
