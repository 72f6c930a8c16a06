"""Handshake of a link over TCP: verifies that both ends have the same secret and version, before any message.

Format, all fields of fixed length except the versions:

    gateway: b"LSTP" form(1) length(1) version nonce(32)
    worker:  b"LSTP" form(1) length(1) version nonce(32) proof(32)   or   b"LSTP" 0 length(1) reason
    gateway: proof(32)
    worker:  b"\\x01"                                                 or   b"\\x00" length(1) reason

A proof is HMAC-SHA256, keyed by the secret, of the prover's role (``worker`` or ``gateway``) and of both greetings up
to their nonces. This prevents relaying or replaying a proof, and changing the version of either end. The handshake does
no input or output: bytes go in and bytes come out. The owner of the socket limits the time (`LIMIT_S`). An
unauthenticated peer cannot make it store more than a greeting.
"""

from __future__ import annotations

import hmac
from typing import Final

from lockstep.errors import LinkRefusedError

MAGIC: Final = b"LSTP"
FORM: Final = 1
"""Format version of this handshake. 0 marks a refusal."""
LIMIT_S: Final = 5.0
"""Time limit for the whole handshake, in seconds."""
MIN_SECRET_BYTES: Final = 16
NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HEAD_BYTES: Final = len(MAGIC) + 2
_WRONG_SECRET: Final = "the other end has another secret"


class _Handshake:
    """Base of both ends: collects bytes, and takes whole fields off them."""

    def __init__(self, secret: bytes, version: str, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES, "each link needs a new nonce"
        self._secret = secret
        self._version = version.encode()
        self._nonce = nonce
        self._received = bytearray()
        self._transcript = b""
        """First messages of gateway and worker up to their nonces."""
        self.is_done = False
        """True if the peer has proved that it has the secret, and received our proof."""

    @property
    def rest(self) -> bytes:
        """Bytes after the handshake, which begin the link's first frame."""
        return bytes(self._received)

    def _greeting(self) -> bytes:
        return MAGIC + bytes((FORM, len(self._version))) + self._version + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Add received bytes and return the bytes to send.

        Raises:
            LinkRefusedError: the handshake failed; the message states why.
        """
        self._received += data
        return self._advance()

    def _advance(self) -> bytes:
        raise NotImplementedError

    def _take(self, count: int) -> bytes | None:
        """Take this many bytes; None: they have not arrived yet."""
        if len(self._received) < count:
            return None
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _peer_greeting(self, num_extra: int) -> bytes | None:
        """Take the peer's greeting and this many bytes after it; None: they have not all arrived.

        Raises:
            LinkRefusedError: the peer refuses, has another version, or uses another format.
        """
        head = bytes(self._received[:_HEAD_BYTES])
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise LinkRefusedError("the other end is not a Lockstep gateway or worker")
        if len(head) < _HEAD_BYTES:
            return None
        form, length = head[-2:]
        if form == 0:
            reason = self._take(_HEAD_BYTES + length)
            if reason is None:
                return None
            raise LinkRefusedError(_printable(reason[_HEAD_BYTES:]))
        greeting = self._take(_HEAD_BYTES + length + NONCE_BYTES + num_extra)
        if greeting is None:
            return None
        version = greeting[_HEAD_BYTES : _HEAD_BYTES + length]
        if form != FORM or version != self._version:
            theirs, ours = _printable(version), self._version.decode()
            raise LinkRefusedError(f"the other end has version {theirs} and this one {ours}; install the same version")
        return greeting

    def _proof(self, role: bytes) -> bytes:
        return hmac.digest(self._secret, role + self._transcript, "sha256")


class GatewayHandshake(_Handshake):
    """The end that opens the link."""

    def __init__(self, secret: bytes, version: str, nonce: bytes) -> None:
        super().__init__(secret, version, nonce)
        self._is_proved = False

    def begin(self) -> bytes:
        """The bytes to send first."""
        return self._greeting()

    def _advance(self) -> bytes:
        sent = b""
        if not self._is_proved:
            theirs = self._peer_greeting(_PROOF_BYTES)
            if theirs is None:
                return b""
            self._transcript = self._greeting() + theirs[:-_PROOF_BYTES]
            if not hmac.compare_digest(theirs[-_PROOF_BYTES:], self._proof(b"worker")):
                raise LinkRefusedError(_WRONG_SECRET)
            self._is_proved = True
            sent = self._proof(b"gateway")
        if not self.is_done and self._received:
            self._read_answer()
        return sent

    def _read_answer(self) -> None:
        if self._received[0] > 1:
            raise LinkRefusedError("the other end does not respond like a Lockstep worker")
        if self._received[0] == 1:
            self._take(1)
            self.is_done = True
        elif len(self._received) >= 2 and len(self._received) >= 2 + self._received[1]:
            raise LinkRefusedError(_printable(bytes(self._received[2 : 2 + self._received[1]])))


class WorkerHandshake(_Handshake):
    """The end that accepts the link. After an error, it sends `refusal` before it closes the connection."""

    def __init__(self, secret: bytes, version: str, nonce: bytes) -> None:
        super().__init__(secret, version, nonce)
        self._has_greeted = False

    def _advance(self) -> bytes:
        sent = b""
        if not self._has_greeted:
            theirs = self._peer_greeting(0)
            if theirs is None:
                return b""
            self._transcript = theirs + self._greeting()
            self._has_greeted = True
            sent = self._greeting() + self._proof(b"worker")
        if not self.is_done:
            proof = self._take(_PROOF_BYTES)
            if proof is not None:
                if not hmac.compare_digest(proof, self._proof(b"gateway")):
                    raise LinkRefusedError(_WRONG_SECRET)
                self.is_done = True
                sent += b"\x01"
        return sent

    def refusal(self, error: LinkRefusedError) -> bytes:
        """Bytes that report the reason to the peer. They contain nothing secret."""
        reason = str(error).encode()[:255]
        head = b"\x00" if self._has_greeted else MAGIC + b"\x00"
        return head + bytes((len(reason),)) + reason


def check_secret(secret: bytes) -> bytes:
    """Return the secret without the white space around it.

    Raises:
        LinkRefusedError: it is too short.
    """
    stripped = secret.strip()
    if len(stripped) < MIN_SECRET_BYTES:
        raise LinkRefusedError(
            f"the secret has {len(stripped)} bytes but needs {MIN_SECRET_BYTES}; create one with `openssl rand -hex 32`"
        )
    return stripped


def _printable(text: bytes) -> str:
    """Decode text of an unknown peer, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.decode("utf-8", "replace"))
