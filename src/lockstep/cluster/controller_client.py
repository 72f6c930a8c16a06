"""Controller client of a gateway: reports the gateway's demand and applies the controller's state.

Requests never wait for the controller. Its state names the replicas, and the gateway keeps the connections to them.
When no controller runs, the last state applies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from lockstep.cluster.controller_state import ControllerState, GatewayReport, actions_for
from lockstep.cluster.planner import Action, Observed, Phase, PlanPolicy
from lockstep.cluster.sessions import SessionUpdate
from lockstep.errors import PlacingError, UnavailableError
from lockstep.hosts.values import LinkOptions
from lockstep.hosts.workers import HostedWorkers
from lockstep.system import SYSTEM, System
from lockstep.version import __version__

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Interval in seconds between two reports while nothing changes."""
MIN_REPORT_S = 0.02
"""Minimum interval in seconds between two reports."""
RETRY_S = 0.5
"""Delay in seconds before a controller that does not answer is called again."""
DISMISS_LIMIT_S = 120.0
"""Time in seconds for other gateways' requests to end and for the replicas to be unloaded."""
LEAVE_LIMIT_S = 1.0


class ControllerLink(Protocol):
    """Interface of `lockstep.cluster.controller.Controller`, in this process or another one.

    Raises (each method):
        PlacingError: the controller does not answer.
    """

    async def join(
        self, gateway: str, version: str, manifest: str, link: LinkOptions, drained: Mapping[str, str] | None = None
    ) -> ControllerState: ...
    async def follow(self, gateway: str, seen: int) -> ControllerState | None: ...
    async def report(self, gateway: str, report: GatewayReport) -> Sequence[SessionUpdate]: ...
    async def leave(self, gateway: str) -> None: ...
    async def begin_replace(self, gateway: str) -> None: ...
    async def end_replace(self, gateway: str, manifest: str | None) -> int: ...
    async def dismiss(self, key: str) -> None: ...
    async def drain(self, name: str, is_drained: bool) -> None: ...


