"""The worker's side of a search that launches elsewhere: runs its launches here, in a folder of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import autotune
from autotune.base.clock import Clock
from autotune.base.errors import AutotuneError, MachineError, WorkloadError
from autotune.base.files import exclusive_lock, read_regular
from autotune.base.layout import LaunchFiles
from autotune.base.records import Beat, DataRef, TrialResult, TrialSpec
from autotune.base.version import __version__
from autotune.launcher import Launcher
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.machine import page_cache
from autotune.workload.catalog import source_files, source_hash
from autotune.workload.data import sets

#: Of each log of a launch, the bytes at its end that are sent back.
LOG_BYTES = 2**20


@cache
def own_code() -> str:
    """Return which autotune this is: its version, and a hash of its modules, however they are installed."""
    folder = Path(autotune.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        # In a wheel, the catalogs are in the package. A workload is compared by itself.
        if name.parts[0] != "_catalog":
            found.update(f"{name}\0".encode() + path.read_bytes())
    return f"{__version__}+{found.hexdigest()[:12]}"


class Workplace:
    """Runs launches here for one search elsewhere, one at a time.

    All calls are made in one and the same thread, as with a `Launcher`, whose launches end with that thread.

    Args:
        folder: for everything that this search leaves here; removed by `close`.
    """

    def __init__(self, folder: Path, facts: WorkerFacts, launcher: Launcher, clock: Clock) -> None:
        self.facts = facts
        self._folder = folder
        self._launcher = launcher
        self._clock = clock
        #: The data that is here, by what was asked for.
        self._data: dict[str, DataRef] = {}
        #: Launches that have been run for those that start from what they make.
        self._made: set[str] = set()

    def run(self, errand: Errand, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> ErrandEnd:
        """Run an errand to its end. See `Launcher.run`. An error of this machine becomes the errand's end."""
        try:
            self._check_script(errand)
            code = self._written(errand)
            before = errand.before
            if before is not None and before.launch not in self._made:
                self._launch(errand, before, code, lambda beat: None, stop)
            spec, result = self._launch(errand, errand.spec, code, on_beat, stop)
        except AutotuneError as error:
            return ErrandEnd(errand=errand.name, error=str(error), advice=error.advice)
        except OSError as error:
            return ErrandEnd(errand=errand.name, error=f"{self._folder} cannot be written: {error.strerror}")
        files = LaunchFiles(Path(spec.folder))
        stdout, stderr = _end_of(files.stdout), _end_of(files.stderr)
        shutil.rmtree(files.folder, ignore_errors=True)
        return ErrandEnd(errand=errand.name, result=result, stdout=stdout, stderr=stderr)

    def close(self) -> None:
        """End the launcher, and remove the folder. May be called twice."""
        self._launcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(
        self,
        errand: Errand,
        asked: TrialSpec,
        code: Path | None,
        on_beat: Callable[[Beat], None],
        stop: Callable[[], bool],
    ) -> tuple[TrialSpec, TrialResult]:
        began_s = self._clock.now()
        spec = self._here(asked, Path(errand.study), code)
        ready_s = self._clock.now() - began_s
        result = self._launcher.run(spec, on_beat=on_beat, stop=stop)
        # A budget does not count how long data takes to be made or read in advance.
        result = result.model_copy(update={"waited_s": result.waited_s + ready_s})
        if result.check is not None and asked.check is not None and asked.check.reference:
            self._made.add(asked.launch)
        # What it says of its files is true of those that are sent back.
        told = result.model_dump_json().replace(str(self._folder), errand.study)
        return spec, TrialResult.model_validate_json(told)

    def _here(self, spec: TrialSpec, study: Path, code: Path | None) -> TrialSpec:
        """Return a spec with the paths and the device of this machine."""

        def moved(path: str | None) -> str | None:
            return None if path is None else str(self._folder / Path(path).relative_to(study))

        changes: dict[str, Any] = {
            **self.facts.place,
            "folder": moved(spec.folder),
            "cache_folder": moved(spec.cache_folder),
            "data": self._data_here(spec.data),
        }
        if code is not None:
            changes["workload"] = spec.workload.model_copy(update={"path": str(code)})
        if spec.check is not None:
            changes["check"] = spec.check.model_copy(update={"store": moved(spec.check.store)})
        return spec.model_copy(update=changes)

    def _written(self, errand: Errand) -> Path | None:
        """Write the code that came along; return the workload's file, or ``None`` if that is where it is there, which
        may have files beside it that are no modules."""
        path = errand.spec.workload.path
        if not errand.code or path is None or _is_here(Path(path), errand.code):
            return None
        # The module has the name of the file, and siblings are below its folder.
        folder = self._folder / "code" / errand.spec.workload.sha256[:12]
        for name, content in errand.code.items():
            file = folder / name
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        return folder / Path(path).name

    def _check_script(self, errand: Errand) -> None:
        if errand.script is None:
            return
        script = Path(errand.script)
        if not script.is_file():
            raise MachineError(f"there is no {script}", advice="a script is to be at the same path for all workers.")
        if source_hash(script) != errand.script_sha256:
            raise MachineError(f"{script} is another one there", advice="all workers are to run the same script.")

    def _data_here(self, asked: DataRef) -> DataRef:
        """Return the same data with its path here, looked at and read once.

        Raises:
            WorkloadError, MachineError: it is not here, or is other data.
        """
        if asked.path is None:
            return asked
        known = asked.model_dump_json(include={"kind", "path", "identity"})
        if known not in self._data:
            self._data[known] = self._found(asked)
        return asked.model_copy(update={"path": self._data[known].path})

    def _found(self, asked: DataRef) -> DataRef:
        assert asked.path is not None
        path = Path(asked.path)
        if asked.kind == "generated":
            found = sets.ensure_generated(
                processes=self.facts.host.cores, on_progress=lambda done, total: None, clock=self._clock
            )
            identities = {found.identity}
        elif not path.is_dir():
            raise WorkloadError(f"there is no folder {path}", advice="the data is to be at one path for all workers.")
        else:
            found, identities = asked, set(_identities(path)) if asked.identity else {""}
        if asked.identity not in identities:
            raise WorkloadError(f"{path} has other data", advice="all workers are to read the same data.")
        # So that the first launch does not read slower than the last.
        page_cache.warm(Path(found.path or path), clock=self._clock)
        return found


