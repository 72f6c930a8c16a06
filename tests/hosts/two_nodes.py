"""Two Ray nodes on this one machine, on loopback only, with few resources, a token and a folder of their own.

    python -m tests.hosts.two_nodes FOLDER

is the process that has them: it adds a node for each line ``NAME JSON`` on its standard input (custom resources), says
its process ids, and ends all of them with its input. Each node has a custom resource of its name.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from lockstep.hosts.ray_connection import Connection
from lockstep.hosts.ray_runtime import CONTROLLER, RayRuntime, ReplicaOptions, connect
from lockstep.hosts.values import LinkOptions
from tests.processes import ROOT, SOURCES
from tests.waiting import HANG_S

TOKEN = "0123456789abcdef" * 4
"""Of all clusters of tests: Ray reads a token once in a process."""
NUM_CPUS = 4
MEMORY_BYTES = 2_000_000_000
QUICK = {"RAY_health_check_period_ms": "300", "RAY_health_check_timeout_ms": "1000"}
"""Variables by which Ray's head sees in about a second and a half that a node is lost; in some fifteen without them."""
WHY_NOT = "" if find_spec("ray") else "Ray is not installed; pip install 'lockstep-llm[ray]'"


@dataclass(slots=True, eq=False)
class Nodes:
    """Running nodes, and what it takes to reach them."""

    folder: Path
    environment: Mapping[str, str]
    """Variables of those who join."""
    process: subprocess.Popen[str]
    address: str = ""
    raylets: dict[str, int] = field(default_factory=dict)
    """Process ids by node."""
    connection: Connection | None = None
    """Of the tests' own process, which joins once: Ray has one connection in a process."""

    def add(self, name: str) -> None:
        """Start a node, also one of a name whose node was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        assert said, f"no node came up; see {self.folder}"
        told = json.loads(said)
        self.address, self.raylets[name] = told["address"], told["raylet"]

    def kill(self, name: str) -> None:
        """End a node as a machine ends that loses its power, as far as its raylet goes."""
        os.kill(self.raylets[name], signal.SIGKILL)

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of the nodes, their actors and workers."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def started(variables: Mapping[str, str] = QUICK, names: tuple[str, ...] = ("host_a", "host_b")) -> Iterator[Nodes]:
    """Nodes as long as the context is; this process's variables are such that it may join them."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))  # short: Ray's sockets have long names
    environment = _environment(folder, variables)
    command = [sys.executable, "-m", "tests.hosts.two_nodes", str(folder)]
    with open(folder / "log", "w") as errors:
        process = subprocess.Popen(
            command, text=True, cwd=ROOT, env=environment, stderr=errors, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    nodes = Nodes(folder, environment, process)
    before = dict(os.environ)
    os.environ.update({name: value for name, value in environment.items() if name.startswith("RAY_")})
    try:
        for name in names:
            nodes.add(name)
        yield nodes
    finally:
        if nodes.connection is not None:
            asyncio.run(nodes.connection.close())
        os.environ.clear()
        os.environ.update(before)
        _end(nodes)


def _environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    (folder / "ray").mkdir()
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return ours | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(SOURCES))),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        **variables,
    }


def _end(nodes: Nodes) -> None:
    """End all processes, by their ids."""
    left = nodes.processes
    nodes.process.communicate(timeout=HANG_S)
    for process in psutil.wait_procs(left, timeout=5.0)[1]:
        process.kill()
    shutil.rmtree(nodes.folder, ignore_errors=True)


@asynccontextmanager
async def joined(nodes: Nodes, cluster: str, secret: str) -> AsyncIterator[RayRuntime]:
    """A runtime whose cluster is empty before and after."""
    options = ReplicaOptions(LinkOptions(secret))
    if nodes.connection is None:
        first = await connect(nodes.address, cluster, options)
        nodes.connection = first._connection
    runtime = RayRuntime(cluster, options, nodes.connection)
    try:
        yield runtime
    finally:
        await runtime.end(CONTROLLER)  # who would have them placed again
        await asyncio.gather(*(runtime.end(str(name)) for name in await runtime.found()))


def reap(nodes: Sequence[Any]) -> None:
    """Take in what ended, as a system's first process does: a raylet that is a zombie is there, its actors think."""
    while True:
        for node in tuple(nodes):
            for processes in tuple(node.all_processes.values()):
                for each in tuple(processes):
                    each.process.poll()
        time.sleep(0.05)


def main(folder: str) -> None:
    """Be the process that has the nodes."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(shutdown_at_exit=True)
    common = {"num_cpus": NUM_CPUS, "memory": MEMORY_BYTES, "object_store_memory": 80_000_000, "temp_dir": folder}
    nodes: list[Any] = []
    threading.Thread(target=reap, args=(nodes,), daemon=True).start()
    for line in sys.stdin:
        name = line.strip()
        node = cluster.add_node(
            node_name=name,
            resources={name: 1},
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            **common,
        )
        nodes.append(node)
        raylet = next(each for kind, each in node.all_processes.items() if kind == "raylet")[0].process.pid
        print(json.dumps({"address": cluster.address, "raylet": raylet}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
