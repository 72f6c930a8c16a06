"""Handshake of a link over TCP: both ends prove that they know one secret and speak one version, before any message.

Format, all fields of fixed length but the versions:

    gateway: b"LSTP" form(1) length(1) version nonce(32)
    worker:  b"LSTP" form(1) length(1) version nonce(32) proof(32)   or   b"LSTP" 0 length(1) reason
    gateway: proof(32)
    worker:  b"\\x01"                                                 or   b"\\x00" length(1) reason

A proof is HMAC-SHA256, keyed by the secret, of who proves it (``worker`` or ``gateway``) and of both greetings up to
their nonces: nobody can pass on another's, play one again, or talk either end into another version. Pure: bytes in,
bytes out; whoever has the socket bounds the time (`LIMIT_S`). No stranger makes it keep more than a greeting.
"""

from __future__ import annotations

import hmac
from typing import Final

from lockstep.errors import LinkRefusedError

MAGIC: Final = b"LSTP"
FORM: Final = 1
"""Of this handshake; 0 stands for a refusal."""
LIMIT_S: Final = 5.0
"""For the whole of it."""
MIN_SECRET_BYTES: Final = 16
NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HEAD_BYTES: Final = len(MAGIC) + 2
_STRANGER: Final = "it has another secret"


class _End:
    """Work of both ends: collect bytes, and take whole fields off them."""

    def __init__(self, secret: bytes, version: str, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES, "a nonce is drawn anew for each link"
        self._secret = secret
        self._version = version.encode()
        self._nonce = nonce
        self._received = bytearray()
        self._transcript = b""
        """First messages of gateway and worker up to their nonces."""
        self.is_done = False
        """Whether the other end has proved that it has the secret, and received our proof."""

    @property
    def rest(self) -> bytes:
        """Bytes that came behind the handshake; they are the first of the link's frames."""
        return bytes(self._received)

    def _greeting(self) -> bytes:
        return MAGIC + bytes((FORM, len(self._version))) + self._version + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Take in what came; returns what is to be sent.

        Raises:
            LinkRefusedError: why there will be no link.
        """
        self._received += data
        return self._advance()

    def _advance(self) -> bytes:
        raise NotImplementedError

    def _take(self, count: int) -> bytes | None:
        """That many bytes, or None where they have not come yet."""
        if len(self._received) < count:
            return None
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _peer_greeting(self, num_behind: int) -> bytes | None:
        """The other end's greeting with as many bytes behind it, if it has all come.

        Raises:
            LinkRefusedError: it refuses, speaks another version, or none of ours.
        """
        head = bytes(self._received[:_HEAD_BYTES])
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise LinkRefusedError("the other end is no gateway or worker of Lockstep's")
        if len(head) < _HEAD_BYTES:
            return None
        form, length = head[-2:]
        if form == 0:
            reason = self._take(_HEAD_BYTES + length)
            if reason is None:
                return None
            raise LinkRefusedError(_printable(reason[_HEAD_BYTES:]))
        greeting = self._take(_HEAD_BYTES + length + NONCE_BYTES + num_behind)
        if greeting is None:
            return None
        version = greeting[_HEAD_BYTES : _HEAD_BYTES + length]
        if form != FORM or version != self._version:
            theirs, ours = _printable(version), self._version.decode()
            raise LinkRefusedError(f"the other end has version {theirs} and this one {ours}; install the same on both")
        return greeting

    def _proof(self, who: bytes) -> bytes:
        return hmac.digest(self._secret, who + self._transcript, "sha256")


class GatewayHandshake(_End):
    """The end that opens the link."""

    def __init__(self, secret: bytes, version: str, nonce: bytes) -> None:
        super().__init__(secret, version, nonce)
        self._is_proved = False

    def begin(self) -> bytes:
        """Bytes to be sent first."""
        return self._greeting()

    def _advance(self) -> bytes:
        sent = b""
        if not self._is_proved:
            theirs = self._peer_greeting(_PROOF_BYTES)
            if theirs is None:
                return b""
            self._transcript = self._greeting() + theirs[:-_PROOF_BYTES]
            if not hmac.compare_digest(theirs[-_PROOF_BYTES:], self._proof(b"worker")):
                raise LinkRefusedError(_STRANGER)
            self._is_proved = True
            sent = self._proof(b"gateway")
        if not self.is_done and self._received:
            self._read_answer()
        return sent

    def _read_answer(self) -> None:
        if self._received[0] > 1:
            raise LinkRefusedError("the other end does not speak as a worker of Lockstep's")
        if self._received[0] == 1:
            self._take(1)
            self.is_done = True
        elif len(self._received) >= 2 and len(self._received) >= 2 + self._received[1]:
            raise LinkRefusedError(_printable(bytes(self._received[2 : 2 + self._received[1]])))


class WorkerHandshake(_End):
    """The end that is spoken to. After a refusal, `refusal` is what it sends before it hangs up."""

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
                    raise LinkRefusedError(_STRANGER)
                self.is_done = True
                sent += b"\x01"
        return sent

    def refusal(self, error: LinkRefusedError) -> bytes:
        """Bytes that tell the other end why; nothing that it could not know."""
        reason = str(error).encode()[:255]
        head = b"\x00" if self._has_greeted else MAGIC + b"\x00"
        return head + bytes((len(reason),)) + reason


def check_secret(secret: bytes) -> bytes:
    """The secret without the white space around it.

    Raises:
        LinkRefusedError: it is too short to be one.
    """
    stripped = secret.strip()
    if len(stripped) < MIN_SECRET_BYTES:
        raise LinkRefusedError(
            f"the secret has {len(stripped)} bytes and needs {MIN_SECRET_BYTES}; make one with `openssl rand -hex 32`"
        )
    return stripped


def _printable(text: bytes) -> str:
    """Text of an unknown peer, without characters that a terminal acts on."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.decode("utf-8", "replace"))
