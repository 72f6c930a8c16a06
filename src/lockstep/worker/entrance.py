"""Requests on their way into the engines of a device, and out of them again before their end.

The receiving thread calls everything here. Few preparing threads build grammars, so that a slow one delays no abort.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lockstep.engine.generation import Sink
from lockstep.errors import LockstepError, QueueFullError, RequestFailedError, UnavailableError
from lockstep.worker.fleet import Fleet
from lockstep.worker.messages import Refused, Submit
from lockstep.worker.replica import Replica

log = logging.getLogger(__name__)

NUM_PREPARERS = 2
MAX_PREPARING = 1024
"""Requests whose grammar is being built or waits for it."""


class Entrance:
    """Hands requests to the engines.

    Args:
        fleet: who is there.
        sink: takes all outputs, on the step thread.
        refuse: called, by any thread, for each request that no engine took.
        called: told the key of each replica that has got something to do.
    """

    def __init__(
        self, fleet: Fleet, sink: Sink, refuse: Callable[[Refused], None], called: Callable[[str], None]
    ) -> None:
        self._fleet = fleet
        self._sink = sink
        self._refuse = refuse
        self._called = called
        self._lock = threading.Lock()
        self._preparing: dict[int, bool] = {}
        """Requests that no engine has yet, and whether they were aborted meanwhile."""
        self._preparers = ThreadPoolExecutor(NUM_PREPARERS, "lockstep-prepare")

    @property
    def num_preparing(self) -> int:
        """Requests that no engine has yet."""
        return len(self._preparing)

    def take(self, submit: Submit) -> None:
        """Give a request to its engine, or see to it that a preparing thread does."""
        replica, constraint = self._fleet.find(submit.replica), submit.request.params.constraint
        if replica is None:
            self._refuse(Refused(submit.request_id, _not_loaded(submit.replica)))
        elif constraint is None or replica.engine.model.grammars.is_ready(constraint):
            self._submit(replica, submit)
        elif len(self._preparing) >= MAX_PREPARING:
            error = QueueFullError(f"{MAX_PREPARING} requests already wait for their grammars; try again later")
            self._refuse(Refused(submit.request_id, error))
        else:
            with self._lock:
                self._preparing[submit.request_id] = False
            self._preparers.submit(self._prepare, replica, submit).add_done_callback(log_defect)

    def abort(self, key: str, request_ids: tuple[int, ...]) -> None:
        """End requests wherever they are; unknown ones are left alone."""
        with self._lock:
            for request_id in request_ids:
                if request_id in self._preparing:
                    self._preparing[request_id] = True
        replica = self._fleet.find(key)
        if replica is not None:
            for request_id in request_ids:
                replica.engine.abort(request_id)
            self._called(key)

    def close(self) -> None:
        """Prepare nothing any more."""
        self._preparers.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, replica: Replica, submit: Submit) -> None:
        """On a preparing thread: as `_submit`, unless the request was aborted meanwhile."""
        if not self._preparing[submit.request_id]:
            self._submit(replica, submit)
        with self._lock:
            was_aborted = self._preparing.pop(submit.request_id)
        if was_aborted:
            replica.engine.abort(submit.request_id)
            self._called(replica.key)

    def _submit(self, replica: Replica, submit: Submit) -> None:
        try:
            replica.engine.submit(submit.request, self._sink, request_id=submit.request_id)
        except LockstepError as error:
            self._refuse(Refused(submit.request_id, error))
        except Exception as error:  # a defect of ours or a wrong type: that request's end, and nobody else's
            log.exception("request %d cannot be prepared", submit.request_id)
            self._refuse(Refused(submit.request_id, RequestFailedError(f"it cannot be prepared: {error!r}")))
        if self._fleet.find(replica.key) is not replica:  # unloaded meanwhile: nobody will look into its inbox
            self._refuse(Refused(submit.request_id, _not_loaded(submit.replica)))
        self._called(replica.key)


def log_defect(work: Future[None]) -> None:
    """What ends the work of a side thread is a defect of ours, since all that can be expected was told."""
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.error("a side thread broke", exc_info=error)


def _not_loaded(key: str) -> UnavailableError:
    return UnavailableError(f"{key} is not loaded")
