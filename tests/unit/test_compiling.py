"""What a failed compilation says of the machine, by the exception alone; and what doctor finds beforehand."""

from __future__ import annotations

import errno
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.base.records import TrialSpec, TrialStatus
from autotune.child.failure import classify
from autotune.child.probe import compiler_here
from autotune.cli.doctor import Check, State, _compilers
from autotune.knobs import KNOBS, SiteFacts
from tests.support import make_host, make_probe, make_spec

exc = pytest.importorskip("torch._inductor.exc")

GCC = ["/usr/bin/gcc", "/tmp/tmpabc/cuda_utils.c", "-O3", "-shared", "-o", "/tmp/tmpabc/cuda_utils.so"]
#: How a helper process of Inductor passes on an error.
SUBPROCESS = "An exception occurred in a subprocess:\n\nName=triton_poi_0\nTraceback (most recent call last):\n  {}\n"


@pytest.fixture
def spec(tmp_path: Path) -> TrialSpec:
    return make_spec(tmp_path / "a")


def by_the_compiler(error: Exception) -> Exception:
    if hasattr(exc, "InductorError"):
        made: Exception = exc.InductorError(error, None)
        return made
    from torch._dynamo.exc import BackendCompilerFailed  # older versions of PyTorch

    return BackendCompilerFailed(by_the_compiler, error)  # type: ignore[call-arg]


def in_a_helper(error: Exception) -> Exception:
    from torch._inductor.compile_worker.subproc_pool import SubprocException

    return by_the_compiler(SubprocException(SUBPROCESS.format(f"{type(error).__name__}: {error}")))


def cpp(output: str) -> Exception:
    made: Exception = exc.CppCompileError(["g++", "/cache/x.main.cpp"], output)
    return made


LACKING = {
    "no g++": (lambda: exc.InvalidCxxCompiler(), "apt install g++"),
    "no header": (lambda: cpp("/x.cpp:2:10: fatal error: Python.h: No such file or directory\n"), "-dev)"),
    "no header, clang": (lambda: cpp("/x.cpp:2:10: fatal error: 'Python.h' file not found\n"), "-dev)"),
    "no OpenMP": (lambda: cpp("/usr/bin/ld: cannot find -lgomp: No such file or directory\n"), "library gomp"),
    "no OpenMP, older linker": (
        lambda: cpp("/usr/bin/ld: cannot find -lgomp\ncollect2: error: ld returned 1"),
        "gomp.",
    ),
    "half a g++, quoted": (lambda: cpp("g++: fatal error: cannot execute ‘cc1plus’: execvp"), "cc1plus"),
    "half a g++": (lambda: cpp("g++: fatal error: cannot execute 'cc1plus': execvp: No such file"), "cc1plus"),
    "no gcc": (
        lambda: RuntimeError(
            "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
        ),
        "apt install gcc",
    ),
    "gcc fails": (lambda: subprocess.CalledProcessError(1, GCC), "stderr.log"),
    "no Triton": (lambda: exc.TritonMissing(None), "Triton"),
    "no libcuda": (lambda: AssertionError("libcuda.so cannot found!\nPossible files are located at []."), "ldconfig"),
    "no cache": (lambda: RuntimeError("Could not create or locate cache dir"), "TRITON_CACHE_DIR"),
}


@pytest.mark.parametrize("wrapped", [by_the_compiler, in_a_helper])
@pytest.mark.parametrize("name", LACKING)
def test_a_machine_that_lacks_something(spec: TrialSpec, name: str, wrapped: Callable[[Exception], Exception]) -> None:
    make, advice = LACKING[name]
    if name == "no Triton" and not hasattr(exc, "TritonMissing"):
        pytest.skip("this PyTorch has no TritonMissing")
    verdict = classify(wrapped(make()), spec)
    assert verdict.status is TrialStatus.COMPILE_FAILED and verdict.cannot_compile
    assert advice in str(verdict.advice) and "Traceback" not in verdict.cause
    assert len(verdict.cause.splitlines()) == 1


def test_triton_without_headers_names_the_package(spec: TrialSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own words are in the launch's log only."""
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: "/nowhere")
    verdict = classify(by_the_compiler(subprocess.CalledProcessError(1, GCC)), spec)
    assert verdict.cannot_compile and verdict.cause == "Python.h is not in /nowhere" and "-dev" in str(verdict.advice)


@pytest.mark.parametrize(
    "error",
    [
        cpp("/cache/x.cpp:9:1: error: expected ';' before 'return'\n"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        subprocess.CalledProcessError(1, ["ptxas", "--gpu-name=sm_90", "/tmp/kernel.ptx"]),
        OSError(errno.EACCES, os.strerror(errno.EACCES), "/data/table.bin"),
    ],
    ids=["bad code", "a kernel too large", "ptxas", "a file of the model's own"],
)
def test_a_model_that_cannot_be_compiled(spec: TrialSpec, error: Exception) -> None:
    verdict = classify(by_the_compiler(error), spec)
    assert verdict.status is TrialStatus.COMPILE_FAILED and not verdict.cannot_compile


def test_an_unreadable_file_of_the_users_own_is_no_compilers(spec: TrialSpec, tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError) as caught:
        Path(__file__, "below").write_text("")
    verdict = classify(caught.value, spec)
    assert verdict.status is TrialStatus.USER_ERROR and not verdict.cannot_compile


def found(**env: str) -> dict[str, Check]:
    return {check.name: check for check in _compilers(env)}


def test_doctor_looks_for_compilers_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g++", "clang"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    here = found(PATH=str(tmp_path))
    assert (here["c++ compiler"].state, here["c compiler"].state) == (State.OK, State.OK)
    header = here["python headers"]
    assert (
        header.state is State.LIMIT and str(tmp_path) in header.sentence and "apt install python3." in header.sentence
    )
    (tmp_path / "Python.h").touch()
    assert found(PATH=str(tmp_path))["python headers"].value == str(tmp_path / "Python.h")
    for stated in ("/nowhere/cc", "'", "ccache-of-nobody gcc"):
        lacking = found(PATH=str(tmp_path), CC=stated, CXX=stated)
        assert "apt install g++" in lacking["c++ compiler"].sentence
        assert "apt install gcc" in lacking["c compiler"].sentence


def test_doctor_finds_headers_where_the_compiler_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: "/nowhere")
    (tmp_path / "Python.h").touch()
    assert found(CPATH=f"/elsewhere:{tmp_path}")["python headers"].state is State.OK


def test_a_refused_mode_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    compiler, lack = compiler_here(None)
    assert compiler is None and lack is not None and "apt install g++" in lack
    facts = SiteFacts(make_probe(compiler=None, compiler_lack=lack), make_host(), 32)
    knob = KNOBS["compile_mode"]
    assert knob.refusal("default", facts) == lack and knob.refusal("off", facts) is None
