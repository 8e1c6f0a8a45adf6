"""The contract of a workload: finding, importing and checking the user's own code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import UnknownNameError, WorkloadError
from autotune.base.records import DataRef, WorkloadRef
from autotune.workload.contract import Context, args_of, load, optional

WHOLE = "def model(ctx): ...\ndef dataset(ctx): ...\ndef optimizer(ctx, m): ...\ndef loss(ctx, m, b): ...\n"
CONTEXT = Context(device="cpu", batch_size=8, image_size=None, seed=0, data=DataRef(kind="none"))


@pytest.fixture(autouse=True)
def _imports_undone() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "my_own_net.py") -> WorkloadRef:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return WorkloadRef(name=path.stem, path=str(path), module=path.stem)


def test_a_file_that_was_written_for_objects_before_finds_what_loads_them(tmp_path: Path) -> None:
    found: Any = load(write(tmp_path, WHOLE + "from autotune.carrying import Carried\n"))
    assert found.Carried.__module__ == "autotune.workload.carrying"


def test_a_file_is_imported_under_its_stem(tmp_path: Path) -> None:
    (tmp_path / "my_layers.py").write_text("WIDTH = 7\n")
    ref = write(tmp_path, WHOLE + "import my_layers\nclass Item: ...\n")
    found: Any = load(ref)
    assert sys.modules["my_own_net"] is found
    assert found.my_layers.WIDTH == 7
    # So that its objects can be unpickled in a worker that knows only sys.path.
    assert found.Item.__module__ == "my_own_net" and str(tmp_path) in sys.path
    assert load(ref) is found


def test_an_object_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = WHOLE.replace("(ctx", "(self, ctx").replace("\n", "\n    ").strip()
    write(tmp_path, f"class Net:\n    {inner}\nnet = Net()\n", "my_package/nets.py")
    monkeypatch.chdir(tmp_path)
    for name in ("Net", "net"):
        found = load(WorkloadRef(name=name, module="my_package.nets", attribute=name))
        assert type(found).__name__ == "Net"


class TestRefusals:
    def test_missing_functions_are_named(self, tmp_path: Path) -> None:
        ref = write(tmp_path, "def model(ctx): ...\nloss = 3\n")
        with pytest.raises(WorkloadError, match=r"(?m)no dataset, optimizer, loss$") as caught:
            load(ref)
        assert caught.value.advice

    @pytest.mark.parametrize("name", ["json.py", "autotune.py"])
    def test_a_stem_that_names_another_module(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(WorkloadError, match=rf"{name} is taken") as caught:
            load(write(tmp_path, WHOLE, name))
        assert "rename" in str(caught.value.advice)

    def test_two_files_with_the_same_stem(self, tmp_path: Path) -> None:
        load(write(tmp_path / "a", WHOLE))
        with pytest.raises(WorkloadError, match="taken"):
            load(write(tmp_path / "b", WHOLE))

    @pytest.mark.parametrize("line", ["BATCH_SIZE = 0", "BATCH_SIZE = '8'", "IMAGE_SIZE = -1", "CPU_IMAGE_SIZE = 9.5"])
    def test_invalid_constants(self, tmp_path: Path, line: str) -> None:
        with pytest.raises(WorkloadError, match=line.split(maxsplit=1)[0]):
            load(write(tmp_path, WHOLE + line))

    def test_an_error_in_the_file_itself_passes_through(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            load(write(tmp_path, "1 / 0\n"))

    def test_a_missing_module(self) -> None:
        with pytest.raises(WorkloadError, match=r"no module named 'nowhere\.at_all'"):
            load(WorkloadRef(name="Net", module="nowhere.at_all", attribute="Net"))

    def test_a_module_with_a_missing_import(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, "import nowhere_at_all\n", "my_module.py")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
            load(WorkloadRef(name="Net", module="my_module", attribute="Net"))

    def test_a_missing_object(self) -> None:
        with pytest.raises(WorkloadError, match="json has no 'Net'"):
            load(WorkloadRef(name="Net", module="json", attribute="Net"))


def test_arguments_are_the_declared_ones(tmp_path: Path) -> None:
    ref = write(tmp_path, WHOLE + "ARGS = {'depth': 3, 'width': 8}\n")
    workload = load(ref)
    assert args_of(workload, ref) == {"depth": "3", "width": "8"}
    assert args_of(workload, ref.model_copy(update={"args": {"depth": "5"}})) == {"depth": "5", "width": "8"}
    with pytest.raises(UnknownNameError) as caught:
        args_of(workload, ref.model_copy(update={"args": {"dept": "5"}}))
    assert caught.value.closest == ("depth",)


def test_a_workload_without_arguments_takes_none(tmp_path: Path) -> None:
    ref = write(tmp_path, WHOLE)
    with pytest.raises(UnknownNameError) as caught:
        args_of(load(ref), ref.model_copy(update={"args": {"depth": "5"}}))
    assert "takes no --arg" in str(caught.value.advice)


def test_optional_functions_may_be_missing(tmp_path: Path) -> None:
    workload = load(write(tmp_path, WHOLE + "def after_step(ctx, m): return 7\nsamples = 3\n"))
    hook = optional(workload, "after_step")
    assert hook is not None and hook(CONTEXT, None) == 7
    assert optional(workload, "after_backward") is None and optional(workload, "samples") is None


def test_a_context_answers_for_what_was_declared() -> None:
    context = Context(**{**vars(CONTEXT), "args": {"depth": "3"}, "knobs": {"blur": True}})
    assert context.arg("depth") == "3" and context.knob("blur") is True
    with pytest.raises(UnknownNameError):
        context.arg("dept")
    with pytest.raises(UnknownNameError):
        context.knob("blurr")


def test_the_contract_can_be_imported_without_torch() -> None:
    code = "import sys, autotune.workload.contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("KNOBS = ['blur']", "KNOBS must be a dictionary with names as keys, not ['blur']"),
        ("KNOBS = {'blur': 3}", "KNOBS['blur'] must be a tuple of numbers, text or booleans, not 3"),
        ("KNOBS = {'blur': 'ab'}", "not 'ab'"),
        ("KNOBS = {'blur': ()}", "not ()"),
        ("KNOBS = {'blur': (1.0, float('nan'))}", "not (1.0, nan)"),
        ("ARGS = 'depth'", "ARGS must be a dictionary"),
        ("DATA = 7", 'DATA must be "images" or None, not 7'),
    ],
)
def test_a_constant_of_the_wrong_type_is_named(tmp_path: Path, declared: str, said: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        load(write(tmp_path, WHOLE + declared + "\n"))
    assert said in str(refused.value)
