"""Both ends of a link prove who they are, however their bytes are cut; whatever else comes ends it with a sentence."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LinkRefusedError
from lockstep.worker.handshake import GatewayHandshake, WorkerHandshake, check_secret

SECRET = b"0123456789abcdef"
OTHER = b"0123456789abcdeg"


def ends(
    secrets: tuple[bytes, bytes] = (SECRET, SECRET), versions: tuple[str, str] = ("1", "1")
) -> tuple[GatewayHandshake, WorkerHandshake]:
    return GatewayHandshake(secrets[0], versions[0], b"g" * 32), WorkerHandshake(secrets[1], versions[1], b"w" * 32)


def talk(gateway: GatewayHandshake, worker: WorkerHandshake, seed: int = 0) -> None:
    """Carry bytes in random pieces until neither has anything to say."""
    draw = random.Random(seed)
    to_worker, to_gateway = gateway.begin(), b""
    while to_worker or to_gateway:
        if to_worker:
            count = draw.randint(1, len(to_worker))
            piece, to_worker = to_worker[:count], to_worker[count:]
            try:
                to_gateway += worker.feed(piece)
            except LinkRefusedError as error:
                to_gateway, to_worker = to_gateway + worker.refusal(error), b""
        if to_gateway:
            count = draw.randint(1, len(to_gateway))
            piece, to_gateway = to_gateway[:count], to_gateway[count:]
            to_worker += gateway.feed(piece)


@given(seed=st.integers(0, 2**32 - 1))
def test_ends_with_the_same_secret_authenticate(seed: int) -> None:
    gateway, worker = ends()
    talk(gateway, worker, seed)
    assert gateway.is_done
    assert worker.is_done
    assert gateway.rest == worker.rest == b""


@given(seed=st.integers(0, 2**32 - 1))
def test_another_secret_or_version_is_refused_with_a_sentence(seed: int) -> None:
    for pair, wanted in (
        (ends((SECRET, OTHER)), "another secret"),
        (ends(versions=("1", "2")), "version 1 and this one 2; install the same"),
    ):
        with pytest.raises(LinkRefusedError, match=wanted):
            talk(*pair, seed)
        assert not pair[0].is_done
        assert not pair[1].is_done


def test_worker_rejects_a_gateway_without_the_secret() -> None:
    """It may not look at the worker's proof at all."""
    gateway, worker = ends()
    worker.feed(gateway.begin())
    with pytest.raises(LinkRefusedError, match="another secret") as caught:
        worker.feed(b"x" * 32)
    assert b"another secret" in worker.refusal(caught.value)
    assert not worker.is_done


def test_proof_is_invalid_for_another_link_and_for_the_other_end() -> None:
    gateway, worker = ends()
    greeting = gateway.begin()
    answer = worker.feed(greeting)
    proof = gateway.feed(answer)
    again = WorkerHandshake(SECRET, "1", b"v" * 32)
    again.feed(greeting)
    with pytest.raises(LinkRefusedError, match="another secret"):
        again.feed(proof)
    mirrored = GatewayHandshake(SECRET, "1", b"h" * 32)
    with pytest.raises(LinkRefusedError, match="another secret"):
        mirrored.feed(mirrored.begin() + proof)


def test_a_worker_refuses_its_own_proof_sent_back() -> None:
    """A proof names the end that it is of: who does not know the secret could else reflect what it was sent."""
    gateway, worker = ends()
    reflected = worker.feed(gateway.begin())[-32:]
    with pytest.raises(LinkRefusedError, match="another secret"):
        worker.feed(reflected)
    assert not worker.is_done


def test_bytes_after_the_handshake_are_kept() -> None:
    gateway, worker = ends()
    proof = gateway.feed(worker.feed(gateway.begin()))
    assert worker.feed(proof + b"frames") == b"\x01"
    assert worker.rest == b"frames"
    assert gateway.feed(b"\x01more") == b""
    assert gateway.rest == b"more"


@settings(max_examples=300)
@given(data=st.binary(max_size=200), is_near=st.booleans(), cut=st.integers(0, 60))
def test_invalid_bytes_end_only_their_connection_attempt(data: bytes, is_near: bool, cut: int) -> None:
    """Also such as begin rightly."""
    gateway, worker = ends()
    greeting = gateway.begin()
    sent = greeting[:cut] + data if is_near else data
    for end, given_bytes in ((worker, sent), (gateway, worker.feed(greeting)[:cut] + data if is_near else data)):
        with suppress(LinkRefusedError):
            end.feed(given_bytes)
        assert not end.is_done or given_bytes.startswith(greeting)


def test_refusal_text_of_a_peer_has_no_control_characters() -> None:
    gateway, _ = ends()
    with pytest.raises(LinkRefusedError) as caught:
        gateway.feed(b"LSTP\x00\x08\x1b[2J \xff\x07x")
    assert str(caught.value) == "?[2J \ufffd?x"


def test_handshake_buffers_at_most_a_greeting() -> None:
    """Bytes by single bytes, as long as it listens."""
    gateway, worker = ends()
    answer = worker.feed(gateway.begin())
    for end, begin in ((WorkerHandshake(SECRET, "1", b"v" * 32), b""), (worker, b""), (gateway, answer)):
        most = 0
        with pytest.raises(LinkRefusedError):  # noqa: PT012 - which byte is one too many, is not said
            end.feed(begin)
            for _ in range(5000):
                end.feed(b"L")
                most = max(most, len(end.rest))
        assert most < 400


def test_a_short_secret_is_refused() -> None:
    assert check_secret(b" " + SECRET + b"\n") == SECRET
    with pytest.raises(LinkRefusedError, match="openssl rand"):
        check_secret(b"short")
