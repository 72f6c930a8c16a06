"""Connection of a process with Ray: which cluster it joins, by which token and variables, and calls that may block.

The only file that imports Ray, at the first connection. Ray reads its variables then, and processes that it starts
inherit them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import LockstepError, PlacingError

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_LIMIT_S = 60.0
"""For Ray to let us in, or for a cluster of our own to start."""
CALL_LIMIT_S = 10.0
MAX_CALLS = 64
"""Blocking calls of Ray at once. One that never returns keeps its place, so that a Ray that hangs has no more threads
of ours than this."""
OWN_STORE_BYTES = 80_000_000
"""Object store of a cluster of our own, which puts nothing into it; Ray asks for as much."""
TOKEN_FILE = "~/.config/lockstep/ray_token"
"""The token of a cluster of our own, made where it is missing, and of others where Ray has none."""
RAYS_TOKEN_FILE = "~/.ray/auth_token"
REACH_LIMIT_S = 5.0
"""Limit of the time in which the address has to accept a connection; Ray itself would try for minutes."""
GCS_LIMIT_S = 2_000_000_000
"""Seconds without Ray's head after which this process ends itself: never, since replicas answer without it."""
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class Connection:
    """This process as a driver of Ray's, in a thread that lives as long: Ray's processes end with who started them."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        """None: a cluster of our own."""
        self._is_open = threading.Event()
        self._is_leaving = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="lockstep-ray", daemon=True)

    async def open(self) -> None:
        """Connect; PlacingError: why that cannot be."""
        self._thread.start()
        where = f"Ray at {self.address}" if self.address else "a Ray cluster on this machine"
        await Calls().do(where, partial(self._is_open.wait, CONNECT_LIMIT_S), 2 * CONNECT_LIMIT_S)
        if isinstance(self._fault, ImportError):
            raise PlacingError("Ray is not installed here; install it with: pip install 'lockstep-llm[ray]'")
        if isinstance(self._fault, ConnectionError):
            raise PlacingError(
                f"{where} does not let us in; its token must be the same here (RAY_AUTH_TOKEN_PATH is "
                f"{os.environ.get('RAY_AUTH_TOKEN_PATH') or 'not set'}), and Ray of one version on each host"
            )
        if self._fault is not None or not self._is_open.is_set():
            raise PlacingError(f"{where} cannot be used: {sentence(self._fault) if self._fault else 'no answer'}")

    async def close(self) -> None:
        """Leave Ray; a cluster of our own ends with all its replicas."""
        self._is_leaving.set()
        with contextlib.suppress(PlacingError):
            await Calls().do("leaving Ray", self._thread.join, CALL_LIMIT_S)

    def _live(self) -> None:
        try:
            ray = imported()
            if ray.is_initialized():
                self._join(ray.get_runtime_context().gcs_address)
                return
            _keep_quiet(ray)
            own = {"include_dashboard": False, "object_store_memory": OWN_STORE_BYTES} if not self.address else {}
            # Its namespace is of no account: each actor is named with the cluster's.
            ray.init(self.address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **own)
        except BaseException as error:  # Ray exits the interpreter where it cannot start
            self._fault = error
            return
        finally:
            self._is_open.set()
        self._is_leaving.wait()
        ray.shutdown()

    def _join(self, joined: str) -> None:
        """Use the connection of this process: Ray has one in a process, and its opener owns it."""
        if self.address not in (None, joined):
            raise PlacingError(f"this process belongs to the Ray cluster at {joined} already")


class Calls:
    """Blocking calls of Ray, each on a thread of its own and no more than `MAX_CALLS` at once."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_CALLS)

    async def do(self, what: str, work: Callable[[], T], limit_s: float = CALL_LIMIT_S) -> T:
        """Do work that may block; a caller that is cancelled leaves it to its end.

        Raises:
            PlacingError: it takes too long, or Ray raised an error over it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            self._places.release()
            if not done.done() and error is not None:
                done.set_exception(error)
            elif not done.done():
                done.set_result(value)  # type: ignore[arg-type]  # a value, where there is no error

        def body() -> None:
            value, fault = None, None
            try:
                value = work()
            except BaseException as error:  # callers that wait for it would wait for ever
                fault = error if isinstance(error, Exception) else RuntimeError(repr(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits any more
                loop.call_soon_threadsafe(settle, value, fault)

        try:
            async with asyncio.timeout(limit_s):
                await self._places.acquire()
                threading.Thread(target=body, name="lockstep-ray-call", daemon=True).start()
                return await done
        except TimeoutError:
            raise PlacingError(f"{what}: Ray has not answered within {limit_s:g} s") from None
        except LockstepError:
            raise
        except Exception as error:
            raise PlacingError(f"{what}: {sentence(error)}") from error


# -- where, and as whom ----------------------------------------------------------------------------------------------


async def choose_address(ray: str) -> str | None:
    """The address of the cluster that a manifest's ``ray`` names; None: none is there, and we start our own.

    Raises:
        PlacingError: no one listens at an address that was named.
    """
    named = os.environ.get("RAY_ADDRESS", "") if ray == "auto" else ray
    if named and named != "auto":
        if not await _is_there(named):
            said = "RAY_ADDRESS" if ray == "auto" else "`hosts.ray`"
            raise PlacingError(
                f"no Ray cluster answers at {named}, which is {said}; start it there with `ray start --head`, or say"
                " where it is as HOST:PORT"
            )
        return named
    joined = _joined()
    return joined if joined and await _is_there(joined) else None


def prepare_environment(address: str | None) -> None:
    """Set Ray's variables for this process, before Ray is imported; those that are set already stay as they are."""
    set_first = os.environ.setdefault
    set_first("RAY_USAGE_STATS_ENABLED", "0")
    set_first("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # signals are ours to handle
    set_first("RAY_gcs_rpc_server_reconnect_timeout_s", str(GCS_LIMIT_S))
    set_first("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds for the head to let us in
    set_first("RAY_worker_niceness", "0")  # of a cluster of our own; by Ray's will actors are the last to compute
    if address is None or is_loopback(address):
        set_first("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # by which Ray listens on loopback only
    if not any(os.environ.get(name) for name in AUTH_VARIABLES):
        os.environ["RAY_AUTH_MODE"] = "token"
        rays = Path(RAYS_TOKEN_FILE).expanduser()
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(rays if rays.exists() else own_token_file())


def own_token_file() -> Path:
    """Our file with a token for Ray, made if it is missing; PlacingError: it cannot be made."""
    return made_secret(TOKEN_FILE)[0]


def made_secret(name: str) -> tuple[Path, bool]:
    """A file of this user's own with a random secret, and whether it was made now, as it was missing.

    Raises:
        PlacingError: it cannot be made.
    """
    path = Path(name).expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        return path, False
    except OSError as error:
        raise PlacingError(f"{path}: a secret cannot be written there: {error.strerror}") from None
    return path, True


def is_loopback(address: str) -> bool:
    """True if an address is one of this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _joined() -> str:
    """Address of the cluster that `ray start` has last made this machine a part of, by Ray's own note; or empty."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    path = Path(folder, "ray", "ray_current_cluster")
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


async def _is_there(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise PlacingError(f"{address!r} is no address of a Ray cluster; say HOST:PORT, or auto")
    try:
        async with asyncio.timeout(REACH_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, OverflowError):
        return False
    writer.close()
    return True


# -- Ray itself -------------------------------------------------------------------------------------------------------


REASONS = {
    "ActorDiedError": "its process ended",
    "ActorUnavailableError": "its process is being restarted, or cannot be reached",
    "ActorUnschedulableError": "no host has room for its process",
}
"""Ray's errors that name an actor by its id alone, in words."""


def sentence(error: BaseException) -> str:
    """First line of an error of Ray's, or its reason in words."""
    if (known := REASONS.get(type(error).__name__)) is not None:
        return known
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".") if lines else type(error).__name__


def imported() -> Any:
    """Ray itself, which has few types; imported when it is first needed."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def _keep_quiet(ray: Any) -> None:
    """Have Ray print nothing: its thread for that writes on standard output, which is our answers', and takes a whole
    processor from when Ray's head is lost."""
    if hasattr(ray._private.worker, "listen_error_messages"):
        ray._private.worker.listen_error_messages = _listen_to_nothing


def _listen_to_nothing(*of: object) -> None:
    pass
