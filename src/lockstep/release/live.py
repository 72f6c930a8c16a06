"""Live gate: follows growing files and serves its verdict over HTTP, to Argo Rollouts, Flagger or any other client.

After each change it judges all complete lines again. Its verdict is therefore always that of `lockstep gate` on the
same files, also after a restart. For a file that did not grow, a check reads only the last line. Judging takes at most
a fifth of the time.
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
"""Interval between two checks of the files, in seconds."""
MAX_DUTY = 0.2
"""Maximum fraction of the time that is spent on judging."""
MAX_LINE_BYTES = 64 << 20
_OPEN_PATHS = ("/healthz", "/health/ready")
_HOOKS = "/flagger/"
MAX_HOOK_BYTES = 1 << 16
_NOT_YET = 412
"""HTTP status of an undecided verdict. Flagger reads it as no. Argo reads it as a failed measurement and repeats the
measurement. An inconclusive measurement would be wrong: Argo counts it, and a metric that has reached its count is
successful."""


class Follower:
    """Copies the complete lines of a growing file.

    If the file was truncated or replaced, it is copied again from its beginning, so that the copy matches the file.

    Args:
        path: growing file. It need not exist yet.
        copy: path of the copy.

    Raises:
        EvidenceError: the path exists and is not a regular file.
    """

    def __init__(self, path: Path, copy: Path) -> None:
        if path.exists() and not path.is_file():
            raise EvidenceError(f"{path}: not a regular file; the gate can only follow files of JSON lines")
        self.path = path
        self.copy = copy
        self._offset = 0
        self._tail = b""
        """Line before the offset. If the file has another line there, it was replaced."""
        self._inode = 0
        """Inode of the file, which detects a replacement with the same line before the offset; 0: no file yet."""

    def advance(self) -> bool:
        """Copy the new lines.

        Returns:
            True if the copy has changed.

        Raises:
            EvidenceError: the file was deleted, or cannot be read or copied.
        """
        try:
            with open(self.path, "rb") as source:
                inode = os.fstat(source.fileno()).st_ino
                source.seek(self._offset - len(self._tail))
                is_same = not self._offset or (inode, source.read(len(self._tail))) == (self._inode, self._tail)
                self._inode = inode
                if not is_same:
                    log.warning("%s was truncated or replaced; reading it from its beginning", self.path)
                    self._offset, self._tail = 0, b""
                begin = self._offset
                with open(self.copy, "ab" if begin else "wb") as target:
                    source.seek(begin)
                    while (line := source.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                        self._offset += target.write(line)
                        self._tail = line
                if len(line) == MAX_LINE_BYTES:
                    raise EvidenceError(f"{self.path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB")
                return not is_same or self._offset > begin
        except FileNotFoundError:
            if not self._offset:
                return False
            self._inode = 0
            raise EvidenceError(f"{self.path}: the file was deleted; restore it or write a new one") from None
        except OSError as error:
            self._offset, self._tail = 0, b""
            raise EvidenceError(f"{self.path}: cannot follow the file: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class GateState:
    """Latest verdict, or the reason why there is none."""

    verdict: Verdict | None = None
    fault: str = "no complete line of both sides yet"
    since_s: float = field(default_factory=time.monotonic)
    """Time of the last change of the evidence, on the monotonic clock."""

    @property
    def decision(self) -> Decision:
        """Decision of the verdict; hold without a verdict."""
        return Decision.HOLD if self.verdict is None else self.verdict.decision

    @property
    def reason(self) -> str:
        return self.fault if self.verdict is None else self.verdict.reason

    @property
    def age_s(self) -> int:
        """Seconds since the evidence last changed."""
        return int(time.monotonic() - self.since_s)


class LiveGate:
    """Judges followed files after every change.

    Args:
        followers: one for a file with both sides, or one each for baseline and candidate.
        judge: function that returns a verdict on copies of the files.
    """

    def __init__(
        self, followers: Sequence[Follower], judge: Callable[[list[Path]], Verdict], poll_s: float = POLL_S
    ) -> None:
        self._poll_s = poll_s
        self.state = GateState()
        self._followers = followers
        self._judge = judge
        self._is_judged = False
        """True if ``state`` belongs to the current copies."""

    def check(self) -> bool:
        """Judge the files if they changed.

        Returns:
            True if the state may have changed.
        """
        try:
            grown = [follower.advance() for follower in self._followers]  # a list: every follower has to advance
            if self._is_judged and not any(grown):
                return False
        except EvidenceError as error:
            self._is_judged = False
            self._set_state(GateState(fault=str(error)))
            return True
        self._is_judged = True  # also if judging fails: it would fail again with the same bytes
        copies = [follower.copy for follower in self._followers]
        is_there = all(copy.exists() and copy.stat().st_size for copy in copies)
        try:
            self._set_state(GateState(self._judge(copies)) if is_there else GateState())
        except EvidenceError as error:
            self._set_state(GateState(fault=str(error)))
        return is_there

    def _set_state(self, state: GateState) -> None:
        """Set ``state``, and log a new decision or fault."""
        before = self.state
        if state.verdict is None and state.reason == before.reason:
            return
        self.state = state
        if state.verdict is None:
            log.warning("no verdict: %s", state.fault)
        elif before.verdict is None or state.decision is not before.decision:
            log.info("%s: %s", state.decision.value, state.reason)

    async def run(self) -> None:
        """Check the files repeatedly until cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await asyncio.to_thread(self.check)
            except Exception:  # the old verdict must not be served for evidence that was not judged
                log.exception("judging failed")
                self.state = GateState(fault="judging failed; see the gate's log for the error")
            took_s = time.monotonic() - begun
            await asyncio.sleep(max(self._poll_s, took_s * (1 / MAX_DUTY - 1)))


def app_of(gate: LiveGate, host: str, api_keys: Sequence[str] = ()) -> ASGIApp:
    """ASGI application with the verdict, Argo's metric and Flagger's hooks.

    Args:
        host: address on which the server listens. Without API keys, only requests whose Host header names this machine
            are answered.
        api_keys: accepted API keys.
    """

    async def verdict(_: Request) -> Response:
        state = gate.state
        if state.verdict is None:
            return JSONResponse({"decision": None, "reason": state.reason}, 503)
        age = {"Age": str(state.age_s)}
        return Response(to_json(state.verdict), media_type="application/json", headers=age)

    async def ready(_: Request) -> Response:
        return PlainTextResponse(*(("no verdict\n", 503) if gate.state.verdict is None else ("ready\n", 200)))

    def hook(is_yes: Callable[[Decision], bool]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response:
            state = gate.state
            pairs = state.verdict.summary.pairs if state.verdict is not None else 0
            body = {"decision": state.decision, "pairs": pairs, "age_s": state.age_s, "reason": state.reason}
            return JSONResponse(body, 200 if is_yes(state.decision) else _NOT_YET)

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
    """Middleware that requires an API key, or, without keys, a Host header that names this machine.

    Flagger cannot send custom headers, so its hooks may have the key as ``api_key`` in their metadata.
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
    """Body of a hook; empty if it is longer than `MAX_HOOK_BYTES`."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_HOOK_BYTES:
            return b""
    return body


def _key_of(body: bytes) -> bytes:
    """API key in the metadata of a hook's body; empty if there is none."""
    try:
        key = msgspec.json.decode(body)["metadata"]["api_key"]
    except (msgspec.MsgspecError, TypeError, KeyError):
        return b""
    return key.encode() if isinstance(key, str) else b""
