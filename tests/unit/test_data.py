"""Generated sets of photographs, which are complete or do not exist."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autotune.base.errors import MachineError
from autotune.base.files import exclusive_lock
from autotune.base.records import DataRef
from autotune.workload.data import sets as data
from autotune.workload.data.photographs import photograph

from ..process.alive import wait_until  # noqa: TID252

COUNT = 6


def generate(
    root: Path,
    *,
    count: int = COUNT,
    processes: int = 2,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_warning: Callable[[str], None] | None = None,
) -> DataRef:
    return data.ensure_generated(root, count=count, processes=processes, on_progress=on_progress, on_warning=on_warning)


def folder_of(ref: DataRef) -> Path:
    assert ref.path is not None
    return Path(ref.path)


def visible(root: Path) -> list[str]:
    """Return the names of sets and leftovers of sets; lock files are permanent."""
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DataRef:
    return generate(tmp_path_factory.mktemp("made"))


def test_a_set_is_an_image_folder_with_a_manifest(made: DataRef) -> None:
    folder = folder_of(made)
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))
    assert files == [f"class_{index:02d}/{index:04d}.jpg" for index in range(COUNT)]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["schema_version"], manifest["count"], manifest["seed"]) == (1, COUNT, 0)
    for entry in manifest["files"]:
        content = (folder / entry["path"]).read_bytes()
        assert entry["size_bytes"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert (folder / "class_05/0005.jpg").read_bytes() == photograph(0, 5)


def test_a_generated_set_stands_for_an_imagenet_epoch(made: DataRef) -> None:
    assert made.kind == "generated"
    assert made.epoch_samples == 1_281_167
    manifest = (folder_of(made) / "manifest.json").read_bytes()
    assert made.identity == hashlib.sha256(manifest).hexdigest()


def test_progress_counts_every_file_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, COUNT) for done in range(1, COUNT + 1)]


def test_a_set_does_not_depend_on_the_number_of_processes(made: DataRef, tmp_path: Path) -> None:
    alone = generate(tmp_path, processes=1)
    assert (alone.identity, alone.path != made.path) == (made.identity, True)


def test_an_existing_set_is_used_at_once(made: DataRef) -> None:
    def refuse(done: int, total: int) -> None:
        raise AssertionError("made again")

    assert generate(folder_of(made).parent, on_progress=refuse) == made


def test_other_parameters_give_another_set(made: DataRef) -> None:
    other = generate(folder_of(made).parent, count=2)
    assert other.path != made.path
    assert other.identity != made.identity
    assert generate(folder_of(made).parent) == made


def remove_one(folder: Path) -> None:
    (folder / "class_03/0003.jpg").unlink()


def truncate_one(folder: Path) -> None:
    (folder / "class_03/0003.jpg").write_bytes(photograph(0, 3)[:1000])


def scribble_over_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"schema_version": 1, ')


def manifest_of_another_set(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "seed": 7}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_one, "class_03/0003.jpg: No such file"),
        (truncate_one, "class_03/0003.jpg: 1000 bytes instead of"),
        (scribble_over_the_manifest, "manifest.json cannot be read"),
        (manifest_of_another_set, "manifest.json describes another set"),
    ],
)
def test_a_damaged_set_is_reported_and_generated_again(
    made: DataRef, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / folder_of(made).name
    shutil.copytree(folder_of(made), folder)
    damage(folder)
    warnings: list[str] = []
    again = generate(tmp_path, on_warning=warnings.append)
    assert again.identity == made.identity
    assert len(warnings) == 1
    assert said in warnings[0]
    assert (folder / "class_03/0003.jpg").read_bytes() == photograph(0, 3)
    assert visible(tmp_path) == [folder.name]


def test_an_exception_in_progress_ends_the_generation_and_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, count=40, on_progress=interrupt)
    assert visible(tmp_path) == []
    assert workers_in(tmp_path) == []
    assert generate(tmp_path).epoch_samples is not None


def workers_in(root: Path) -> list[int]:
    """Return the worker processes that write below ``root``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            if "autotune.workload.data.photographs" in command and any(str(root) in part for part in command):
                found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_killed_generation_leaves_no_worker_and_no_set_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    count = 60
    code = (
        "import sys; from pathlib import Path; from autotune.workload.data.sets import ensure_generated\n"
        f"ensure_generated(Path(sys.argv[1]), count={count}, processes=2, on_progress=lambda *n: print(*n, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"1 {count}\n"
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not workers_in(tmp_path))
    assert [name for name in visible(tmp_path) if not name.startswith(".making-")] == []
    assert len(visible(tmp_path)) == 1

    ref = generate(tmp_path, count=count)
    assert visible(tmp_path) == [folder_of(ref).name]
    assert len(list(folder_of(ref).glob("*/*.jpg"))) == count


class OtherProcess:
    """A clock on which the holder of a set's lock finishes the set while the caller waits."""

    def __init__(self, lock: Path, finish: Callable[[], object]) -> None:
        self._held = contextlib.ExitStack()
        assert self._held.enter_context(exclusive_lock(lock))
        self._finish = finish
        self.slept = 0

    def now(self) -> float:
        return float(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        if self.slept == 3:
            self._finish()
            self._held.close()


def test_the_second_of_two_waits_for_the_first_and_generates_nothing(made: DataRef, tmp_path: Path) -> None:
    name = folder_of(made).name
    half_made = tmp_path / f".making-{name}-other/set/class_00"
    half_made.mkdir(parents=True)
    (half_made / "0000.jpg").write_bytes(b"")

    clock = OtherProcess(tmp_path / f".{name}.lock", lambda: shutil.copytree(folder_of(made), tmp_path / name))
    seen: list[tuple[int, int]] = []
    ref = data.ensure_generated(
        tmp_path, count=COUNT, processes=1, clock=clock, on_progress=lambda *counts: seen.append(counts)
    )
    assert ref.identity == made.identity
    # The other process's files were reported while waiting, and this one generated none.
    assert seen == [(1, COUNT)] * 3


def test_a_root_that_cannot_be_a_folder_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot make the generated photographs") as caught:
        generate(tmp_path / "file" / "data")
    assert caught.value.advice is not None


def test_a_worker_that_cannot_write_is_reported_with_the_reason(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(MachineError, match="File too large"):
            generate(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert visible(tmp_path) == []


def test_workers_that_fail_to_start_are_reported_with_their_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MachineError, match=f"only 0 of {COUNT}") as caught:
        generate(tmp_path / "root")
    assert caught.value.detail is not None
    assert "no numpy today" in caught.value.detail


@pytest.mark.parametrize(("count", "processes"), [(0, 1), (1, 0)])
def test_counts_below_one_are_refused(tmp_path: Path, count: int, processes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        generate(tmp_path, count=count, processes=processes)


def test_the_parent_imports_neither_torch_nor_numpy_nor_pillow() -> None:
    code = "import sys, autotune.workload.data.sets; print(sorted({'torch', 'numpy', 'PIL'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
