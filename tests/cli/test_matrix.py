"""What `autotune submit FILE.yaml` and `autotune profiles MATRIX.yaml` make of a file, without a daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run

Told = Callable[..., dict[str, Any]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Writes a matrix, runs a command on it, and returns what that prints as JSON."""
    monkeypatch.chdir(tmp_path)
    # A machine that runs these tests may have Slurm.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(tmp_path / "state"))

    def tell(text: str, *words: str) -> dict[str, Any]:
        Path("m.yaml").write_text(text)
        assert run([*words, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return tell


SUBMIT = ("submit", "m.yaml", "--dry-run")


def test_variables_tell_one_search_from_another(told: Told) -> None:
    text = "models: [{model: resnet18, env: [LR=0.1]}, {model: resnet18, env: [LR=0.2]}]\ntargets: {here: {}}"
    cells = told(text, *SUBMIT)["cells"]
    assert [cell["why"] for cell in cells] == ["missing", "missing"] and cells[0]["study"] != cells[1]["study"]


@pytest.mark.parametrize(
    "words", [("m.yaml",), ("--matrix", "m.yaml"), ("--matrix=m.yaml",), ("--state-dir", "s.yaml", "m.yaml")]
)
def test_profiles_takes_a_matrix_with_or_without_its_option(told: Told, words: tuple[str, ...]) -> None:
    (cell,) = told("models: [resnet18]\ntargets: {here: {}}", "profiles", *words)["cells"]
    assert (cell["model"], cell["state"]) == ("resnet18", "missing")


@pytest.mark.parametrize(
    ("options", "typed", "says"),
    [
        ("baseline: {precision: bf16, precison: fp32}", (), "m.yaml, line 2 on target here: unknown knob 'precison'"),
        ("set: {precision: bf16, num_workers: [99, hello]}", (), "m.yaml, line 2 on target here: num_workers must be"),
        ("set: {compile_mode: null}", (), "m.yaml, line 2: compile_mode has no value that an option can have"),
        ("fix: {precision: bf16}", ("--budget", "soon"), "target here with the options typed: --budget 'soon'"),
        ("budget: 5m", ("--study", "foo"), "--study is for one search. Leave it out"),
    ],
)
def test_an_error_says_where_it_comes_from(
    told: Told, capsys: pytest.CaptureFixture[str], options: str, typed: tuple[str, ...], says: str
) -> None:
    Path("m.yaml").write_text(f"models:\n- {{model: resnet18, {options}}}\ntargets: {{here: {{}}}}")
    assert run([*SUBMIT, *typed]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


MODELS = """\
models:
- resnet18
- {model: resnet18, data: synthetic}
- {model: resnet18, trials: 9}
- resnet18
- a/mine.py
- b/mine.py
targets: {here: {}, short: {trials: 5}}
"""


def test_a_row_is_a_model_of_the_list(told: Told) -> None:
    source = "def build(ctx): ...\ndef make_loader(ctx): ...\ndef train_step(ctx): ...\n"
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text(source)
    cells = told(MODELS, "profiles", "m.yaml")["cells"]
    assert [(cell["model"], cell["with"], cell["hardware"]) for cell in cells] == [
        *(("resnet18", with_, at) for with_ in ("", "data=synthetic") for at in ("here", "short")),
        # What its target says of its trials is what that says of the first one's.
        ("resnet18", "trials=9", "here"),
        *(("mine", f"model={folder}/mine.py", at) for folder in "ab" for at in ("here", "short")),
    ]
    assert sum(not cell["left_out"] for cell in told(MODELS, *SUBMIT)["cells"]) == len(cells)
