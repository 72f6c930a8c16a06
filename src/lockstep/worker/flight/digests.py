"""Keyed digests of a recording: prompts, parameters and outputs that can be compared, and never read.

Whether two servers were asked the same and answered the same is seen from two recordings with the same key, without a
token of either.

- The *secret* is the content of the operator's file (``--trace-key``), without white space around it; without such a
  file 32 random bytes of this recording, which nobody keeps. The key is BLAKE2b-256 of it. Its name, which is all that
  is written of it, is the digest of nothing: equal names, comparable digests.
- A *digest* is BLAKE2b-64 with that key, and as its person what it is of: ``key``, ``prompt``, ``parameters``,
  ``tokens`` or ``vector``. Without the key nobody can guess a prompt and look for its digest. Two things that differ
  have equal digests once in 2**64.
- Tokens are unsigned numbers of four bytes, vectors floats of four bytes, both little-endian.
- Parameters are msgpack, keys text and sorted: an array of what the request named of `SamplingParams`, and its pooling
  or nil. That is all of a request that decides its model's output beside the prompt, but for the seed, which is drawn
  where none was named and is in the recording by itself. ``n`` and ``logprobs`` decide nothing and are left out.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from lockstep.engine.generation import Generation, LiveRequest

DIGEST_BYTES = 8
_KEY_BYTES = 32


class Digests:
    """Digests under one key.

    Args:
        secret: of which the key is made; empty: a random one.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = blake2b(secret or secrets.token_bytes(_KEY_BYTES), digest_size=_KEY_BYTES).digest()
        self.key_name = self._digest(b"key", b"").hex()

    def prompt(self, live: LiveRequest) -> bytes:
        return self._digest(b"prompt", _packed(live.prompt_ids))

    def parameters(self, live: LiveRequest) -> bytes:
        request = live.request
        params = replace(request.params, seed=None, n=1, logprobs=None)
        plain = msgspec.to_builtins((params, request.pooling), str_keys=True, order="sorted")
        return self._digest(b"parameters", msgspec.msgpack.encode(plain))

    def output(self, generation: Generation) -> bytes:
        """The digest of a sequence that has ended: of its tokens, or of its vector where it was to give one."""
        if generation.pooler is None:
            return self._digest(b"tokens", _packed(generation.tokens[generation.prompt_len :]))
        vector = generation.embedding()
        return self._digest(b"vector", b"" if vector is None else vector.astype("<f4").tobytes())

    def _digest(self, person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=person).digest()


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)
