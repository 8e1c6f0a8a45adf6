"""A real Slurm cluster of two nodes on this machine, in a temporary folder: munged, slurmctld, two slurmd.

    python tests/cluster/slurm.py -- sinfo

runs a command in such a cluster, and ends the cluster after it. Needs `apt-get install slurm-wlm munge`, and root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NODES = ("node1", "node2")
PARTITION = "tiny"
PARTS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
#: Where Debian's packages put daemons, which need not be on a user's path.
_SBIN = "/usr/sbin"
_DEADLINE_S = 30.0
_CONF = """\
ClusterName=autotune
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=15
InactiveLimit=0
MinJobAge=300
{nodes}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why no cluster can be started here; ``None`` if one can."""
    absent = [name for name in PARTS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"Slurm is not installed here (no {', '.join(absent)}): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


def _path() -> str:
    # This Python's own commands first: jobs type `autotune`, whether its environment is activated here or not.
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:{_SBIN}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


class SlurmCluster:
    """The daemons of a cluster.

    Args:
        folder: an empty folder that nobody else writes to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        port, *ports = _free_ports(1 + len(NODES))
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        self.conf = folder / "slurm.conf"
        self.conf.write_text(_CONF.format(host=host, port=port, folder=folder, nodes=nodes, partition=PARTITION))

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands find this cluster."""
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        places = [
            f"--{name}={self.folder}/munge.{name.removesuffix('-file')}"
            for name in ("key-file", "pid-file", "log-file")
        ]
        self._run(
            "munged",
            "--foreground",
            "--force",
            *places,
            f"--socket={self.folder}/munge.socket",
            f"--seed-file={self.folder}/munge.seed",
        )
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged has no socket")
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        self._until(lambda: self.states() == dict.fromkeys(NODES, "idle"), "the nodes are not idle")

    def start_controller(self) -> None:
        self._run("slurmctld", "-D", "-f", str(self.conf))
        self._until(lambda: "is UP" in self.ask("scontrol", "ping"), "slurmctld does not answer")

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-D", "-f", str(self.conf), "-N", name, called=f"slurmd-{name}")

    def end(self, called: str, number: int = signal.SIGTERM) -> None:
        """End one of the daemons: ``slurmctld``, or ``slurmd-NODE``."""
        process = self._processes.pop(called)
        process.send_signal(number)
        process.wait(timeout=_DEADLINE_S)

    def stop(self) -> None:
        """Cancel all jobs, wait until their processes have gone, and end all daemons."""
        if "slurmctld" in self._processes:
            self.ask("scancel", "--me", "--state=PENDING")
            self.ask("scancel", "--me")
            with contextlib.suppress(TimeoutError):
                self._until(lambda: not self.ask("squeue", "--noheader"), "jobs are left")
        for called in reversed(list(self._processes)):
            self.end(called)

    def ask(self, *words: str) -> str:
        """Run one of Slurm's commands; return its stdout, or nothing if it fails."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False, timeout=_DEADLINE_S)
        return done.stdout if done.returncode == 0 else ""

    def states(self) -> dict[str, str]:
        """Return the state of each node: idle, allocated, drained …"""
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split()[:2] for line in lines)

    def logs(self) -> str:
        """Return the last lines of every log."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )

    def _run(self, *words: str, called: str | None = None) -> None:
        name = called or words[0]
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                words, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not holds():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} has ended: {(self.folder / f'{name}.out').read_text()}\n{self.logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}\n{self.logs()}")
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Yield a cluster that runs, and end it."""
    with tempfile.TemporaryDirectory(prefix="autotune-slurm-") as folder:
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def main(words: Sequence[str]) -> int:
    why = missing()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    with slurm_cluster() as cluster:
        return subprocess.run(words, env=cluster.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]))
