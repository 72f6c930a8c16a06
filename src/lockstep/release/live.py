"""A gate that follows growing files and serves its verdict over HTTP, to Argo Rollouts, Flagger or any other client.

After each change it judges all whole lines again. So its verdict is that of `lockstep gate` on the same files at any
time, also after a restart. A check of files that did not grow reads only their last line, and judging takes at most a
fifth of the time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.errors import EvidenceError
from lockstep.release.verdict import Decision, Verdict, to_json
from lockstep.server.admission import AccessKeys, host_fault, loopback_hosts
from lockstep.server.errors import HttpError

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two looks at the files' sizes."""
MAX_DUTY = 0.2
"""Part of the time that judging may take."""
MAX_LINE_BYTES = 64 << 20
_OPEN_PATHS = ("/healthz", "/health/ready")
_HOOKS = "/flagger/"
MAX_HOOK_BYTES = 1 << 16
_NOT_YET = 412
"""Flagger takes it for no. Argo counts it as a measurement that did not come about, which it takes again; measurements
that are inconclusive it counts, and a metric that has reached its count is successful."""


class Follower:
    """A file of lines that grows, as a copy of its whole lines.

    A file that was cut off, or replaced by another, is copied anew, so that the copy is what the file is now.

    Args:
        path: what grows; it may not be there yet.
        copy: where its whole lines go.

    Raises:
        EvidenceError: it is a folder, or anything else that is no file.
    """

    def __init__(self, path: Path, copy: Path) -> None:
        if path.exists() and not path.is_file():
            raise EvidenceError(f"{path}: not a file; what is followed are files of lines")
        self.path = path
        self.copy = copy
        self._offset = 0
        self._tail = b""
        """Line before the offset: another one there is another file."""
        self._inode = 0
        """0: there is no file. Another file may have the same line there."""

    def advance(self) -> bool:
        """Copy the new lines; returns whether the copy has changed.

        Raises:
            EvidenceError: the file is gone, or cannot be read or copied.
        """
        try:
            with open(self.path, "rb") as source:
                inode = os.fstat(source.fileno()).st_ino
                source.seek(self._offset - len(self._tail))
                is_same = not self._offset or (inode, source.read(len(self._tail))) == (self._inode, self._tail)
                self._inode = inode
                if not is_same:
                    log.warning("%s was cut off or replaced; it is read from its beginning", self.path)
                    self._offset, self._tail = 0, b""
                begin = self._offset
                with open(self.copy, "ab" if begin else "wb") as target:
                    source.seek(begin)
                    while (line := source.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                        self._offset += target.write(line)
                        self._tail = line
                if len(line) == MAX_LINE_BYTES:
                    raise EvidenceError(f"{self.path}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
                return not is_same or self._offset > begin
        except FileNotFoundError:
            if not self._offset:
                return False
            self._inode = 0
            raise EvidenceError(f"{self.path}: it is gone; a verdict needs it as it was, or another") from None
        except OSError as error:
            self._offset, self._tail = 0, b""
            raise EvidenceError(f"{self.path}: cannot be followed: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Standing:
    """The last verdict, or why there is none."""

    verdict: Verdict | None = None
    fault: str = "no whole line of both sides yet"
    since_s: float = field(default_factory=time.monotonic)
    """When the evidence was found to be so."""

    @property
    def decision(self) -> Decision:
        """Without a verdict nothing is promoted and nothing rolled back."""
        return Decision.HOLD if self.verdict is None else self.verdict.decision

    @property
    def reason(self) -> str:
        return self.fault if self.verdict is None else self.verdict.reason

    @property
    def age_s(self) -> int:
        """Seconds since the evidence has changed."""
        return int(time.monotonic() - self.since_s)


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
        self._is_judged = False
        """Whether ``standing`` is of the copies as they are."""

    def look(self) -> bool:
        """Judge if there is something new; returns whether there was."""
        try:
            grown = [follower.advance() for follower in self._followers]  # all of them, whichever is first
            if self._is_judged and not any(grown):
                return False
        except EvidenceError as error:
            self._is_judged = False
            self._say(Standing(fault=str(error)))
            return True
        self._is_judged = True  # also where it cannot be: the same bytes could not the next time either
        copies = [follower.copy for follower in self._followers]
        is_there = all(copy.exists() and copy.stat().st_size for copy in copies)
        try:
            self._say(Standing(self._judge(copies)) if is_there else Standing())
        except EvidenceError as error:
            self._say(Standing(fault=str(error)))
        return is_there

    def _say(self, standing: Standing) -> None:
        """Set ``standing``, and log a new decision or fault."""
        before = self.standing
        if standing.verdict is None and standing.reason == before.reason:
            return
        self.standing = standing
        if standing.verdict is None:
            log.warning("no verdict: %s", standing.fault)
        elif before.verdict is None or standing.decision is not before.decision:
            log.info("%s: %s", standing.decision.value, standing.reason)

    async def run(self) -> None:
        """Look until it is cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # whatever it is, the last verdict may not stand for evidence that was not judged
                log.exception("judging failed")
                self.standing = Standing(fault="judging failed; the log of the gate has the error")
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
        age = {"Age": str(standing.age_s)}
        return Response(to_json(standing.verdict), media_type="application/json", headers=age)

    async def ready(_: Request) -> Response:
        return PlainTextResponse(*(("no verdict\n", 503) if gate.standing.verdict is None else ("ready\n", 200)))

    def hook(is_yes: Callable[[Decision], bool]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response:
            standing = gate.standing
            pairs = standing.verdict.summary.pairs if standing.verdict is not None else 0
            body = {"decision": standing.decision, "pairs": pairs, "age_s": standing.age_s, "reason": standing.reason}
            return JSONResponse(body, 200 if is_yes(standing.decision) else _NOT_YET)

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
        Route("/healthz", lambda _: PlainTextResponse("ok\n")),
        Route("/health/ready", ready),
        Route("/v1/verdict", verdict),
        Route("/argo", hook(lambda each: each is not Decision.HOLD)),
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
            key = _key_of(await _body(Request(scope, receive)))
            tenant = self._keys.tenant([(b"x-api-key", key)])
        return self._keys.refusal(tenant, scope["path"])


async def _body(request: Request) -> bytes:
    """The body of a hook; empty where it is larger than any is."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_HOOK_BYTES:
            return b""
    return body


def _key_of(body: bytes) -> bytes:
    """The key in the metadata of a hook's body; empty: there is none."""
    try:
        key = msgspec.json.decode(body)["metadata"]["api_key"]
    except (msgspec.MsgspecError, TypeError, KeyError):
        return b""
    return key.encode() if isinstance(key, str) else b""
