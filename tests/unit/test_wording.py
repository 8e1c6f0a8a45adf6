"""Figures and configurations in words."""

from __future__ import annotations

import pytest

from autotune.records import Value
from autotune.wording import describe, memory_text, one_line, rate_text, ratio_text, seconds_text, settings

GIB = 2**30
BASE: dict[str, Value] = {
    "precision": "fp32",
    "compile_mode": "off",
    "batch_size": 32,
    "memory_format": "contiguous",
    "num_workers": 0,
    "optimizer_impl": "for-loop",
    "intra_op_threads": 2,
}
FAST: dict[str, Value] = {"precision": "bf16", "memory_format": "channels_last"}
LOADER: dict[str, Value] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}


@pytest.mark.parametrize(
    ("rate", "interval", "expected"),
    [
        (61.84, (60.6, 63.0), "61.8 ± 1.2"),
        (1234.4, (1226.0, 1242.0), "1,234 ± 8"),
        (5012.34, (5012.14, 5012.54), "5,012.3 ± 0.2"),
        (0.4561, (0.45, 0.462), "0.456 ± 0.006"),
        (14.23, None, "14.2"),
    ],
)
def test_a_rate_has_the_digits_its_interval_needs(
    rate: float, interval: tuple[float, float] | None, expected: str
) -> None:
    assert rate_text(rate, interval) == expected


def test_units_for_people() -> None:
    assert [memory_text(n) for n in (None, 0, 852 * 2**20, int(1.24 * GIB), 3 * 2**40)] == [
        "-", "0 B", "852 MiB", "1.24 GiB", "3.00 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (8.44, 41, 59.7, 200, 600, 3599.8, 3720, 86_399, 183_600)] == [
        "8.4 s", "41 s", "1 min", "3 min 20 s", "10 min", "1 h 00 min", "1 h 02 min", "1 d 0 h", "2 d 3 h",
    ]  # fmt: skip
    assert [ratio_text(r) for r in (2.058, 0.973, 15.67)] == ["2.06×", "0.97×", "15.7×"]


def test_a_configuration_is_what_differs_from_the_baseline() -> None:
    assert describe({**BASE, **FAST, **LOADER, "batch_size": 64}, BASE) == (
        "bf16 + channels_last + 2 workers + prefetch 4 + persistent workers + batch 64"
    )
    assert describe({**BASE, "num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}, BASE) == "1 worker"
    assert describe(BASE, {**BASE, "compile_mode": "default", **LOADER}) == "no compile + 0 workers"
    assert describe(BASE, BASE) == "as the baseline"
    assert settings(BASE) == "fp32, batch 32, 0 workers, for-loop optimizer, 2 threads"


def test_a_childs_words_do_not_drive_the_terminal() -> None:
    assert one_line("a\x1b[2J b\r\n\tc") == "a [2J b c"
