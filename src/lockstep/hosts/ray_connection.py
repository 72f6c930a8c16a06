"""Ray connection: chooses the Ray cluster to join, sets the token and variables for it, and runs Ray calls that may
block.

This is the only file that imports Ray, at the first connection. Ray reads its variables at that time, and the processes
that it starts inherit them.
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
"""Time in seconds for Ray to accept the connection, or for a private cluster to start."""
CALL_LIMIT_S = 10.0
MAX_CALLS = 64
"""Maximum number of blocking Ray calls at once. A call that never returns keeps its slot, so a hanging Ray never holds
more threads than this."""
OWN_STORE_BYTES = 80_000_000
"""Object store size of a private cluster. Nothing is stored in it; this is the minimum that Ray accepts."""
TOKEN_FILE = "~/.config/lockstep/ray_token"
"""Token file of a private cluster, created if missing. It is also used for other clusters if Ray has no token file."""
RAYS_TOKEN_FILE = "~/.ray/auth_token"
REACH_LIMIT_S = 5.0
"""Time in seconds in which the address has to accept a connection; Ray itself would try for minutes."""
GCS_LIMIT_S = 2_000_000_000
"""Time in seconds without Ray's head after which Ray ends this process. In effect never, as replicas answer without the
head."""
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class Connection:
    """Connection of this process as a Ray driver. It runs on its own thread until `close`, because Ray's processes end
    with the thread that started them."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        """Address of the Ray cluster; None: a private cluster."""
        self._is_open = threading.Event()
        self._is_leaving = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-ray", daemon=True)

    async def open(self) -> None:
        """Connect; PlacingError: the connection failed."""
        self._thread.start()
        where = f"Ray at {self.address}" if self.address else "a Ray cluster on this machine"
        await Calls().do(where, partial(self._is_open.wait, CONNECT_LIMIT_S), 2 * CONNECT_LIMIT_S)
        if isinstance(self._fault, ImportError):
            raise PlacingError("Ray is not installed here; install it with: pip install 'lockstep-llm[ray]'")
        if isinstance(self._fault, ConnectionError):
            raise PlacingError(
                f"{where} rejects the connection; each host needs the same token (RAY_AUTH_TOKEN_PATH is "
                f"{os.environ.get('RAY_AUTH_TOKEN_PATH') or 'not set'} here) and the same version of Ray"
            )
        if self._fault is not None or not self._is_open.is_set():
            raise PlacingError(f"{where} cannot be used: {sentence(self._fault) if self._fault else 'no answer'}")

    async def close(self) -> None:
        """Leave Ray; a private cluster ends with all its replicas."""
        self._is_leaving.set()
        with contextlib.suppress(PlacingError):
            await Calls().do("leaving Ray", self._thread.join, CALL_LIMIT_S)

    def _run(self) -> None:
        try:
            ray = imported()
            if ray.is_initialized():
                self._join(ray.get_runtime_context().gcs_address)
                return
            _keep_quiet(ray)
            own = {"include_dashboard": False, "object_store_memory": OWN_STORE_BYTES} if not self.address else {}
            # The namespace does not matter here: each actor is named with the cluster's own.
            ray.init(self.address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **own)
        except BaseException as error:  # Ray exits the interpreter if it cannot start
            self._fault = error
            return
        finally:
            self._is_open.set()
        self._is_leaving.wait()
        ray.shutdown()

    def _join(self, joined: str) -> None:
        """Use the connection that this process already has: Ray allows one in a process, and its opener owns it."""
        if self.address not in (None, joined):
            raise PlacingError(f"this process belongs to the Ray cluster at {joined} already")


class Calls:
    """Blocking Ray calls, each on its own thread, with at most `max_calls` at once."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._slots = asyncio.Semaphore(max_calls)

    async def do(self, what: str, work: Callable[[], T], limit_s: float = CALL_LIMIT_S) -> T:
        """Run a function that may block. A cancelled caller leaves it running to its end.

        Args:
            what: description of the call, for errors.

        Raises:
            PlacingError: the call timed out, or Ray raised an error.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            self._slots.release()
            if not done.done() and error is not None:
                done.set_exception(error)
            elif not done.done():
                done.set_result(value)  # type: ignore[arg-type]  # a value, where there is no error

        def body() -> None:
            value, fault = None, None
            try:
                value = work()
            except BaseException as error:  # otherwise callers would wait forever
                fault = error if isinstance(error, Exception) else RuntimeError(repr(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(settle, value, fault)

        try:
            async with asyncio.timeout(limit_s):
                await self._slots.acquire()
                threading.Thread(target=body, name="lockstep-ray-call", daemon=True).start()
                return await done
        except TimeoutError:
            raise PlacingError(f"{what}: Ray has not answered within {limit_s:g} s") from None
        except LockstepError:
            raise
        except Exception as error:
            raise PlacingError(f"{what}: {sentence(error)}") from error


# -- addresses and credentials ----------------------------------------------------------------------------------------


async def choose_address(ray: str) -> str | None:
    """Address of the Ray cluster that a manifest's ``ray`` names; None: there is none, and a private one is started.

    Raises:
        PlacingError: nothing listens at the given address.
    """
    named = os.environ.get("RAY_ADDRESS", "") if ray == "auto" else ray
    if named and named != "auto":
        if not await _is_there(named):
            origin = "RAY_ADDRESS" if ray == "auto" else "`hosts.ray`"
            raise PlacingError(
                f"no Ray cluster answers at {named} (from {origin}); start it there with `ray start --head`, or set"
                " its address as HOST:PORT"
            )
        return named
    joined = _joined()
    return joined if joined and await _is_there(joined) else None


def prepare_environment(address: str | None) -> None:
    """Set Ray's variables for this process before Ray is imported; variables that are set already stay."""
    set_first = os.environ.setdefault
    set_first("RAY_USAGE_STATS_ENABLED", "0")
    set_first("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # this process handles signals itself
    set_first("RAY_gcs_rpc_server_reconnect_timeout_s", str(GCS_LIMIT_S))
    set_first("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds for the head to accept the connection
    set_first("RAY_worker_niceness", "0")  # in a private cluster; Ray's default lowers the priority of actors
    if address is None or is_loopback(address):
        set_first("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # makes Ray listen on loopback only
    if not any(os.environ.get(name) for name in AUTH_VARIABLES):
        os.environ["RAY_AUTH_MODE"] = "token"
        rays = Path(RAYS_TOKEN_FILE).expanduser()
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(rays if rays.exists() else own_token_file())


def own_token_file() -> Path:
    """Path of Lockstep's token file for Ray, created if missing; PlacingError: it cannot be created."""
    return made_secret(TOKEN_FILE)[0]


def made_secret(name: str) -> tuple[Path, bool]:
    """Path of a file with a random secret that only this user can read, created if missing, and whether it was created.

    Raises:
        PlacingError: the file cannot be created.
    """
    path = Path(name).expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        return path, False
    except OSError as error:
        raise PlacingError(f"{path}: cannot write a secret: {error.strerror}") from None
    return path, True


def is_loopback(address: str) -> bool:
    """True for a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _joined() -> str:
    """Address of the cluster that this machine last joined by `ray start`, as recorded by Ray; empty: none."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    path = Path(folder, "ray", "ray_current_cluster")
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


async def _is_there(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise PlacingError(f"{address!r} is not an address of a Ray cluster; use HOST:PORT or auto")
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
"""Descriptions of the Ray errors whose text names the actor by id only."""


def sentence(error: BaseException) -> str:
    """Description of a Ray error, or its first line."""
    if (known := REASONS.get(type(error).__name__)) is not None:
        return known
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".") if lines else type(error).__name__


def imported() -> Any:
    """Import Ray when it is first needed. It has few types."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def _keep_quiet(ray: Any) -> None:
    """Stop Ray from printing. Its printing thread writes to standard output, which carries answers, and uses a whole
    CPU core once Ray's head is lost."""
    if hasattr(ray._private.worker, "listen_error_messages"):
        ray._private.worker.listen_error_messages = _listen_to_nothing


def _listen_to_nothing(*of: object) -> None:
    pass
