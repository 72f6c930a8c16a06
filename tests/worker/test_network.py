"""A worker process that several gateways speak to over TCP: who may, what each hears, and what ends whose requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import LinkRefusedError, UnavailableError, UsageError, WorkerLostError
from lockstep.worker import network
from lockstep.worker import remote_clients as listening
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import Ask, AskHealth, ContentsChanged, Stop, Unload
from lockstep.worker.network import NetworkLink, WorkerAddress
from lockstep.worker.pending import Mailbox
from lockstep.worker.remote_clients import ListenOptions
from lockstep.worker.supervised import Notice, SupervisedWorker
from lockstep.worker.wire import framed
from tests.waiting import ENDLESS_MS, HANG_S, eventually
from tests.worker.support import SHORT, ask

SMALL = LoadOptions(EngineOptions(num_blocks=64))


class Nobody:
    def received(self, event: object) -> None: ...

    def lost(self, reason: str) -> None: ...


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("a secret of more than sixteen bytes\n")
    return str(path)


@asynccontextmanager
async def owned(secret: str, source: str = "stub://alpha", **listen: object) -> AsyncIterator[SupervisedWorker]:
    """A worker process that listens, with one replica, ``a``."""
    options = ListenOptions("127.0.0.1", 0, secret, **listen)  # type: ignore[arg-type]  # fields by name
    owner = SupervisedWorker(WorkerOptions("process", listen=options))
    await owner.start()
    try:
        await owner.load("a", source, SMALL)
        await eventually(lambda: owner.listening is not None)
        yield owner
    finally:
        await asyncio.wait_for(owner.close(), HANG_S)


def address_of(owner: SupervisedWorker, secret: str) -> WorkerAddress:
    assert owner.listening is not None
    assert owner.listening.fault == ""
    return WorkerAddress(owner.listening.host, owner.listening.port, secret)


@asynccontextmanager
async def gateway(address: WorkerAddress) -> AsyncIterator[SupervisedWorker]:
    worker = SupervisedWorker(WorkerOptions("network", address=address))
    await worker.start()
    try:
        await eventually(lambda: worker.loaded("a") is not None)
        yield worker
    finally:
        await asyncio.wait_for(worker.close(), HANG_S)


async def text_of(worker: SupervisedWorker, text: str) -> str:
    mailbox = worker.submit("a", ask(text, SHORT))
    try:
        return await read(mailbox)
    finally:
        worker.leave(mailbox)


async def read(mailbox: Mailbox) -> str:
    async with asyncio.timeout(HANG_S):
        while True:
            for output in await mailbox.take():
                if output.request is not None:
                    return output.request.text


async def num_open(worker: SupervisedWorker) -> int:
    checked = await worker.check()
    assert checked is not None
    assert checked.fault == ""
    return checked.num_open


async def all_ended(worker: SupervisedWorker) -> None:
    async def has_none_open() -> bool:
        return await num_open(worker) == 0

    await eventually(has_none_open)


async def test_gateways_at_once_get_their_own_answers_and_the_owner_its_own(secret: str) -> None:
    async with owned(secret) as owner, AsyncExitStack() as stack:
        address = address_of(owner, secret)
        gateways = [await stack.enter_async_context(gateway(address)) for _ in range(3)]
        everybody = [owner, *gateways]
        texts = ["x" * (1 + 7 * place + number) for number in range(5) for place in range(len(everybody))]
        asked = [text_of(everybody[index % len(everybody)], text) for index, text in enumerate(texts)]
        answers = await asyncio.gather(*asked)
        assert answers == [f"[stub:alpha] ok len={len(text)} max=40" for text in texts]
        for worker in everybody:
            assert worker.num_open == 0
            assert set(await worker.metrics()) == {"a"}


async def test_loads_and_unloads_are_seen_by_remote_clients_which_may_do_neither(secret: str) -> None:
    async with owned(secret) as owner, gateway(address_of(owner, secret)) as guest:
        await owner.load("b", "stub://beta", SMALL)
        await eventually(lambda: guest.loaded("b") is not None)
        await owner.unload("b")
        await eventually(lambda: guest.loaded("b") is None)
        link = await NetworkLink.open(Nobody(), address_of(owner, secret))
        link.send(Unload("a"))
        await eventually(lambda: not link.is_open)
        link.send(Stop())
        assert await text_of(guest, "abc") == "[stub:alpha] ok len=3 max=40"
        assert owner.loaded("a") is not None


async def test_the_requests_of_a_gateway_that_dies_are_ended_and_no_others(secret: str) -> None:
    async with owned(secret, "stub://alpha?step_ms=5") as owner, gateway(address_of(owner, secret)) as stays:
        address = address_of(owner, secret)
        goes = SupervisedWorker(WorkerOptions("network", address=address))
        await goes.start()
        await eventually(lambda: goes.loaded("a") is not None)
        going = [goes.submit("a", ask("x" * 9, SHORT)) for _ in range(3)]
        staying = stays.submit("a", ask("x" * 8, SHORT))
        assert goes.lifecycle.link is not None
        goes.lifecycle.link.kill()
        assert await read(staying) == "[stub:alpha] ok len=8 max=40"
        stays.leave(staying)
        await all_ended(owner)
        for mailbox in going:
            with pytest.raises(WorkerLostError, match="lost connection"):
                await read(mailbox)
            goes.leave(mailbox)
        await eventually(lambda: goes.loaded("a") is not None)
        assert await text_of(goes, "back") == "[stub:alpha] ok len=4 max=40"
        await goes.close()


async def test_every_gateway_receives_the_content_of_the_cache_also_when_it_connects_later(secret: str) -> None:
    """By the end of an answer."""
    prompt = "x" * 40
    async with owned(secret) as owner, AsyncExitStack() as stack:
        address = address_of(owner, secret)

        async def knowing() -> tuple[SupervisedWorker, dict[bytes, bool]]:
            held: dict[bytes, bool] = {}

            def noticed(notice: Notice) -> None:
                if isinstance(notice, ContentsChanged):
                    held.update(notice.news)

            worker = SupervisedWorker(WorkerOptions("network", address=address), noticed)
            await worker.start()
            stack.push_async_callback(worker.close)
            await eventually(lambda: worker.loaded("a") is not None)
            return worker, held

        first, known = await knowing()
        assert not known
        await text_of(first, prompt)
        assert len(known) == 4, "of prompt and answer"
        assert all(known.values())
        _, later = await knowing()
        await eventually(lambda: later == known)
        before = set(known)
        await owner.reset_prefix_cache()
        await text_of(first, "short")
        await eventually(lambda: not any(known[each] or later[each] for each in before))


async def test_a_killed_worker_is_lost_to_all(secret: str) -> None:
    async with owned(secret, f"stub://alpha?step_ms={ENDLESS_MS}") as owner:
        guest = SupervisedWorker(WorkerOptions("network", address=address_of(owner, secret)))
        await guest.start()
        await eventually(lambda: guest.loaded("a") is not None)
        mailbox = guest.submit("a", ask("abc", SHORT))
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="send the request again"):
            await read(mailbox)
        guest.leave(mailbox)
        assert guest.loaded("a") is None
        await guest.close()


async def test_another_secret_or_version_is_refused_with_a_sentence(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_text("another secret of more than sixteen bytes")
    async with owned(secret) as owner:
        address = address_of(owner, secret)
        with pytest.raises(LinkRefusedError, match="another secret"):
            await NetworkLink.open(Nobody(), replace(address, secret_file=str(other)))
        with monkeypatch.context() as patched:
            patched.setattr(network, "__version__", "9.9.9")
            with pytest.raises(LinkRefusedError, match=r"version 9\.9\.9 and this one .*install the same"):
                await NetworkLink.open(Nobody(), address)
        (tmp_path / "short").write_text("short")
        with pytest.raises(UsageError, match="openssl rand"):
            await NetworkLink.open(Nobody(), replace(address, secret_file=str(tmp_path / "short")))
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            await NetworkLink.open(Nobody(), replace(address, secret_file=str(tmp_path / "none")))
        with pytest.raises(UsageError, match="unencrypted"):
            await NetworkLink.open(Nobody(), replace(address, host="10.0.0.1"))
        async with gateway(address) as guest:
            assert await text_of(guest, "abc") == "[stub:alpha] ok len=3 max=40"
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await NetworkLink.open(Nobody(), address)


async def test_invalid_bytes_end_only_their_connection(secret: str) -> None:
    """Before the handshake, behind it, and frames that are cut."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    async with owned(secret) as owner, gateway(address_of(owner, secret)) as guest:
        address = address_of(owner, secret)
        for number in range(30):
            junk = draw.randbytes(draw.randrange(1, 3000))
            if number % 3 == 0:
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(junk if number % 2 else b"LSTP\x01" + junk)
                writer.close()
            else:
                link = await NetworkLink.open(Nobody(), address)
                assert link._transport is not None
                link.send(Ask(1, AskHealth())) if number % 3 == 1 else None  # another's id
                link._transport.write(framed(junk))
                await eventually(lambda link=link: not link.is_open)  # type: ignore[misc]  # mypy infers no lambda default
                await link.close()
            assert await text_of(guest, "abc") == "[stub:alpha] ok len=3 max=40"
        assert await num_open(owner) == 0


