"""A real search on two single cores: what is pinned, what overlaps, and what a kill and a signal leave."""

import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest

from autotune.base.layout import StudyFiles
from autotune.base.records import TrialStatus
from autotune.space import key
from autotune.study.history import read_launch, read_launches
from autotune.study.request import read_request
from autotune.study.tables import read_trials

from .alive import marked, wait_until

DEADLINE_S = 90.0
REPORT = """
import os

print("cores", sorted(os.sched_getaffinity(0)), "threads", torch.get_num_threads())
"""


def running(files):
    """Return the specs of the trials that run: their processes have begun, and no result is there."""
    open_ = [f for f in files.trials.glob("*") if not (f / "result.json").exists()]
    found = [read_launch(files.trial(int(f.name)))[0] for f in open_]
    return [spec for spec in found if spec is not None and files.trial(spec.number).stdout.exists()]


def proof(files):
    """Return the results of the launches in which finalists and baseline take turns."""
    return list(files.launches.glob("verify-*/result.json"))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_cores_killed_interrupted_and_resumed(workloads, tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("this machine has one core")
    one, other = allowed[:2]
    (tmp_path / "mine.py").write_text((workloads / "tiny.py").read_text() + REPORT)
    files = StudyFiles(tmp_path / "studies" / "two")
    start = [
        "search", "--model", "mine.py", "--study", "two", "--devices", f"cpu:{one},cpu:{other}", "--trials", "7",
        "--budget", "200s", "--fix", "workload.pause=false", "--fix", "compile_mode=off", "--set", "num_workers=0",
        "--sampler", "random", "--allow-busy",
    ]  # fmt: skip

    def begin(*arguments):
        command = [sys.executable, "-P", "-m", "autotune", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def two_run(process):
        assert process.poll() is None, "it ended before two trials ran side by side"
        return len(running(files)) == 2

    # kill -9 in the middle of two trials.
    with begin(*start) as killed:
        wait_until(lambda: two_run(killed), DEADLINE_S)
        killed.kill()
    wait_until(lambda: not marked(read_request(files).mark))
    lost = {spec.number: key(spec.config) for spec in running(files)}
    assert len(lost) == 2

    # Ctrl-C in the middle of two others.
    with begin("resume", "two") as stopped:
        wait_until(lambda: two_run(stopped) and not lost.keys() & {s.number for s in running(files)}, DEADLINE_S)
        stopped.send_signal(signal.SIGINT)
        stopped.communicate(timeout=DEADLINE_S)
        assert stopped.returncode == 130
    assert not marked(read_request(files).mark) and not running(files)
    trials = {t.number: t for t in read_trials(files)}
    interrupted = [n for n, t in trials.items() if t.result.status is TrialStatus.INTERRUPTED]
    assert lost.keys() < set(interrupted) and len(interrupted) in (3, 4)

    # The rest of the trials, and the proof's first launches.
    with begin("resume", "two") as last:
        wait_until(lambda: last.poll() is not None or len(proof(files)) > 2, DEADLINE_S)
        last.send_signal(signal.SIGINT)
        last.communicate(timeout=DEADLINE_S)
    assert len(proof(files)) > 2 and not marked(read_request(files).mark)
    verdicts = Counter(key(t.config) for t in read_trials(files) if t.result.status is not TrialStatus.INTERRUPTED)
    assert len(verdicts) == 7 and max(verdicts.values()) == 1

    launches = list(read_launches(files))
    places = set()
    for spec, result in launches:
        said = (files.trial(spec.number) if spec.number is not None else files.launch(spec.launch)).stdout.read_text()
        if result.status is TrialStatus.COMPLETE:
            assert f"cores {list(spec.cores)} threads 1" in said, spec.launch
        if spec.number is None:
            assert spec.cores == (one,), "what is measured alone runs on the first device"
        places.add(spec.cores)
    assert places == {(one,), (other,)}

    spans = sorted((r.began_s, r.began_s + r.wall_s, s) for s, r in launches if r.began_s is not None and r.wall_s)
    together = [(a, b) for (_, end, a), (begin_s, _, b) in combinations(spans, 2) if begin_s < end]
    assert together, "no trials overlapped"
    for a, b in together:
        assert a.number and b.number, f"{a.launch} and {b.launch} overlapped"
        assert a.cores != b.cores
