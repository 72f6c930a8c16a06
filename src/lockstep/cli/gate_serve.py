"""`lockstep gate serve`: serves the verdict on growing files over HTTP."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from lockstep.cli import gate as judging
from lockstep.cli import options as flags
from lockstep.cli.flag_groups import with_flags

DEFAULT_PORT = 9005
_DEFAULT_POLICY = judging.PolicyFlags()
KEY_VARIABLE = "LOCKSTEP_GATE_API_KEY"

Host = Annotated[str, typer.Option(help="Address to listen on; beyond loopback, a key is required.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)]
ApiKey = Annotated[
    list[str] | None, typer.Option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="Required API key.")
]


@with_flags
def gate_serve(
    files: judging.Files = None,
    *,
    policy: judging.PolicyFlags = _DEFAULT_POLICY,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    api_key: ApiKey = None,
    debug: flags.Debug = False,
) -> None:
    """Judge growing files, and serve the verdict over HTTP, for example to Argo Rollouts or Flagger."""
    import uvicorn

    from lockstep.owned_folders import temporary_folder
    from lockstep.release.judging import judge_files
    from lockstep.release.live import Follower, LiveGate, app_of
    from lockstep.release.store import TEMPORARY
    from lockstep.server.options import ServerOptions
    from lockstep.server.run import bind, listen, url_of
    from lockstep.worker.logs import log_to_stderr

    log_to_stderr("text", "info", "gate")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again; the exit removes the copies
    paths = judging.paths_of(files, None)
    policy.sources().policy()  # so that faults of the policy are reported before any evidence is read
    keys = tuple(api_key or ())
    options = ServerOptions(host=host, port=port, api_keys=keys)

    with temporary_folder(TEMPORARY) as folder:
        followers = [Follower(path, folder / f"{number}-{path.name}") for number, path in enumerate(paths)]
        live = LiveGate(followers, lambda copies: judge_files(copies, policy.sources(), names=paths).verdict)
        listener = bind(options)
        live.check()  # so that the first request gets the verdict on the current files
        listen(listener, options)
        print(f"gate: {url_of(listener)}/v1/verdict judges {', '.join(map(str, paths))}", flush=True)
        config = uvicorn.Config(app_of(live, host, keys), log_level="warning", lifespan="on")
        uvicorn.Server(config).run(sockets=[listener])