async def test_unauthenticated_connections_and_gateways_are_limited_in_number(secret: str) -> None:
    async with owned(secret) as owner, AsyncExitStack() as stack:
        address = address_of(owner, secret)
        strangers = [
            await asyncio.open_connection(address.host, address.port) for _ in range(listening.MAX_UNAUTHENTICATED)
        ]
        reader, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b"", "one more is hung up on at once"
        writer.close()
        for _, stranger in strangers:
            stranger.close()
        num_guests = 0
        async with asyncio.timeout(HANG_S):
            while num_guests < listening.MAX_CLIENTS:
                with contextlib.suppress(UnavailableError):  # as long as not all strangers are gone
                    stack.push_async_callback((await NetworkLink.open(Nobody(), address)).close)
                    num_guests += 1
        with pytest.raises(LinkRefusedError, match="the limit of 64 connected gateways is reached"):
            await NetworkLink.open(Nobody(), address)


async def test_tls_gives_the_same_answers_and_plain_text_or_an_unknown_certificate_is_rejected(
    secret: str, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    made = subprocess.run([*make.split(), "-keyout", str(key), "-out", str(cert)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("openssl is not installed")
    async with owned(secret, tls_cert=str(cert), tls_key=str(key)) as owner:
        address = replace(address_of(owner, secret), tls_ca=str(cert))
        async with gateway(address) as guest:
            assert await text_of(guest, "abc") == "[stub:alpha] ok len=3 max=40"
        with pytest.raises(UnavailableError):
            await NetworkLink.open(Nobody(), replace(address, tls_ca=""))
        with pytest.raises(UnavailableError, match="certificate"):
            await NetworkLink.open(Nobody(), replace(address, tls_ca=ssl.get_default_verify_paths().openssl_cafile))


async def test_a_worker_that_cannot_listen_reports_the_reason_and_serves_its_own_server(
    secret: str, tmp_path: Path
) -> None:
    for options, wanted in (
        (ListenOptions("0.0.0.0", 0, secret), "unencrypted"),
        (ListenOptions("127.0.0.1", 0, str(tmp_path / "none")), "cannot be read"),
        (ListenOptions("127.0.0.1", 0, secret, tls_cert=str(tmp_path / "none")), "certificate cannot be used"),
    ):
        owner = SupervisedWorker(WorkerOptions("process", listen=options))
        await owner.start()
        await owner.load("a", "stub://alpha", SMALL)
        await eventually(lambda owner=owner: owner.listening is not None)  # type: ignore[misc]  # mypy infers no lambda default
        assert owner.listening is not None
        assert wanted in owner.listening.fault
        assert await text_of(owner, "abc") == "[stub:alpha] ok len=3 max=40"
        await owner.close()
