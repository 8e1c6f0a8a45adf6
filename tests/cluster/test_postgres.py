"""Studies in a real PostgreSQL server, which is restarted while they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.base.layout import STATE_DIR, STORAGE_URL, StudyFiles
from autotune.base.records import TrialStatus
from autotune.cli import main
from autotune.space import key
from autotune.study.database import open_to_read
from autotune.study.request import read_request
from autotune.study.schema import VERSION
from autotune.study.tables import read_trials

from ..process.alive import wait_until  # noqa: TID252
from .postgres import PASSWORD, Postgres, missing, postgres_server

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
#: A search that does not end before all has happened.
LONG = (
    *("--model", "tiny.py", "--device", "cpu", "--allow-busy", "--budget", "4m", "--fix", "workload.pause=false"),
    *("--fix", "compile_mode=off", "--set", "num_workers=0", "--set", "batch_size=8,16,32"),
    *("--baseline", "intra_op_threads=1", "--fix", "intra_op_threads=1", "--sampler", "random"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    with postgres_server() as server:
        yield server


@pytest.fixture
def database(server: Postgres, request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W+", "_", request.node.name)[:60]
    server.new_database(name)
    return name


@pytest.fixture
def folder(tmp_path: Path, workloads: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tiny.py").write_text((workloads / "tiny.py").read_text())
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    open_to_read.cache_clear()


class Begun:
    """A command that runs."""

    def __init__(self, folder: Path, url: str, *words: str) -> None:
        number = len(list(folder.glob("*.err")))
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune", *words],
                cwd=folder,
                env={**os.environ, STATE_DIR: str(folder / "state"), STORAGE_URL: url},
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def ended(self) -> int:
        """Wait until it has ended; return its exit code."""
        return self.process.wait(timeout=120)


def launches(files: StudyFiles) -> int:
    return len(list(files.folder.glob("*/*/result.json")))


def command_lines() -> bytes:
    found = b""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


def assert_told_nowhere(secret: str, folder: Path) -> None:
    assert secret.encode() not in command_lines()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_search_outlives_its_server(
    server: Postgres, database: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, files = server.url(database), StudyFiles(folder / "studies" / "one")
    search = Begun(folder, url, "search", *LONG, "--study", "one")
    try:
        wait_until(lambda: launches(files) > 2, 60)
        # As in a crash, until the searches have missed it.
        server.stop("immediate")
        wait_until(lambda: "does not answer; the search waits for it" in search.err, 60)
        assert_told_nowhere(PASSWORD, folder)
        server.start()
        before = launches(files)
        wait_until(lambda: launches(files) > before + 1, 60)
    finally:
        search.process.terminate()
        code = search.ended()
    assert code == 143, search.err
    assert_told_nowhere(PASSWORD, folder)
    assert read_request(files).storage == server.address(database) and not files.database.exists()
    # Everything of it is in the database, and nothing twice.
    monkeypatch.setenv(STORAGE_URL, url)
    trials = read_trials(files)
    assert [t.number for t in trials] == list(range(len(trials))) and len(trials) >= 4
    finished = [t for t in trials if t.result.status is not TrialStatus.INTERRUPTED]
    assert len(trials) - len(finished) <= 1, "only what ran at the end"
    assert len({key(t.config) for t in finished}) == len(finished)
    stored = server.ask("select count(*), count(distinct launch) from autotune_launches where study = 'one'", database)
    assert stored == [(launches(files), launches(files))]
    for words in (("show", "one"), ("report", "one"), ("studies",)):
        assert main.run(list(words)) == 0, words


def test_what_prevents_it_is_said_in_one_sentence(
    server: Postgres, database: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(address: str, code: int, password: str = PASSWORD) -> str:
        monkeypatch.setenv("PGPASSWORD", password)
        open_to_read.cache_clear()
        assert main.run(["search", "--model", "tiny.py", "--device", "cpu", "--storage", address]) == code
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 2 and PASSWORD not in err and "Traceback" not in err
        return err

    address = server.address(database)
    assert "has a password, which everybody could read" in said(server.url(database), 2)
    assert 'password authentication failed for user "tuner"' in said(address, 5, "wrong")
    assert "Connection refused" in said("postgresql://tuner@127.0.0.1:1/x", 5)
    assert 'database "nowhere" does not exist' in said(server.address("nowhere"), 5)
    monkeypatch.setenv(STORAGE_URL, server.url(database))
    assert main.run(["storage", "--upgrade"]) == 0 and capsys.readouterr().out
    versions: list[tuple[str, str, Callable[[str], bool]]] = [
        ("update autotune_schema set version = 99", "by a newer autotune (schema 99)", lambda said: "Upgrade" in said),
        ("update autotune_schema set version = 0", "by an older autotune (schema 0)", lambda said: "--upgrade" in said),
        (f"update autotune_schema set version = {VERSION}", "", lambda said: True),
        ("update alembic_version set version_num = 'v99'", "by a newer Optuna", lambda said: "Upgrade" in said),
        ("update alembic_version set version_num = 'v3.0.0.d'", "by an older Optuna", lambda said: "--upgrade" in said),
    ]
    for statement, sentence, advises in versions:
        server.ask(statement, database)
        if sentence:
            told = said(address, 5)
            assert sentence in told and advises(told)
    assert list(folder.iterdir()) == [folder / "tiny.py"]
