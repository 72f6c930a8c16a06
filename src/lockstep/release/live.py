"""A gate that follows growing files and says over HTTP what it finds, to Argo Rollouts, to Flagger, to anybody.

After each growth everything that is whole is judged again, so that it says of n pairs what `lockstep gate` says of
them. Judging takes at most a fifth of one core's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.errors import EvidenceError
from lockstep.release.verdict import Decision, Verdict, to_json
from lockstep.server.admission import AccessKeys, host_fault, loopback_hosts
from lockstep.server.errors import HttpError

POLL_S = 1.0
"""Between two looks at the files' sizes."""
MAX_DUTY = 0.2
"""Part of the time that judging may take."""
CHUNK_BYTES = 1 << 20
_OPEN_PATHS = ("/healthz",)
_HOOKS = "/flagger/"
MAX_HOOK_BYTES = 1 << 16
_NOT_YET = 412
"""What Flagger takes for no."""


class Follower:
    """A file of lines that grows, as a copy of its whole lines.

    Args:
        path: what grows; it may not be there yet.
        copy: where its whole lines go.
    """

    def __init__(self, path: Path, copy: Path) -> None:
        self.path = path
        self.copy = copy
        self._offset = 0

    def advance(self) -> bool:
        """Take over the lines that are new; tells whether there are any.

        Raises:
            EvidenceError: the file is shorter than it was, or cannot be read.
        """
        try:
            with open(self.path, "rb") as source, open(self.copy, "ab") as target:
                size = source.seek(0, 2)
                if size < self._offset:
                    raise EvidenceError(f"{self.path}: it is shorter than it was; a file that is followed only grows")
                end = self._end_of_lines(source, size)
                if end == self._offset:
                    return False
                source.seek(self._offset)
                while self._offset < end:
                    self._offset += target.write(source.read(min(CHUNK_BYTES, end - self._offset)))
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise EvidenceError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _end_of_lines(self, source: BinaryIO, size: int) -> int:
        """The place behind the last newline."""
        end = size
        while end > self._offset:
            start = max(self._offset, end - CHUNK_BYTES)
            source.seek(start)
            found = source.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return self._offset


@dataclass(slots=True)
class Standing:
    """The last verdict, or why there is none."""

    verdict: Verdict | None = None
    fault: str = "no whole line of both sides yet"

    @property
    def decision(self) -> Decision:
        """Without a verdict nothing is promoted and nothing rolled back."""
        return Decision.HOLD if self.verdict is None else self.verdict.decision

    @property
    def reason(self) -> str:
        return self.fault if self.verdict is None else self.verdict.reason


class LiveGate:
    """Judges followed files again and again.

    Args:
        followers: of one file with both sides, or of baseline and candidate.
        judge: a verdict on copies of the files.
    """

    def __init__(self, followers: Sequence[Follower], judge: Callable[[list[Path]], Verdict]) -> None:
        self.standing = Standing()
        self._followers = followers
        self._judge = judge

    def look(self) -> bool:
        """Judge if there is something new; tells whether there was."""
        try:
            grown = [follower.advance() for follower in self._followers]  # all of them, whichever is first
            if not any(grown):
                return False
            if all(follower.copy.exists() and follower.copy.stat().st_size for follower in self._followers):
                self.standing = Standing(self._judge([follower.copy for follower in self._followers]))
        except EvidenceError as error:
            self.standing = Standing(fault=str(error))
        return True

    async def run(self) -> None:
        """Look until it is cancelled."""
        while True:
            begun = time.monotonic()
            await asyncio.to_thread(self.look)
            took_s = time.monotonic() - begun
            await asyncio.sleep(max(POLL_S, took_s * (1 / MAX_DUTY - 1)))


def app_of(gate: LiveGate, host: str, api_keys: Sequence[str] = ()) -> ASGIApp:
    """The application: verdict, Argo's metric, Flagger's hooks.

    Args:
        host: where it listens; without a key only requests that call it by a name of this machine are answered.
    """

    async def verdict(_: Request) -> Response:
        standing = gate.standing
        if standing.verdict is None:
            return JSONResponse({"decision": None, "reason": standing.reason}, 503)
        return Response(to_json(standing.verdict), media_type="application/json")

    async def argo(_: Request) -> Response:
        standing = gate.standing
        body = {each.value: standing.decision is each for each in Decision}
        pairs = standing.verdict.summary.pairs if standing.verdict is not None else 0
        return JSONResponse({"decision": standing.decision.value, **body, "pairs": pairs, "reason": standing.reason})

    def hook(is_yes: Callable[[Decision], bool]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response:
            decision = gate.standing.decision
            body = {"decision": decision.value, "reason": gate.standing.reason}
            return JSONResponse(body, 200 if is_yes(decision) else _NOT_YET)

        return answer

    @asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(gate.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    routes = [
        Route("/healthz", lambda _: Response("ok\n", media_type="text/plain")),
        Route("/v1/verdict", verdict),
        Route("/argo", argo),
        Route("/flagger/confirm-promotion", hook(lambda each: each is Decision.PROMOTE), methods=["POST"]),
        Route("/flagger/rollback", hook(lambda each: each is Decision.ROLLBACK), methods=["POST"]),
        Route("/flagger/rollout", hook(lambda each: each is not Decision.ROLLBACK), methods=["POST"]),
    ]
    return _Guard(Starlette(routes=routes, lifespan=following), host, AccessKeys(api_keys))


class _Guard:
    """Asks for a key, or, without keys, for a name of this machine.

    Flagger sends no headers of one's own, so its hooks may bring the key as ``api_key`` of their metadata.
    """

    def __init__(self, app: ASGIApp, host: str, keys: AccessKeys) -> None:
        self._app = app
        self._hosts = loopback_hosts(host)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            fault = await self._fault(scope, receive)
            if fault is not None:
                await JSONResponse(fault.body(), fault.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _fault(self, scope: Scope, receive: Receive) -> HttpError | None:
        headers = scope["headers"]
        if not self._keys:
            return host_fault(self._hosts, headers)
        tenant = self._keys.tenant(headers)
        if tenant is None and scope["path"].startswith(_HOOKS):
            key = _key_of(await _body(receive))
            tenant = self._keys.tenant([(b"x-api-key", key)])
        return self._keys.refusal(tenant, scope["path"])


async def _body(receive: Receive) -> bytes:
    """The body of a hook; empty where it is larger than any is."""
    parts = []
    num_bytes = 0
    while num_bytes <= MAX_HOOK_BYTES:
        message = await receive()
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if not message.get("more_body"):
            return b"".join(parts)
    return b""


def _key_of(body: bytes) -> bytes:
    """The key in the metadata of a hook's body; empty: there is none."""
    try:
        key = msgspec.json.decode(body)["metadata"]["api_key"]
    except (msgspec.MsgspecError, TypeError, KeyError):
        return b""
    return key.encode() if isinstance(key, str) else b""
