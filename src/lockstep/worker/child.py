"""Process of a device worker: runs ``python -m lockstep.worker.child FD PARENT_PID LOG_FORMAT LOG_LEVEL TRACE LISTEN
KV``.

FD is one end of a socket pair. TRACE, LISTEN and KV are JSON or empty: the recording options, the network address for
gateways, and the endpoints of KV events. The process ends with its parent: when the stream ends, and on Linux also by a
signal, even if it is stuck in native code. Signals of the terminal are left to the parent. Large modules are imported
after this setup, and nothing is opened before the parent's first command: a process may be started early and never be
used.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

from lockstep.errors import UsageError
from lockstep.system import SYSTEM
from lockstep.worker.logs import LogFormat, log_to_stderr
from lockstep.worker.parent_death import die_with_parent

if TYPE_CHECKING:
    from lockstep.worker.device import DeviceWorker
    from lockstep.worker.flight.options import TraceOptions
    from lockstep.worker.kv_events import KVEventsOptions
    from lockstep.worker.wire import Outbox

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""Exit code after a bug has ended a loop. The log has the exception."""
STOP_LIMIT_S = 4.0
"""Time limit for finishing the current step and freeing the models."""
_READ_BYTES = 1 << 18


def main(
    fd: int, parent_pid: int, log_format: LogFormat, log_level: str, trace: str, listen: str, kv_events: str
) -> None:
    """Serve until `Stop` arrives or the other end is gone, then exit."""
    gc.disable()  # imports leave no garbage, and collecting takes a tenth of their time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent_pid)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    log_to_stderr(log_format, log_level, "worker")
    import msgspec

    from lockstep.worker.device import DeviceWorker
    from lockstep.worker.flight.options import TraceOptions
    from lockstep.worker.kv_events import KVEventsOptions
    from lockstep.worker.wire import Outbox

    gc.freeze()  # modules stay, so later collections skip them
    gc.enable()
    if not sock.recv(1, socket.MSG_PEEK):  # the parent sent no command: open and write nothing
        _exit(0)
    outbox = Outbox(sock)
    options = msgspec.json.decode(trace, type=TraceOptions) if trace else None
    events = msgspec.json.decode(kv_events, type=KVEventsOptions) if kv_events else None
    if listen:
        worker = _listening(listen, outbox, options, events)
    else:
        worker = DeviceWorker(outbox.post, trace=options, kv_events=events)
    steps = SYSTEM.start_thread(partial(_run, worker, outbox), "lockstep-steps")
    try:
        if _receive(sock, worker, outbox):
            steps.join(STOP_LIMIT_S)
            outbox.flush(STOP_LIMIT_S)
    except Exception:
        log.exception("a command could not be executed")
        _exit(EXIT_BROKEN)
    _exit(0)


def _run(worker: DeviceWorker, outbox: Outbox) -> None:
    try:
        worker.run()
    except Exception:  # already logged, and every request has failed with it
        outbox.flush(STOP_LIMIT_S)
        _exit(EXIT_BROKEN)


def _listening(
    listen: str, outbox: Outbox, trace: TraceOptions | None, kv_events: KVEventsOptions | None
) -> DeviceWorker:
    """Create a worker that also accepts gateways over a network. If it cannot listen, it reports the reason."""
    import msgspec

    from lockstep.worker.device import DeviceWorker
    from lockstep.worker.messages import Command, Event, Listening
    from lockstep.worker.remote_clients import ListenOptions, RemoteClients, routed

    def execute(command: Command) -> None:
        worker.handle(command)

    def emit(event: Event) -> None:
        for number, each in routed(event, ()):
            if number == 0:
                outbox.post(each)
        clients.publish(event)

    try:
        clients = RemoteClients(msgspec.json.decode(listen, type=ListenOptions), execute)
        worker = DeviceWorker(emit, trace=trace, reports_contents=True, kv_events=kv_events)
        outbox.post(Listening(*clients.start()))
    except UsageError as error:
        outbox.post(Listening("", 0, str(error)))
        return DeviceWorker(outbox.post, trace=trace, kv_events=kv_events)
    return worker


def _receive(sock: socket.socket, worker: DeviceWorker, outbox: Outbox) -> bool:
    """Pass commands to the worker; True: after `Stop`; False: the other end is gone."""
    import msgspec

    from lockstep.worker.messages import Stop
    from lockstep.worker.wire import FrameReader, command_decoder, refusal_of

    reader, decoder = FrameReader(), command_decoder()
    while data := sock.recv(_READ_BYTES):
        for body in reader.feed(data):
            try:
                command = decoder.decode(body)
            except msgspec.ValidationError as error:
                outbox.post(refusal_of(body, error))
                continue
            worker.handle(command)
            if isinstance(command, Stop):
                return True
    return False


def _exit(code: int) -> None:
    """Exit at once. An orderly interpreter shutdown would wait for threads in native code."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "json" if sys.argv[3] == "json" else "text", *sys.argv[4:])
