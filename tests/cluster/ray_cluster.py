"""A real Ray cluster of three raylets on the loopback of this machine, in a temporary folder.

    python tests/cluster/ray_cluster.py -- ray status

runs a command in such a cluster, and ends the cluster after it. Needs `pip install 'autotune[ray]'`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

NODES = 3
#: Of each node. More than the machine has: what is measured is the cluster, not the training.
CPUS = 2
#: A resource that all nodes have but the head, without which there is no cluster.
BESIDES = "besides"
_DEADLINE_S = 90.0


def missing() -> str | None:
    """Return why no cluster can be started here; ``None`` if one can."""
    absent = [name for name in ("ray", "grpc") if importlib.util.find_spec(name) is None]
    return f"Ray is not installed here (no {', '.join(absent)}): pip install 'autotune[ray]'" if absent else None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class RayCluster:
    """A head and two more nodes.

    Attributes:
        env: variables for commands. client: the address for Ray's client.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._client_port = _free_ports(2)
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.client = f"ray://127.0.0.1:{self._client_port}"
        self.env = {
            **os.environ,
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Else a head asks for a token if its user has one (~/.ray/auth_token), and nodes that join it have none.
            "RAY_AUTH_MODE": "disabled",
            # A lost client is a lost driver at once, not after half a minute.
            "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1",
            "RAY_health_check_period_ms": "500",
            # Three nodes on one machine must not end each other's workers.
            "RAY_memory_monitor_refresh_ms": "0",
        }

    def start(self, number: int) -> None:
        """Start a node, and wait until it is there; number 0 is the head. Two that start at once disturb each other."""
        if number == 0:
            place = ["--head", f"--port={self._port}", f"--ray-client-server-port={self._client_port}"]
            place += ["--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            place = [f"--address=127.0.0.1:{self._port}"]
        command = [str(Path(sys.executable).parent / "ray"), "start", "--node-ip-address=127.0.0.1", *place]
        command += [f"--num-cpus={CPUS}", "--num-gpus=0", f"--object-store-memory={80 * 2**20}"]
        command += [f'--resources={{"{BESIDES}": 1}}'] if number else []
        command += ["--disable-usage-stats", "--block"]
        with (self._folder / f"node{number}.log").open("wb") as log:
            self._nodes[number] = subprocess.Popen(
                command, env=self.env, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        self._until_started(number)

    def _until_started(self, number: int) -> None:
        log, end = self._folder / f"node{number}.log", time.monotonic() + _DEADLINE_S
        while "Ray runtime started" not in log.read_text():
            if time.monotonic() > end or self._nodes[number].poll() is not None:
                raise TimeoutError(f"node {number} does not start:\n{log.read_text()}")
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        """Kill the raylet of a node, and nothing else: what it has started ends by itself."""
        for process in psutil.Process(self._nodes[number].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name() == "raylet":
                    process.kill()
        self._nodes.pop(number).wait(_DEADLINE_S)

    def processes_of(self, number: int) -> set[int]:
        """Return the processes of a node."""
        return {process.pid for process in psutil.Process(self._nodes[number].pid).children(recursive=True)}

    def close(self) -> None:
        processes = [
            found
            for node in self._nodes.values()
            if node.poll() is None
            for found in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
        ]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=_DEADLINE_S)
        for node in self._nodes.values():
            node.wait(_DEADLINE_S)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Yield a cluster whose nodes are there."""
    # The names of its sockets are long, and have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        for number in range(NODES):
            cluster.start(number)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    command = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    why = missing()
    if why is not None or not command:
        print(why or __doc__, file=sys.stderr)
        return 2
    with ray_cluster() as cluster:
        return subprocess.run(command, env={**cluster.env, "RAY_CLIENT": cluster.client}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
