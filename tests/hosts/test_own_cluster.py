"""A cluster of Ray's that we start where there is none, and a process that outlives the head of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts.two_nodes import WHY_NOT, started
from tests.processes import ROOT, SOURCES
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

SERVE = """
import asyncio, json, sys
from pathlib import Path

import psutil

from lockstep.errors import PlacingError
from lockstep.hosts.ray_runtime import ReplicaOptions, connect
from lockstep.hosts.values import LinkOptions, ReplicaPhase, ReplicaName
from tests.hosts.support import answer, demand, write_secret
from tests.waiting import eventually

async def main(address, folder):
    secret = write_secret(Path(folder))
    runtime = await connect(address, "own", ReplicaOptions(LinkOptions(secret)))
    await runtime.place(demand(), 0)
    place = None

    async def is_ready():
        nonlocal place
        place = await runtime.ask(ReplicaName("a", 0))
        return place is not None and place.state is ReplicaPhase.READY

    await eventually(is_ready)
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    print(json.dumps({
        "answer": await answer(place, secret, "abc"),
        "processes": {each.pid: each.name() for each in ours[1:]},
        "ips": sorted({
            socket.laddr.ip
            for each in ours for socket in each.net_connections("inet") if socket.status == psutil.CONN_LISTEN
        }),
    }), flush=True)
    while sys.stdin.readline():  # nobody else is to be served in this process
        try:
            hosts = str(len(await runtime.hosts()))
        except PlacingError as error:
            hosts = str(error)
        print(json.dumps([hosts, await answer(place, secret, "abcd")]), flush=True)
    await runtime.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A home, with a name that is short enough for Ray's sockets."""
    made = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def serve(address: str, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(SOURCES))), "HOME": str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, address, str(folder)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return json.loads(line)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow), None])
def test_private_cluster_is_limited_to_this_machine_and_ends_with_the_process(
    folder: Path, number: signal.Signals | None
) -> None:
    """Where we are killed, Ray's agents of the node need a minute to see that they are alone."""
    with serve("auto", folder, {"RAY_TMPDIR": str(folder)}) as process:
        told = said(process)
        assert told["answer"] == "[stub:alpha] ok len=3 max=40"
        assert {"gcs_server", "raylet"} <= set(told["processes"].values())
        assert set(told["ips"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        raylet = psutil.Process(next(int(pid) for pid, name in told["processes"].items() if name == "raylet"))
        variables = raylet.environ()
        token = folder / ".config" / "lockstep" / "ray_token"
        assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
        assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        if number is not None:
            process.send_signal(number)
        _, errors = process.communicate(timeout=HANG_S)
        assert errors == ""
    for pid in told["processes"]:
        until(lambda pid=pid: _has_ended(int(pid)), f"{told['processes'][pid]} ends with us")  # type: ignore[misc]


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_gateway_without_rays_head_still_serves_and_can_stop(folder: Path) -> None:
    """For longer than the minute after which Ray would end this process."""
    patient = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
    with started(patient, ("host_a",)) as nodes, serve(nodes.address, folder, nodes.environment) as process:
        assert process.stdin is not None
        said(process)
        next(each for each in nodes.processes if each.name() == "gcs_server").kill()
        for _ in range(9):
            process.stdin.write("\n")
            process.stdin.flush()
            hosts, answer = said(process)
            assert hosts == "hosts cannot be listed: Ray has not answered within 10 s"
            assert answer == "[stub:alpha] ok len=4 max=40"
        _, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, errors) == (0, "")
