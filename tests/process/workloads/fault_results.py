"""Results and beats written by user code in place of ours, and output unfit for a terminal."""

import contextlib
import json
import os
import sys
import time

from autotune.base.records import TrialResult, TrialStatus
from tests.support import make_measurement

_MIB = 2**20


def _write(ctx, data, exit_code=0):
    with open(os.path.join(ctx.arg("folder"), "result.json"), "wb") as stream:
        stream.write(data)
    os._exit(exit_code)


def _result(ctx, **changes):
    launch = os.path.basename(ctx.arg("folder"))
    made = {"launch": launch, "status": TrialStatus.COMPLETE, "measurement": make_measurement()}
    return TrialResult(**{**made, **changes}).model_dump_json().encode()


def _with_rate(ctx, rate):
    made = json.loads(_result(ctx))
    made["measurement"]["samples_per_s"] = "the rate"
    return json.dumps(made).replace('"the rate"', rate).encode()


def truncated(ctx):
    whole = _result(ctx)
    _write(ctx, whole[: len(whole) // 2])


def empty(ctx):
    _write(ctx, b"")


def nan(ctx):
    _write(ctx, _with_rate(ctx, "NaN"))


def infinite(ctx):
    _write(ctx, _with_rate(ctx, "Infinity"))


def too_large_a_number(ctx):
    """Valid JSON that no float can hold: parsers read it as infinity."""
    _write(ctx, _with_rate(ctx, "1e999"))


def of_100_mb(ctx):
    """A complete and valid result before a hundred megabytes of blanks."""
    _write(ctx, _result(ctx) + b" " * (100 * _MIB))


def bytes_of_no_encoding(ctx):
    _write(ctx, b"\x00\xff\xfe" * 1000)


def of_another_launch(ctx):
    _write(ctx, _result(ctx, launch="another"))


def a_list(ctx):
    _write(ctx, b"[1, 2, 3]")


def without_a_measurement(ctx):
    _write(ctx, _result(ctx, measurement=None))


def without_a_cause(ctx):
    _write(ctx, _result(ctx, status=TrialStatus.OOM, measurement=None), exit_code=1)


def noise_among_the_beats(ctx):
    """Written to every writable pipe, because user code cannot know which one carries the beats."""
    written = 0
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
                written += os.write(descriptor, b'{"phase": "load"}x\n\xff\xfe{}\n' + b"y" * 10000 + b"\n")
    assert written, "no pipe was found"


def binary_output(ctx):
    """Arbitrary bytes, including terminal codes and half a character, without a newline."""
    for stream in (sys.stdout.buffer, sys.stderr.buffer):
        stream.write(bytes(range(256)) * 8 + "é".encode()[:1])
        stream.flush()


def binary_output_and_crash(ctx):
    binary_output(ctx)
    os.abort()


def much_output_and_raise(ctx):
    """10 MiB in one line on each stream, then an error with a message of the same length."""
    for number in (1, 2):
        left = 10 * _MIB
        while left:
            left -= os.write(number, b"\xf0\x9f" * min(left // 2, 2**15))
    raise ValueError("the labels are wrong: " + "\x00\x1b[31m" * _MIB)


def closed_descriptors(ctx):
    """Close descriptors, as user code may do to silence a library."""
    for number in (1, 2):
        os.close(number)
    raise ValueError("the labels are wrong")


def closed_streams(ctx):
    """The same from Python; nothing fails after it."""
    sys.stdout.close()
    sys.stderr.close()


def in_no_time(ctx):
    """A valid result whose seconds of measuring have not passed."""
    _write(ctx, _result(ctx))


def a_pipe(ctx):
    """Reading it would wait for a writer for ever."""
    os.mkfifo(os.path.join(ctx.arg("folder"), "result.json"))
    os._exit(0)


def an_endless_device(ctx):
    os.symlink("/dev/zero", os.path.join(ctx.arg("folder"), "result.json"))
    os._exit(0)


def a_folder(ctx):
    os.makedirs(os.path.join(ctx.arg("folder"), "result.json", "below"))
    os._exit(0)


def logs_of_no_end(ctx):
    """Write far more than a log keeps, 4 KiB at a time, as a loop with a print would."""
    os.write(1, b"the first words\n")
    line = b"x" * 4095 + b"\n"
    for _ in range(64 * _MIB // len(line)):
        os.write(1, line)
    # What is written in the very moment in which a log is cut may be lost.
    while os.fstat(1).st_size > 16 * _MIB:
        time.sleep(0.01)
    os.write(1, b"the last words\n")


def clock_at(ctx, speed):
    """A library that replaces the clock, as those that freeze time do."""
    real, began = time.monotonic, time.monotonic()
    time.monotonic = lambda: began + float(speed) * (real() - began)
