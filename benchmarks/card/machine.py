"""Parts that look at the machine: facts, `autotune doctor`, and the tests that need a card."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sysconfig
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from autotune.machine.gpu import gpus
from autotune.machine.host import read_host
from benchmarks.card.stage import ROOT, Skipped, Stage, last_json, tail

_LIMITS = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_MEMLOCK", "RLIMIT_DATA", "RLIMIT_AS", "RLIMIT_CORE")
#: Variables that change how torch or CUDA behave. Only that they are set is noted.
_VARIABLES = re.compile(r"(CUDA|NVIDIA|PYTORCH|TORCH|TRITON|OMP|MKL|NCCL|CUBLAS|CUDNN|OPENBLAS|LD_PRELOAD)")


def facts(stage: Stage) -> None:
    """Note what the system, NVML, the template's imports and CUDA say."""
    stage.note(system=_system())
    found, took_s = _timed(gpus)
    cards = [asdict(card) for card in found] if isinstance(found, list) else []
    for card in cards:
        card["processes"] = None if card["processes"] is None else len(card["processes"])
        stage.add("cards", card)
    stage.note(asking_nvml_s=round(took_s, 3), nvml=None if isinstance(found, list) else asdict(found))
    if stage.uuid is None:
        stage.replaced("NVML and CUDA are not asked")
    else:
        stage.note(nvml_idle=stage.script("ask", "nvml", stage.uuid, limit_s=30))
    stage.note(template=stage.script("ask", "template", limit_s=90))
    for number in range(stage.pick(2, 1)):
        # Twice, because the first import of a machine reads files.
        stage.add("torch", stage.script("ask", "torch", stage.uuid or "cpu", limit_s=min(120, stage.left_s - number)))


def _system() -> dict[str, Any]:
    include = sysconfig.get_paths()["include"]
    return {
        **read_host().model_dump(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "limits": {name.removeprefix("RLIMIT_"): resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS},
        "machine_cores": os.cpu_count(),
        "compilers": [name for name in ("g++", "clang++", "c++", "gcc", "nvcc") if shutil.which(name)],
        "python_headers": Path(include, "Python.h").exists(),
        "dxg": Path("/dev/dxg").exists(),
        "nvidia_devices": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "variables": sorted(name for name in os.environ if _VARIABLES.match(name)),
    }


def _timed(ask: Any) -> tuple[Any, float]:
    began = time.monotonic()
    return ask(), time.monotonic() - began


def doctor(stage: Stage) -> None:
    """Run `autotune doctor`."""
    ended = stage.python("-m", "autotune", "doctor", "--json", limit_s=stage.left_s)
    told = last_json(ended)
    stage.note(exit_code=ended.returncode, healthy=told["ok"])
    for check in told["checks"]:
        stage.add("checks", check)


def tests(stage: Stage) -> None:
    """Run the tests marked ``gpu``.

    Without the project's pytest options, which need plugins, and only the files that have such tests, because others
    import packages for tests.
    """
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed here")
    files = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py")) if _is_for_cards(p)]
    report = stage.folder / "tests.xml"
    options = ["-c", "/dev/null", f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider"]
    options += [
        "-m",
        "gpu",
        "-q",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        f"--junitxml={report}",
        f"--basetemp={stage.folder / 'pytest'}",
    ]
    ended = stage.python("-m", "pytest", *options, *files, limit_s=stage.left_s - 10)
    stage.note(files=files, exit_code=ended.returncode)
    if not report.exists():
        raise RuntimeError(tail(ended.stdout) or tail(ended.stderr))
    rows = [_test(case) for case in ElementTree.parse(report).iter("testcase")]
    stage.note(outcomes=dict(Counter(row["outcome"] for row in rows)), tests=rows)
    if stage.rehearsal:
        stage.replaced("tests that need a card are skipped")
    elif ended.returncode not in (0, 5):
        raise RuntimeError(
            f"tests fail: {', '.join(row['test'] for row in rows if row['outcome'] in ('failure', 'error'))}"
        )


def _is_for_cards(path: Path) -> bool:
    text = path.read_text()
    return "mark.gpu" in text


def _test(case: Any) -> dict[str, Any]:
    bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    return {
        "test": case.get("name"),
        "outcome": "passed" if bad is None else bad.tag,
        "seconds": float(case.get("time", 0)),
        "message": None if bad is None else tail(bad.text or bad.get("message", ""), 8),
    }
