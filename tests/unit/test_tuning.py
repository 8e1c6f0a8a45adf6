"""`autotune.tune`: its arguments, and its workloads as functions. Whole searches are in `tests/cli`."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.base.errors import UnknownNameError, UsageError
from autotune.search.tuning import ARGUMENTS
from autotune.study.request import OPTIONS, spec_of
from autotune.workload.catalog import constants

#: Takes the functions from a script's main module, writes their file, and imports it in a fresh process.
SCRIPT = """
import sys
from pathlib import Path
from autotune.base.errors import UsageError
from autotune.search.tuning.workload_file import model_argument
{code}
try:
    print(model_argument({workload}, Path(sys.argv[1])))
except UsageError as error:
    print(error, "|", error.advice)
print("torch" in sys.modules)
"""
#: Four functions without torch: only their names matter here.
FUNCTIONS = """
def model(ctx): return ctx
def dataset(ctx): return ctx
def optimizer(ctx, m): return m
def loss(ctx, m, batch): return batch
"""
#: The same in a notebook's cells: functions that use each other, a decorated one, and cells that run again, changed.
CELLS = """
import functools, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
written = "print(model_argument(dict(model=model, dataset=dataset, optimizer=optimizer, loss=loss), Path(sys.argv[1])))"
for cell in (
    "import functools, sys; from pathlib import Path; from autotune.search.tuning.workload_file import model_argument",
    "WIDTH = 3\\ndef layers(n): return [WIDTH] * n",
    "def noted(f):\\n    @functools.wraps(f)\\n    def inner(*a): return f(*a)\\n    return inner",
    "@noted\\ndef model(): return layers(2)",
    "from dataclasses import dataclass\\ndef dataset(ctx): return Rows().rows\\nclass Rows:\\n    rows = WIDTH",
    "def optimizer(model): return model\\ndef loss(model, batch): return batch",
    written,
    "WIDTH = 4",
    "def layers(n): return (WIDTH,) * n",
    "@dataclass\\nclass Rows:\\n    rows: int = -WIDTH",
    written,
):
    shell.run_cell(cell, store_history=True).raise_error()
"""
FOUR = "dict(model=model, dataset=dataset, optimizer=optimizer, loss=loss)"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs code as a script's main module and returns what it printed: the file or the error."""
    (tmp_path / "beside.py").write_text("SIZE = 3\ndef double(x): return 2 * x\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)

    def run(code: str, workload: str = FOUR) -> str:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(code=code, workload=workload))
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "studies")])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script), run_name="__main__")
        return printed.getvalue().splitlines()[0]

    yield run
    sys.modules.pop("beside", None)


def evaluated(code: str, *words: str) -> str:
    """Return what code prints in a fresh process with these arguments."""
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/").stdout.strip()


def imported(path: str, expression: str) -> str:
    """Import a file in a fresh process, as a trial does, and evaluate an expression with its names."""
    code = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "print(eval(sys.argv[3], vars(importlib.import_module(sys.argv[2]))))"
    )
    return evaluated(code, str(Path(path).parent), Path(path).stem, expression)


def loaded(path: str, expression: str) -> str:
    """Load a workload's file in a fresh process, as a trial does, and evaluate an expression with ``found``."""
    code = (
        "import sys; from autotune import Context; from autotune.workload.catalog import find_workload\n"
        "from autotune.workload.contract import load\n"
        "found, ctx = load(find_workload(sys.argv[1], {})), Context('cpu', 1, None, 0, None)\n"
        "print(eval(sys.argv[2]))"
    )
    return evaluated(code, path, expression)