@contextlib.contextmanager
def folder_of_worker(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for a worker, and remove it at the end. Folders of workers that were killed are removed first.

    Args:
        parent: ``None`` for the folder of temporary files.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    prefix = f"autotune-worker-{os.geteuid()}-"
    with contextlib.ExitStack() as held:
        # So that nobody takes a folder for a left one whose lock is not held yet.
        with exclusive_lock(parent / f".{prefix}lock", wait=True):
            for left in parent.glob(f"{prefix}*"):
                with exclusive_lock(left / ".lock") as free:
                    if free:
                        shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            held.enter_context(exclusive_lock(folder / ".lock"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _identities(path: Path) -> list[str]:
    """Return the identities that a folder may have, by its layout."""
    found = [sets.tree(path).identity]
    with contextlib.suppress(WorkloadError):
        found.append(sets.folder(path).identity)
    return found


class WorkplaceThread:
    """A workplace in a thread of its own, so that its owner can be spoken to while an errand runs.

    Args:
        make: makes the workplace; called in that thread, which lasts until `close`.
        tell: receives progress of an errand, by its name, and how it ended; called in that thread.
    """

    def __init__(self, make: Callable[[], Workplace], tell: Callable[[str, Beat | ErrandEnd], None]) -> None:
        self._tell = tell
        self._ending = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="workplace")
        self._place = self._thread.submit(make).result()
        self.facts = self._place.facts

    def begin(self, errand: Errand) -> None:
        """Begin an errand, after the one that runs."""
        self._ending.clear()
        self._thread.submit(self._run, errand)

    def recall(self) -> None:
        """Have the errand end as interrupted."""
        self._ending.set()

    def close(self) -> None:
        """End what runs, and the workplace."""
        self._ending.set()
        with self._thread:
            self._thread.submit(self._place.close).result()

    def _run(self, errand: Errand) -> None:
        try:
            end = self._place.run(errand, on_beat=partial(self._tell, errand.name), stop=self._ending.is_set)
        except Exception as error:  # in a thread nobody would see it
            end = ErrandEnd(errand=errand.name, error=f"an error inside autotune: {type(error).__name__}: {error}")
        self._tell(errand.name, end)


def _is_here(path: Path, code: Mapping[str, bytes]) -> bool:
    """Return whether a file and the modules beside it are the same here."""
    try:
        return path.is_file() and source_files(path) == code
    except AutotuneError:
        return False


def _end_of(path: Path) -> str:
    try:
        return read_regular(path, LOG_BYTES, tail=True).decode(errors="replace")
    except (OSError, AutotuneError):
        return ""