class ControllerClient:
    """Connection of one gateway to the controller. Event loop only.

    Args:
        workers: receives the locations of replicas.
        on_state: called with every new state, after it was applied.
        report: returns this gateway's current report.
        on_sessions: called with the session updates of other gateways.
    """

    def __init__(
        self,
        controller: ControllerLink,
        workers: HostedWorkers,
        report: Callable[[], GatewayReport],
        on_state: Callable[[ControllerState], None],
        on_sessions: Callable[[Sequence[SessionUpdate]], None],
        system: System = SYSTEM,
    ) -> None:
        self._system, self._now_s = system, system.now_s
        self.gateway = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"
        self.state = ControllerState(-1)
        self.contact_s = self._now_s()
        """Time of the controller's last report."""
        self.fault = ""
        """Reason why the controller does not report, in one sentence; empty: it reports."""
        self._controller = controller
        self._workers = workers
        self._report = report
        self._on_state = on_state
        self._on_sessions = on_sessions
        self._manifest = ""
        self._is_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: tuple[object, ...] = ()

    async def start(self, manifest: str) -> str:
        """Join with a manifest. Returns the manifest that applies: if the cluster already has gateways, it is theirs.

        Raises:
            UsageError: the cluster runs another version.
            PlacingError, UnavailableError: the controller does not answer, or accepts no more gateways.
        """
        self._manifest = manifest
        self._apply(await self._controller.join(self.gateway, __version__, manifest, self._workers.link))
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._forever(self._follow)),
            loop.create_task(self._forever(self._send_reports)),
        ]
        return self.state.manifest

    async def close(self) -> None:
        """Stop following the controller, and leave the cluster."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            try:
                async with asyncio.timeout(LEAVE_LIMIT_S):
                    await self._controller.leave(self.gateway)
            except (TimeoutError, PlacingError, UnavailableError):
                pass  # the controller will notice that reports have stopped

    def decide(self, observed: Observed, now_s: float, policy: PlanPolicy) -> tuple[Action, ...]:
        """Actions that follow from the controller's state; replaces `lockstep.cluster.planner.plan` with several
        hosts."""
        seen = tuple(
            (each.key, each.phase, each.num_busy > 0, each.num_waiting, each.is_pinned) for each in observed.replicas
        )
        if seen != self._reported:
            self._reported = seen
            self._is_changed.set()
        return actions_for(self.state, observed)

    def manifest_applied(self, manifest: str) -> None:
        """Record that this gateway now serves a manifest."""
        self._manifest = manifest

    @property
    def newer_manifest(self) -> str:
        """Manifest that applies if this gateway serves another one; empty: it serves the one that applies."""
        return self.state.manifest if self.state.manifest not in ("", self._manifest) else ""

    async def begin_replace(self) -> None:
        """Acquire the right to replace the manifest; UnavailableError: another gateway has it."""
        await self._controller.begin_replace(self.gateway)

    async def end_replace(self, manifest: str | None) -> None:
        """Publish a manifest to all gateways; None: it could not be served."""
        if manifest is not None:
            self._manifest = manifest
        await self._controller.end_replace(self.gateway, manifest)

    async def dismiss(self, key: str) -> None:
        """Unload a group on all hosts; returns when it is unloaded."""
        self._is_changed.set()  # this gateway no longer holds it
        await self._controller.dismiss(key)
        try:
            async with asyncio.timeout(DISMISS_LIMIT_S):
                while self.state.phases.get(key) in (Phase.RESIDENT, Phase.UNLOADING):
                    await self._system.sleep(MIN_REPORT_S)
        except TimeoutError:
            raise UnavailableError(
                "other gateways still use the model; it is unloaded when their requests have ended"
            ) from None

    async def drain(self, name: str, is_drained: bool) -> None:
        """Drain a host or make it available again; HostNotFoundError: no host has this name."""
        await self._controller.drain(name, is_drained)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _forever(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await step()
                self._record_contact()
            except (PlacingError, UnavailableError) as error:
                if not self.fault:
                    log.warning("the cluster's controller does not report; replicas keep answering: %s", error)
                self.fault = str(error)
                self._workers.fault = f"the cluster's controller does not report: {error}"
                await self._system.sleep(RETRY_S)
            except Exception:  # without this loop the gateway would not follow the controller
                log.exception("internal error while following the cluster's controller")
                await self._system.sleep(RETRY_S)

    def _record_contact(self) -> None:
        now_s = self._now_s()
        if self.fault:
            log.warning("the cluster's controller reports again after %.1f s", now_s - self.contact_s)
        self.contact_s, self.fault, self._workers.fault = now_s, "", self.state.fault
        self._workers.record_contact(is_current=not self.state.fault)

    async def _follow(self) -> None:
        state = await self._controller.follow(self.gateway, self.state.version)
        if state is None:  # it is a new controller, or has removed this gateway
            drained = {host.node_id: host.name for host in self.state.hosts if host.is_drained}
            state = await self._controller.join(self.gateway, __version__, self._manifest, self._workers.link, drained)
            self._is_changed.set()
        if state != self.state or self.newer_manifest:
            self._apply(state)

    async def _send_reports(self) -> None:
        if news := await self._controller.report(self.gateway, self._report()):
            self._on_sessions(news)
        await self._system.sleep(MIN_REPORT_S)
        try:
            async with asyncio.timeout(REPORT_S):
                await self._is_changed.wait()
        except TimeoutError:
            pass
        self._is_changed.clear()

    def _apply(self, state: ControllerState) -> None:
        self.state = state
        self._workers.trouble = ""
        self._workers.apply(state.places)
        for key in tuple(self._workers.groups):
            if state.phases.get(key, Phase.ABSENT) in (Phase.ABSENT, Phase.UNLOADING):
                self._workers.cancel_load(key)
        self._on_state(state)
