"""Result files that must not be trusted, and output of any kind and size."""

import json
import os
import re
import subprocess
import sys

import pytest

from autotune.base.records import MeasurePlan, Phase, TrialStatus
from autotune.launcher import watch

MIB = 2**20


@pytest.mark.parametrize(
    "name",
    [
        "truncated",
        "empty",
        "nan",
        "infinite",
        "too_large_a_number",
        "of_100_mb",
        "bytes_of_no_encoding",
        "of_another_launch",
        "a_list",
        "without_a_measurement",
        "without_a_cause",
        "a_pipe",
        "an_endless_device",
        "a_folder",
    ],
)
def test_a_result_that_is_none(ended, name):
    end = ended(f"results.{name}", 2)
    assert end.seen == (TrialStatus.CRASHED, Phase.WARMUP)
    assert "result file" in end.result.cause
    assert end.result.exit_code in (0, 1)
    assert end.result.measurement is None
    # The result file is ours, and holds the verdict.
    kept = json.loads(end.files.result.read_text())
    assert (kept["launch"], kept["status"]) == ("launch", "crashed")


def test_a_result_that_our_own_clock_contradicts(ended):
    end = ended("results.in_no_time", 2)
    assert end.seen[0] is TrialStatus.USER_ERROR
    assert end.result.measurement is None and end.result.transient
    assert "s of measuring" in end.result.cause and "own clock it took" in end.result.cause


@pytest.mark.slow
@pytest.mark.parametrize("speed", [0.3, 8])
def test_a_replaced_clock(ended, speed):
    plan = MeasurePlan(target_halfwidth=1e-9, min_windows=2, min_window_s=0.1, max_measure_s=2.0 * max(speed, 0.5))
    end = ended(f"results.clock_at:{speed}", 2, plan=plan)
    assert end.result.status is TrialStatus.USER_ERROR and end.result.measurement is None
    assert "clock" in end.result.cause and "time.monotonic" in end.result.advice


def test_logs_of_any_length(ended):
    end = ended("results.logs_of_no_end", 2)
    assert end.result.status is TrialStatus.COMPLETE, end.result.cause
    text = end.files.stdout.read_text()
    assert len(text) <= 16 * MIB
    assert text.startswith("the first words\n") and text.endswith("the last words\n")
    assert "MiB of this log were cut out here" in text


def test_a_log_that_is_cut_while_it_is_written_stays_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LIMIT_BYTES", 2**16)
    monkeypatch.setattr(watch, "KEPT_BYTES", 2**13)
    logs = watch.Logs(watch.LaunchFiles(tmp_path))
    # What is written in the very moment in which a log is cut is lost: the last line is not.
    command = """
import os
for number in range(400_000):
    os.write(1, b"%d\\n" % number)
while os.fstat(1).st_size > 2**16:
    pass
os.write(1, b"400000\\n")
"""
    with subprocess.Popen([sys.executable, "-c", command], stdout=logs.descriptors[0]) as writing:
        while writing.poll() is None:
            logs.cut()
    logs.close()
    text = (tmp_path / "stdout.log").read_text()
    beginning, note, end = re.split(r"\n(\[.*\])\n", text)
    assert note == "[autotune: 2 MiB of this log were cut out here]"
    # The cut goes through a line on both sides.
    numbers = [*map(int, beginning.split()[:-1]), *map(int, end.split()[1:])]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 400_000


def test_binary_output(ended):
    end = ended("results.binary_output", 2)
    assert end.result.status is TrialStatus.COMPLETE, end.result.cause
    assert end.files.stdout.read_bytes().startswith(bytes(range(256)))


def test_binary_output_before_a_crash(ended):
    end = ended("results.binary_output_and_crash", 2)
    assert end.seen == (TrialStatus.CRASHED, Phase.WARMUP)
    assert end.result.cause == "died by SIGABRT"
    assert "in binary_output_and_crash" in end.result.evidence


def test_much_output_before_an_error(ended):
    end = ended("results.much_output_and_raise", 2)
    assert end.seen == (TrialStatus.USER_ERROR, Phase.WARMUP)
    assert end.result.cause.startswith("ValueError: the labels are wrong")
    assert end.result.cause.isprintable()  # a terminal obeys what is not
    assert end.files.stdout.stat().st_size >= 10 * MIB
    # Evidence is for people and every result is kept in memory, so a line of a megabyte must be shortened.
    assert os.path.getsize(end.files.result) < MIB // 4


def test_an_error_after_the_streams_were_closed(ended):
    end = ended("results.closed_descriptors", 2)
    assert end.seen == (TrialStatus.USER_ERROR, Phase.WARMUP)
    assert end.result.cause.startswith("ValueError: the labels are wrong")


def test_a_success_after_the_streams_were_closed(ended):
    end = ended("results.closed_streams", 2)
    assert end.result.status is TrialStatus.COMPLETE, end.result.cause
    assert (end.result.exit_code, end.result.unclean_exit) == (0, False)
