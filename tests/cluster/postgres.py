"""A real PostgreSQL server of our own on this machine, in a temporary folder.

    python tests/cluster/postgres.py -- autotune studies

runs a command with such a server (AUTOTUNE_STORAGE names it), and ends the server after it. Needs
`apt-get install postgresql`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

#: The server's user, and the database of each test but the first.
USER, PASSWORD = "tuner", "not-To-Be-Seen-7"
#: Where Debian's package puts the server, which is not on a user's path.
_DEBIAN = Path("/usr/lib/postgresql")
#: The server does not run as root.
_OWNER = "postgres"
_DEADLINE_S = 60
_CONF = """
port = {port}
listen_addresses = '127.0.0.1'
unix_socket_directories = '{folder}'
fsync = {fsync}
max_connections = {connections}
"""


def missing() -> str | None:
    """Return why no server can be started here; ``None`` if one can."""
    return "PostgreSQL is not installed here: apt-get install postgresql" if _programs() is None else None


def _programs() -> Path | None:
    places = [*sorted(_DEBIAN.glob("*/bin"), reverse=True), *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)


class Postgres:
    """A server.

    Args:
        folder: an empty folder. connections: at most. fsync: wait until what is stored is on disk.
    """

    def __init__(self, folder: Path, connections: int = 100, *, fsync: bool = False) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._connections = connections
        self._fsync = "on" if fsync else "off"
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]

    def make(self) -> None:
        """Make the server's files: one user, who needs a password."""
        secret = self.folder / "secret"
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (self.folder, secret):
                shutil.chown(path, _OWNER)
        self._run(
            "initdb", "-U", USER, "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync", "-D", str(self._data)
        )
        secret.unlink()
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.write(
                _CONF.format(port=self.port, folder=self.folder, connections=self._connections, fsync=self._fsync)
            )

    def start(self) -> None:
        self._ctl("start", "-l", str(self.folder / "log"))

    def stop(self, mode: str = "fast") -> None:
        self._ctl("stop", "-m", mode)

    def restart(self, mode: str = "immediate") -> None:
        """Restart it: `immediate` as after a crash, `fast` as an administrator does."""
        self._ctl("restart", "-m", mode, "-l", str(self.folder / "log"))

    @property
    def runs(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def new_database(self, name: str) -> None:
        self.ask(f'create database "{name}"', "postgres")

    def address(self, database: str, user: str = USER) -> str:
        """Return a database's address, without the password."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def url(self, database: str) -> str:
        """Return a database's URL, with the password."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def ask(self, sql: str, database: str) -> list[tuple[object, ...]]:
        """Run a statement; return its rows."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            found = connection.execute(sql)
            return found.fetchall() if found.description else []

    def _ctl(self, *words: str) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", str(_DEADLINE_S), *words)

    def _run(self, program: str, *words: str) -> None:
        found = _programs()
        assert found is not None
        owner = {"user": _OWNER, "group": _OWNER, "extra_groups": []} if os.geteuid() == 0 else {}
        # Nobody reads what the server inherits and keeps open.
        with (self.folder / "out").open("ab") as output:
            done = subprocess.run(
                [str(found / program), *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=2 * _DEADLINE_S,
                **owner,
            )
        if done.returncode:
            logs = [path.read_text() for path in (self.folder / "out", self.folder / "log") if path.exists()]
            raise RuntimeError(f"{program} ended with {done.returncode}:\n" + "\n".join(logs))


@contextlib.contextmanager
def postgres_server(connections: int = 100, *, fsync: bool = False) -> Iterator[Postgres]:
    """Yield a server that runs, and end it."""
    with tempfile.TemporaryDirectory(prefix="autotune-postgres-") as folder:
        server = Postgres(Path(folder), connections, fsync=fsync)
        server.make()
        server.start()
        try:
            yield server
        finally:
            if server.runs:
                server.stop("immediate")


def main(words: Sequence[str]) -> int:
    why = missing()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    with postgres_server() as server:
        return subprocess.run(
            words, env={**os.environ, "AUTOTUNE_STORAGE": server.url("postgres")}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]))
