"""Contents of requests in a recording: keyed digests, which can be compared but not read, or the whole content.

Two recordings with the same key show whether their servers received equal requests and gave equal answers, without a
token of either. A recording with content also contains what is needed to compute it again, but not the sender.

- The *secret* is the content of the operator's file (``--trace-key``), without white space around it; without such a
  file, 32 random bytes of this recording, which are not stored. The key is BLAKE2b-256 of it. Only its name is
  written, which is the digest of nothing: equal names, comparable digests.
- A *digest* is BLAKE2b-64 with that key, and as its person what it is of: ``key``, ``prompt``, ``parameters``,
  ``tokens``, ``vector`` or ``session``. Without the key a prompt cannot be guessed by its digest. Two things
  that differ have equal digests once in 2**64.
- Tokens are unsigned numbers of four bytes, vectors floats of four bytes, both little-endian.
- Parameters are msgpack, keys text and sorted: an array of what the request named of `SamplingParams`, and its
  pooling, its `logit_ids` or nil. That is all of a request that decides its model's output beside the prompt, but for
  the seed, which is drawn where none was named and is in the recording by itself. ``n`` and ``logprobs`` decide nothing
  and are left out.
"""

from __future__ import annotations

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
from lockstep.errors import TraceError
from lockstep.worker.flight.folder import TEXT_SUFFIX, FolderManifest, Listed, State, digest_of
from lockstep.worker.messages import TokenizerPayload
from lockstep.worker.wire import request_decoder, request_encoder

DIGEST_BYTES = 8
MAX_TEXT_BYTES = 1 << 28
"""Of one, unpacked: the largest vocabularies have some 30 MB."""
_TEXT_BYTES = 8
_KEY_BYTES = 32
Key = TypeVar("Key", bytes, str)


class Digests:
    """Digests under one key.

    Args:
        secret: of which the key is made; empty: a random one.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = blake2b(secret or secrets.token_bytes(_KEY_BYTES), digest_size=_KEY_BYTES).digest()
        self.key_name = self._digest(b"key", b"").hex()

    def prompt(self, prompt_ids: Sequence[int]) -> bytes:
        return self._digest(b"prompt", _packed(prompt_ids))

    def parameters(self, request: GenerationRequest) -> bytes:
        return self._digest(b"parameters", parameters_as_bytes(request))

    def output(self, generation: Generation) -> bytes:
        """The digest of a sequence that has ended: of its tokens, or of its vector where it was to give one."""
        if not generation.live.request.gives_vector:
            return self._digest(b"tokens", _packed(generation.tokens[generation.prompt_len :]))
        return self._digest(b"vector", vector_of(generation) or b"")

    def session(self, name: str) -> str:
        return self._digest(b"session", name.encode(errors="surrogatepass")).hex()

    def _digest(self, person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=person).digest()


class Numbers(Generic[Key]):
    """Dense numbers, counted as keys come; forgotten ones come again under new numbers."""

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
        """From now on remember what is requested; `end_forgetting` drops the rest."""
        self._kept = {}

    def end_forgetting(self) -> None:
        assert self._kept is not None, "forgetting ends once it has begun"
        self._numbers, self._kept = self._kept, None


def parameters_as_bytes(request: GenerationRequest) -> bytes:
    """All of a request that decides its model's output, but for its prompt and its seed; as msgpack."""
    params = replace(request.params, seed=None, n=1, logprobs=None)
    plain = msgspec.to_builtins((params, request.pooling or request.logit_ids or None), str_keys=True, order="sorted")
    return msgspec.msgpack.encode(plain)


def encode_request(live: LiveRequest, name_of: Callable[[str], int]) -> bytes:
    """The request as msgpack: prompt as token ids, the seed as drawn, the salt as a number, the requested model name.

    It has no tenant, session or deadlines, whose effects are recorded as commands, and none of the caller's names.
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
    """A recorded request.

    Raises:
        msgspec.MsgspecError: it is no request.
    """
    request = request_decoder().decode(data)
    assert not isinstance(request.prompt, (str, Conversation)), "a recorded prompt is token ids"
    return replace(request, prompt=tuple(request.prompt))


def write_text(manifest: FolderManifest, text: TokenizerPayload) -> str:
    """Keep a model's vocabulary and template in a recording's folder, once for all recordings there, and list it.

    Returns:
        Its name.

    Raises:
        OSError: it cannot be written.
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
    """The file of a vocabulary and template."""
    return folder / f"{name}{TEXT_SUFFIX}"


def read_text(folder: Path, name: str) -> TokenizerPayload:
    """A vocabulary and template that `write_text` kept.

    Raises:
        TraceError: it is not there, or not what was kept.
    """
    if not name:
        raise TraceError(
            f"{folder}: the recording's vocabulary could not be written; the log of its server has the reason"
        )
    path = text_path(folder, name)
    try:
        packed = path.read_bytes()
        if not 0 <= zstandard.frame_content_size(packed) <= MAX_TEXT_BYTES:
            raise TraceError(f"{path}: it is no vocabulary of a recording, which has at most {MAX_TEXT_BYTES} bytes")
        data = zstandard.ZstdDecompressor().decompress(packed)
    except OSError as error:
        raise TraceError(
            f"{path}: the vocabulary of the recording cannot be read: {error.strerror}; it belongs beside its files"
        ) from None
    except zstandard.ZstdError as error:
        raise TraceError(f"{path}: the vocabulary of the recording is damaged: {error}") from None
    if blake2b(data, digest_size=_TEXT_BYTES).hexdigest() != name:
        raise TraceError(f"{path}: it is not the vocabulary that was kept under that name")
    return msgspec.msgpack.decode(data, type=TokenizerPayload)


def tokens_of(result: StepResult, touched: Sequence[Generation]) -> list[tuple[int, ...]]:
    """Tokens of each row that sampled; none where an error or a vector came instead of a token."""
    return [
        () if reason is FinishReason.ERROR or generation.pooler is not None else generation.delta_ids
        for generation, reason in zip(touched, result.finishes, strict=True)
    ]


def vector_of(generation: Generation) -> bytes | None:
    """Vector of a sequence that has ended, as floats of four bytes; None: it gave none."""
    vector = generation.embedding()
    return None if vector is None else vector.astype("<f4").tobytes()


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)
