"""Formatting of figures and configurations."""

from __future__ import annotations

import pytest

from autotune.base.records import TrialStatus, Value
from autotune.space.formatting import (
    count,
    describe,
    interval_text,
    listed,
    memory_text,
    one_line,
    percent_text,
    percents,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    trial_rate_text,
)
from tests.support import PLAIN, make_trial

GIB = 2**30
BASE: dict[str, Value] = {**PLAIN, "optimizer_impl": "for-loop", "intra_op_threads": 2}
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
        # The interval is not symmetric.
        (128.0, (13.74, 1183.0), "128 (± not known)"),
        (152.4, (95.83, 242.26), "152 (95.8 to 242)"),
        (1.56, (0.0, 3.12), "1.56 (± not known)"),
    ],
)
def test_a_rates_digits_depend_on_its_interval(
    rate: float, interval: tuple[float, float] | None, expected: str
) -> None:
    assert rate_text(rate, interval) == expected


def test_units_are_readable() -> None:
    assert [memory_text(n) for n in (None, 0, 852 * 2**20, int(1.24 * GIB), 3 * 2**40)] == [
        "-", "0 B", "852 MiB", "1.24 GiB", "3.00 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (8.44, 41, 59.7, 200, 600, 3599.8, 3720, 86_399, 183_600)] == [
        "8.4 s", "41 s", "1 min", "3 min 20 s", "10 min", "1 h 00 min", "1 h 02 min", "1 d 0 h", "2 d 3 h",
    ]  # fmt: skip
    assert [ratio_text(r) for r in (2.058, 0.973, 15.67)] == ["2.06×", "0.97×", "15.7×"]
    assert [percent_text(p) for p in (0, 0.0004, 0.004, 0.0312, 0.5249, 1)] == [
        "0 %", "0 %", "0.4 %", "3 %", "52 %", "100 %",
    ]  # fmt: skip
    assert [count(1, "trial"), count(1200, "trial"), count(2, "launch", "launches")] == [
        "1 trial", "1,200 trials", "2 launches",
    ]  # fmt: skip
    assert [listed(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_a_ratios_digits_depend_on_its_interval() -> None:
    assert (ratio_text(2.058, (2.03, 2.09)), interval_text((2.03, 2.09))) == ("2.06×", "2.03 to 2.09")
    assert (ratio_text(1.0042, (1.002, 1.0064)), interval_text((1.002, 1.0064))) == ("1.004×", "1.002 to 1.006")
    assert ratio_text(1.0, (1.0, 1.0)) == "1.00×"


def test_a_rate_that_was_only_seen_is_marked() -> None:
    config: dict[str, Value] = {"batch_size": 32}
    assert trial_rate_text(make_trial(1, config, 14.0)).startswith("14.0 ± ")
    assert trial_rate_text(make_trial(1, config, 14.0, status=TrialStatus.PRUNED)) == "~14.0"
    assert trial_rate_text(make_trial(1, config, status=TrialStatus.OOM, measurement=None)) == "-"


def test_a_configuration_is_described_by_its_differences_from_the_baseline() -> None:
    assert describe({**BASE, **FAST, **LOADER, "batch_size": 64}, BASE) == (
        "bf16 + channels_last + 2 workers + prefetch 4 + persistent workers + batch 64"
    )
    assert describe({**BASE, "num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}, BASE) == "1 worker"
    assert describe(BASE, {**BASE, "compile_mode": "default", **LOADER}) == "no compile + 0 workers"
    assert describe(BASE, BASE) == "as the baseline"
    assert settings(BASE) == "fp32, batch 32, 0 workers, for-loop optimizer, 2 threads"


def test_output_of_a_child_cannot_control_the_terminal() -> None:
    assert one_line("a\x1b[2J b\r\n\tc") == "a [2J b c"


@pytest.mark.parametrize("parts", [[1, 1, 1], [0.0, 3.0], [52.4, 14.4, 12.4, 12.4, 8.4], [0.2] * 7, [1e-9, 1.0, 1e-9]])
def test_shares_add_up_to_a_hundred(parts: list[float]) -> None:
    found = percents(parts)
    assert sum(found) == 100
    assert all(abs(share - 100 * part / sum(parts)) < 1 for share, part in zip(found, parts, strict=True))