class TestArguments:
    def test_are_the_options_of_a_search(self) -> None:
        """Both come from one declaration: an option of the command line is an argument, unless it says otherwise."""
        parameters = inspect.signature(autotune.tune).parameters
        own = {"dataset", "optimizer", "loss", "observer"}
        assert parameters.keys() - own == {o.keyword for o in OPTIONS if o.keyword is not None}
        assert {o.name for o in OPTIONS if o.keyword is None} == {
            "dry_run",
            "map",
            "on",
            "on_resources",
            "output_flag",
            "rate",
            "rate_file",
            "replay",
            "samples_per_step",
            "scratch",
            "script",
            "storage",
            "workers",
        }
        for name, one in ARGUMENTS.items():
            if name != "model":
                assert f"        {name}: {one.help[:10]}" in (autotune.tune.__doc__ or "")

    @pytest.mark.parametrize(
        ("name", "value", "field", "becomes"),
        [
            ("args", {"width": 3, "deep": True}, "args", {"width": "3", "deep": "true"}),
            ("data", Path("/data"), "data", "/data"),
            ("study", "one", "name", "one"),
            ("budget", 90, "budget_s", 90.0),
            ("budget", 0.5, "budget_s", 0.5),
            ("budget", "1h30m", "budget_s", 5400.0),
            ("trials", 3, "trials", 3),
            ("baseline", {"num_workers": 4}, "baseline", {"num_workers": "4"}),
            ("set", {"batch_size": [32, 64], "pin_memory": True}, "narrowed",
             {"batch_size": ("32", "64"), "pin_memory": ("true",)}),
            ("fix", {"pin_memory": False}, "fixed", {"pin_memory": "false"}),
            ("memory_limit", 2**30, "memory_limit_bytes", 2**30),
            ("memory_limit", "2GiB", "memory_limit_bytes", 2**31),
            ("allow_busy", True, "allow_busy", True),
            ("objective", Path("/mine.py"), "objective", "/mine.py"),
        ],
    )  # fmt: skip
    def test_make_the_same_request(self, name: str, value: Any, field: str, becomes: Any) -> None:
        one = ARGUMENTS[name]
        spec = spec_of({"model": "m", one.name: one.parsed(value)}, mark="m", created="c")
        assert getattr(spec, field) == becomes

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"budget": "10x"}, "budget '10x' is no duration"),
            ({"budget": -1}, "budget must be a number of seconds above zero, not -1"),
            ({"budget": True}, 'budget takes seconds, or text as in "10m", not True'),
            ({"trials": 0}, "trials must be at least 1, not 0"),
            ({"trials": 2.5}, "trials takes a whole number, not 2.5"),
            ({"batch_size": "32"}, "batch_size takes a whole number, not '32'"),
            ({"fix": "precision=bf16"}, "fix takes a dictionary of values by name, not 'precision=bf16'"),
            ({"fix": {"num_workers": [1, 2]}}, "fix takes text, a number, True or False for num_workers"),
            ({"set": {"num_workers": []}}, "set takes NAME=VALUE"),
            ({"set": {"seed": 1}, "fix": {"seed": 1}}, "seed is given both to set and to fix"),
            ({"batch_size": 32, "baseline": {"batch_size": 64}}, "batch_size 32 and baseline batch_size=64 contradict"),
            ({"allow_busy": 1}, "allow_busy takes True or False, not 1"),
            ({"data": 3}, "data takes text or a path, not 3"),
            ({"sampler": "best"}, "unknown sampler 'best'"),
            ({"device": "gpu"}, "unknown device 'gpu'"),
            ({"budjet": "1m"}, "unknown argument of autotune.tune 'budjet'"),
            ({"dataset": len}, "dataset cannot be given beside a name or a file"),
        ],
    )
    def test_wrong_ones_are_told_in_a_sentence(self, arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            autotune.tune("resnet50", **{"studies_dir": tmp_path / "studies", **arguments})
        assert str(caught.value).startswith(sentence)
        assert not (tmp_path / "studies").exists()

    def test_advice_is_in_the_traceback(self) -> None:
        with pytest.raises(UnknownNameError) as caught:
            autotune.tune("resnet50", budjet="1m")
        assert caught.value.__notes__[0].startswith("Did you mean budget")

    @pytest.mark.parametrize("model", [3, None, object(), types.SimpleNamespace(model=len), int])
    def test_what_is_no_workload(self, model: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no workload: it has no .*dataset, optimizer, loss"):
            autotune.tune(model, studies_dir=tmp_path)

    def test_some_of_the_four_functions(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="dataset, loss must be given too"):
            autotune.tune(len, optimizer=len, studies_dir=tmp_path)


class TestWorkloads:
    def test_functions_bring_what_they_use(self, written: Any) -> None:
        code = FUNCTIONS.replace("def model(ctx): return ctx", '''
import json
import xml.dom.minidom
import os.path as p
from functools import wraps
from pathlib import Path
from dataclasses import dataclass
from beside import Thing, double as twice
import beside as other
RATE = 0.5
TABLE = {"a": (1, [2.0, None]), "b": {3}}
HERE = Path("/data")

@dataclass
class Config:
    rate: float = RATE

config = Config(rate=0.25)

def noted(function):
    @wraps(function)
    def inner(*args): return function(*args)
    return inner

class Net(Thing):
    base = RATE
    rates = [RATE * i for i in range(2)]
    def __init__(self): super().__init__()
    def value(self): return helper(TABLE["a"]), HERE, config.rate

@noted
def helper(x): return json.dumps(x), p.join("a", "b"), twice(other.SIZE), xml.dom.minidom.Node.TEXT_NODE

def build(ctx):
    json = None  # not the module
    TABLE = ctx
    return Net().value()
''')  # fmt: skip
        path = written(code, FOUR.replace("model=model", "model=build, BATCH_SIZE=16"))
        assert Path(path).name == "train_workload.py"
        found = imported(path, "model(1), BATCH_SIZE, Net.rates, loss(0, 0, 5)")
        assert found == "((('[1, [2.0, null]]', 'a/b', 6, 3), PosixPath('/data'), 0.25), 16, [0.0, 0.5], 5)"

    def test_an_instance_is_built_again_with_its_plain_values(self, written: Any) -> None:
        body = FUNCTIONS.replace("(ctx", "(self, ctx").replace("\n", "\n    ")
        start = "    KNOBS = {'deep': (False, True)}\n    def __init__(self, width): self.width = width\n"
        code = f"class Mine:\n{start}{body}"
        path = written(code, "Mine(width=[64, 32])")
        assert Path(path).name == "Mine_workload.py"
        assert imported(path, "_workload.width, model(7), KNOBS") == "([64, 32], 7, {'deep': (False, True)})"

    def test_functions_need_no_context(self, written: Any) -> None:
        code = """
class Net:
    def __init__(self, width=3): self.width = width
def dataset(ctx=None): return ctx
def optimizer(model, rate=0.1): return model, rate
def batch_loss(model, batch): return batch
def loss(ctx, model, batch): return batch_loss(model, batch), optimizer(model)
"""
        path = written(code, FOUR.replace("model=model", "model=Net"))
        calls = "model(C).width, dataset(C), optimizer(C, 1), loss(C, 1, 2)"
        context = "__import__('autotune').Context('cpu', 1, None, 0, None)"
        found = imported(path, f"[({calls}) for C in [{context}]][0]")
        assert found.startswith("(3, Context(") and found.endswith(", (1, 0.1), (2, (1, 0.1)))")

    def test_a_class_and_the_main_module(self, written: Any) -> None:
        body = FUNCTIONS.replace("(ctx", "(self, ctx").replace("\n", "\n    ")
        assert imported(written(f"class Mine:{body}", "Mine"), "dataset(7)") == "7"
        path = written(FUNCTIONS + "BATCH_SIZE = 8\n", "sys.modules['__main__']")
        assert imported(path, "dataset(7), BATCH_SIZE") == "(7, 8)"

    def test_cells_of_a_notebook_are_written_as_they_are_now(self, tmp_path: Path) -> None:
        pytest.importorskip("IPython")
        script = tmp_path / "cells.py"
        script.write_text(CELLS)
        command = [sys.executable, str(script), str(tmp_path / "studies")]
        env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
        assert done.returncode == 0, done.stderr
        before, after = done.stdout.splitlines()
        assert imported(before, "model(), dataset(1)") == "([3, 3], 3)"
        assert imported(after, "model(), dataset(1)") == "((4, 4), -4)"

    def test_what_a_function_uses_is_no_part_of_the_workload(self, written: Any) -> None:
        """Constants and helpers may be called like a workload's functions and constants."""
        code = FUNCTIONS.replace(
            "def model(ctx): return ctx",
            """
DATA, BATCH_SIZE = ("a", "b"), "auto"
def loader(samples): return samples
def collate(samples): return [*samples, BATCH_SIZE]
def build(): return collate(loader(DATA))
""",
        )
        path = written(code, FOUR.replace("model=model", "model=build, KNOBS={'deep': (False, True)}"))
        assert loaded(path, "found.model(ctx), found.KNOBS, sorted(vars(found))") == (
            "(['a', 'b', 'auto'], {'deep': (False, True)}, ['KNOBS', 'dataset', 'loss', 'model', 'optimizer'])"
        )
        assert constants(Path(path), ("BATCH_SIZE",)) == {"BATCH_SIZE": None}
        # A method, and a helper of its name.
        body = FUNCTIONS.replace("(ctx): return ctx", "(self, ctx): return model(ctx)").replace("\n", "\n    ")
        assert loaded(written(f"{FUNCTIONS}class Mine:{body}", "Mine"), "found.model(7), found.dataset(8)") == "(7, 8)"

    def test_a_module_is_its_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from autotune.search.tuning.workload_file import model_argument

        (tmp_path / "own_workload_of_a_test.py").write_text(FUNCTIONS)
        monkeypatch.syspath_prepend(str(tmp_path))
        module = __import__("own_workload_of_a_test")
        assert model_argument(module, tmp_path) == str(tmp_path / "own_workload_of_a_test.py")

    def test_torch_stays_out_of_the_callers_process(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(code=FUNCTIONS, workload=FOUR))
        command = [sys.executable, str(script), str(tmp_path / "studies")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        path, torch = done.stdout.splitlines()
        assert torch == "False" and imported(path, "model(3)") == "3"

    def test_the_same_functions_are_the_same_file(self, written: Any) -> None:
        first = written(FUNCTIONS)
        assert written(FUNCTIONS) == first
        assert written(FUNCTIONS + "\n\ndef unused(): pass\n") == first
        assert written(FUNCTIONS.replace("return batch", "return ctx")) != first

    @pytest.mark.parametrize(
        ("code", "sentence"),
        [
            ("net = __import__('io').BytesIO()\ndef model(ctx): return net", "model uses 'net', a BytesIO, which"),
            ("model = lambda ctx: 1", "model is a lambda"),
            ("def outer(net):\n    def model(ctx): return net\n    return model\nmodel = outer(1)",
             "model uses net of the function around it"),
            ("exec('def model(ctx): return 1')", "the source of model cannot be found"),
            ("def model(ctx): return __file__", "model uses __file__"),
            ("import functools\nmodel = functools.partial(len, [])", "the workload uses 'model', a partial"),
            ("class A:\n    def model(self, ctx): return 1\nmodel = A().model", "model is a method of an object"),
            ("class A: pass\nCONFIG = {'net': A()}\ndef model(ctx): return CONFIG", "model uses 'net', a A,"),
            ("import beside\nTHING = beside.Thing()\ndef model(ctx): return THING", "model uses 'THING', a Thing,"),
            ("from math import inf\nX = inf\ndef model(ctx): return X", "model uses 'X', inf"),
        ],
    )  # fmt: skip
    def test_live_objects_are_refused(self, written: Any, code: str, sentence: str) -> None:
        found = written(FUNCTIONS + code)
        assert found.startswith(sentence) and "|" in found
