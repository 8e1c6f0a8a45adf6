"""What ``autotune submit --to slurm`` and ``autotune jobs`` refuse where there is no Slurm. `tests/cluster` has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cli.main import run

TO_SLURM = ("submit", "--to", "slurm", "--model", "resnet18")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["submit", "--to", "slum", "--model", "resnet18"], 2, "Did you mean slurm?"),
        (["submit", "--model", "resnet18", "--partition", "gpu"], 2, "--partition is for Slurm's queue"),
        ([*TO_SLURM, "--priority", "5"], 2, "--priority is for the daemon's queue"),
        ([*TO_SLURM, "--not-before", "22:00"], 2, "--sbatch begin=22:00"),
        ([*TO_SLURM, "--time", "soon"], 2, "is no duration"),
        ([*TO_SLURM, "--time", "4m"], 2, "At least 5m"),
        ([*TO_SLURM, "--mem", "much"], 2, "is no size"),
        ([*TO_SLURM, "--cpus", "0"], 2, "Invalid value for '--cpus'"),
        ([*TO_SLURM, "--partition", "a\nb"], 2, "--partition cannot be"),
        ([*TO_SLURM, "--sbatch", "--constraint=a100"], 2, "without its dashes"),
        ([*TO_SLURM, "--sbatch", "constraint=a\nrm -rf"], 2, "--sbatch constraint cannot be"),
        ([*TO_SLURM, "--sbatch", "output=/tmp/x"], 2, "is set by autotune"),
        ([*TO_SLURM, "--sbatch", "partition=gpu"], 2, "Write --partition"),
        ([*TO_SLURM, "--sbatch", "nice=1", "--sbatch", "nice=2"], 2, "gives nice twice"),
        (["submit", "--to", "slurm", "--replay", "surface.jsonl"], 2, "--replay needs no node"),
        (["submit", "--to", "slurm"], 2, "--model says what to train"),
        (["submit", "--to", "slurm", "night.yaml"], 2, "night.yaml, line 1: unknown option 'to'"),
        (TO_SLURM, 5, "there is no sbatch here"),
        (["submit", "matrix.yaml"], 5, "there is no sbatch here"),
        (["submit", "matrix.yaml", "--priority", "5"], 2, "--priority is for the daemon's queue"),
        (["submit", "wrong.yaml"], 2, "wrong.yaml, line 1 on target gpu: --time 'soon'"),
        (["jobs", "show", "slurm:x"], 2, "'slurm:x' is no job of Slurm's"),
        (["jobs", "show", "x"], 2, "'x' is no job's number"),
        (["jobs", "show", "slurm:17"], 2, "unknown job 'slurm:17'"),
        (["jobs", "pause", "slurm:17"], 2, "`scontrol hold 17`"),
        (["jobs", "pause", "x"], 2, "Invalid value for 'ID'"),
    ],
)
def test_one_sentence_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    (tmp_path / "night.yaml").write_text("jobs: [{model: resnet18, to: slurm}]")
    matrix = "models: [resnet18]\ntargets: {gpu: {to: slurm, time: 2h}}"
    (tmp_path / "matrix.yaml").write_text(matrix)
    (tmp_path / "wrong.yaml").write_text(matrix.replace("2h", "soon"))
    monkeypatch.chdir(tmp_path)
    # A machine that runs these tests may have Slurm.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(tmp_path / "state"))
    assert run(list(words)) == code
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert not (tmp_path / "studies").exists()
