"""Invalid profiles: each is refused in one clear sentence, and nothing in the file is executed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import profile as profiles
from autotune.base.errors import ProfileError

# Schema 1, written by hand: files of this version stay readable, whatever `dump` writes in future.
TEXT = """\
schema_version: 1
workload:
  name: "resnet50"
  path: null
  module: null
  args: {}
  sha256: "9f9f"
configuration:
  precision: "bf16"
  compile_mode: "off"
  batch_size: 64
  num_workers: 2
  prefetch_factor: 4
  persistent_workers: true
gives:
  samples_per_second: 62.3125
  ci95: [61.8, 62.9]
  speedup: 2.0771
  speedup_ci95: [2.01, 2.14]
  peak_memory_bytes: 3891232768
  peak_memory_is: "host"
  compile_seconds: 1.84
  startup_seconds: 3.21
  loader_wait_fraction: 0.0312
  epoch_turn_seconds: null
  launches: 3
  same_batch: false
baseline:
  configuration:
    batch_size: 32
  samples_per_second: 30
  ci95: [29.5, 30.6]
best_same_batch: null
conditions:
  device: "cpu"
  device_name: "Some CPU"
  image_size: 96
  data: "generated"
  epoch_samples: 1281167
  worker_start_method: "fork"
  seed: 0
fingerprint:
  values:
    cores: 2
    torch: "2.15.0"
  device_uuid: null
versions:
  autotune: "0.1.0"
provenance:
  study: "resnet50-3"
  trial: 17
  objective: "throughput"
  score: 62.3
  trials:
    complete: 18
    oom: 2
  measured_seconds: 143.2
  elapsed_seconds: 598.4
  created: "2026-05-02T10:11:12+00:00"
"""
FRAGMENTS = [
    "off",
    "1e3",
    "12:30:45",
    "2026-05-02",
    "\n",
    "\0",
    "\u2028",
    ": ",
    " #",
    "&a ",
    "*a",
    "!!x ",
    "---\n",
    "[",
    "{",
    '"',
]


def edited(old: str, new: str) -> str:
    assert TEXT.count(old) >= 1, old
    return TEXT.replace(old, new, 1)


def test_the_undamaged_text_is_a_profile() -> None:
    assert profiles.parse(TEXT, "it").gives.launches == 3


@settings(max_examples=80)
@given(st.integers(0, len(TEXT)), st.integers(0, 30), st.sampled_from(FRAGMENTS) | st.text(max_size=20))
def test_damage_gives_a_profile_or_a_profile_error(start: int, length: int, inserted: str) -> None:
    refused = None
    try:
        profile = profiles.parse(TEXT[:start] + inserted + TEXT[start + length :], "it")
    except ProfileError as error:
        refused = error
    if refused is None:
        assert profiles.parse(profiles.dump(profile), "it") == profile
    else:
        assert str(refused).startswith("it")
        assert "\n" not in str(refused)
        assert refused.advice


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: \xff", r"is not UTF-8 text \(line 1\)"),
        (TEXT.encode("utf-16"), "is not UTF-8"),
        (b"#" * (profiles.MAX_BYTES + 1), "larger than 1 MiB"),
        (b"", "holds no keys"),
    ],
)
def test_bytes_that_are_not_a_profile(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=said) as caught:
        profiles.read(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="there is no profile") as caught:
        profiles.read(tmp_path / "absent.yaml")
    assert "autotune search" in str(caught.value.advice)
    with pytest.raises(ProfileError, match="is a folder") as caught:
        profiles.read(tmp_path)
    assert caught.value.advice == "name a profile's file."


def test_what_may_be_meant_by_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, study in enumerate(("old-1", "new-1")):
        profile = tmp_path / "studies" / study / "profile.yaml"
        profile.parent.mkdir(parents=True)
        profile.write_text(TEXT)
        os.utime(profile, (number, number))
    for named, meant in (
        ("profile.yaml", "did you mean studies/new-1/profile.yaml?"),
        ("old-1", "did you mean studies/old-1/profile.yaml?"),
        ("studies/old-1", "its profile is studies/old-1/profile.yaml."),
    ):
        with pytest.raises(ProfileError) as caught:
            profiles.read(Path(named))
        assert caught.value.advice == meant
        # What a traceback shows.
        assert caught.value.__notes__ == [f"{meant[0].upper()}{meant[1:]}"]


CREATED = '"2026-05-02T10:11:12+00:00"\n'
#: Integers that are quick to read and slow to compute with; Python refuses to format the last one.
HUGE = ("9" * 19, "9" * 400, f"0x{'f' * 20_000}")
HOLDS_A_NUMBER = ("num_workers: 2", "speedup: 2.0771", "cores: 2", "seed: 0", "oom: 2", "schema_version: 1")
REFUSED = [
    ("just text", "holds no keys", "export"),
    ("a: [1\nb: 2\n", r"is not YAML \(line 2\)", "correct"),
    ("a: 1\nb: \x07\n", r"is not YAML \(line 2\)", "correct"),
    ("a: 1\nb: 2\na: 3\n", "line 3 repeats a key of its section: 'a: 3'", "keep one"),
    ("a: 2026-13-45\n", "a value that YAML cannot read", "quotes"),
    (f"a: {'9' * 5000}\n", "a value that YAML cannot read", "quotes"),
    ("a: &x 1\n", "an anchor or alias", "plain data"),
    ("a: *x\n", "an anchor or alias", "plain data"),
    ("a: !!python/object/apply:os.mkdir [pwned]\n", r"line 1 has a tag", "plain data"),
    ("a: !!binary aGk=\n", "has a tag", "plain data"),
    ("[" * 10_000, "more than 20 deep", "plain data"),
    (f"a: [{'1, ' * 10_000}]", "more than 10000 values", "plain data"),
    (f"{TEXT}---\na: 1\n", r"a second document \(---\)", "plain data"),
    ("x" * (profiles.MAX_BYTES + 1), "larger than 1 MiB", "profile"),
    (f"1: 2\n{TEXT}", "the key 1 must be text", "quotes"),
    ("a: 1\n", "it has no schema_version", "export"),
    (edited("schema_version: 1", "schema_version: true"), "its schema_version is true", "export"),
    (edited("schema_version: 1", "schema_version: 0"), "its schema_version is 0", "export"),
    (edited("schema_version: 1", "schema_version: 2"), "a newer autotune, '0.1.0' .schema 2, this", "upgrade autotune"),
    ("schema_version: 2\n", "made by a newer autotune .schema 2", "upgrade autotune"),
    (edited("launches:", "lauches:"), "unknown key gives.lauches", "did you mean launches"),
    (edited("workload:", "workloads:"), "unknown key workloads", "did you mean workload"),
    (edited("  trials:", "  trails:"), "provenance.trails", "trials"),
    (edited("  speedup:", "  zzz:"), "gives.zzz", "known: ci95"),
    (re.sub("  launches: .*\n", "", TEXT), "gives.launches is missing", "cut short"),
    (re.sub("  created: .*\n", "", TEXT), "provenance.created is missing", "cut short"),
    (re.sub("  batch_size: 64.*\n", "", TEXT), "configuration.batch_size is missing", "export"),
    (edited("launches: 3", "launches: 3.5"), "gives.launches must be a whole number, not 3.5", "correct"),
    (edited("launches: 3", "launches: 0"), "gives.launches must be greater than or equal to 1, not 0", "correct"),
    (edited("launches: 3", "launches: true"), "gives.launches must be a whole number, not true", "correct"),
    (edited("compile_seconds: 1.84", "compile_seconds: -1"), "gives.compile_seconds must be", "correct"),
    (edited("speedup: 2.0771", "speedup: '2'"), "gives.speedup must be a number, not '2'", "correct"),
    (edited("speedup: 2.0771", "speedup: .nan"), "gives.speedup must be a finite number", "correct"),
    (edited("[61.8, 62.9]", "[62.9, 61.8]"), r"gives.ci95 must be two numbers, \[low, high\], not", "correct"),
    (edited("[61.8, 62.9]", "[61.8]"), "gives.ci95 must be two numbers", "correct"),
    (edited("same_batch: false", "same_batch: no"), "gives.same_batch must be true or false, not 'no'", "correct"),
    (edited('"host"', '"disk"'), "gives.peak_memory_is must be 'device' or 'host'", "correct"),
    (edited("0.0312", "1.5"), "gives.loader_wait_fraction must be less than or equal to 1", "correct"),
    (edited("args: {}", "args: {1: a}"), "the key workload.args.1 must be text", "quotes"),
    (edited("args: {}", "args: []"), r"workload.args must be a mapping of names to values, not \[\]", "correct"),
    (edited("cores: 2", "cores: [2]"), r"fingerprint.values.cores must be text, a finite number, true", "correct"),
    (edited("cores: 2", "cores: .inf"), "fingerprint.values.cores must be text, a finite number", "correct"),
    (edited("oom: 2", "ooom: 2"), "provenance.trials has an unknown status 'ooom'", "oom"),
    (edited(CREATED, '"yesterday"\n'), "provenance.created must be a time in ISO 8601", "correct"),
    (edited(CREATED, "2026-05-02\n"), "provenance.created must be text", "correct"),
    (edited("batch_size: 64", "batch_size: 0"), "configuration.batch_size must be a whole number from 1 to", "correct"),
    (edited("batch_size: 64", "batch_size: '64'"), "configuration.batch_size must be .*, not '64'", "correct"),
    (edited("batch_size: 64", "batch_size: true"), "configuration.batch_size must be .*, not true", "correct"),
    (edited("    batch_size: 32", "    batch_size: x"), "baseline.configuration.batch_size must be a whole", "correct"),
    (edited("  batch_size: 64", "  batch_sise: 64"), "configuration has an unknown knob 'batch_sise'", "batch_size"),
    (edited('"bf16"', '"bf17"'), "configuration.precision must be one of fp32, tf32, bf16, fp16, not 'bf17'", "cor"),
    (edited('"off"', "false"), "configuration.compile_mode must be one of off, default.*, not false", "correct"),
    (edited("persistent_workers: true", "persistent_workers: 1"), "persistent_workers must be one of false, true", ""),
    (edited("num_workers: 2", "num_workers: 0"), "configuration.prefetch_factor means nothing with num_w", "remove"),
    (edited('  precision: "bf16"', "  workload.lr: null"), "configuration.workload.lr must be text, a finite", "cor"),
    (edited('  precision: "bf16"', "  workload.lr: .inf"), "configuration.workload.lr must be text, a finite", "cor"),
    (
        edited("num_workers: 2", "num_workers: 5000"),
        "configuration.num_workers must be a whole number from 0 to",
        "cor",
    ),
    (
        edited("batch_size: 64", "batch_size: 2000000000"),
        "configuration.batch_size must be .*, not 2000000000",
        "correct",
    ),
    (edited("prefetch_factor: 4", "prefetch_factor: 1000"), "configuration.prefetch_factor must be a whole number", ""),
    (
        edited("image_size: 96", "image_size: 100000"),
        "conditions.image_size must be less than or equal to 16384",
        "cor",
    ),
    (edited("seed: 0", "seed: -1"), "conditions.seed must be greater than or equal to 0, not -1", "correct"),
    (
        edited('data: "generated"', 'data: "/etc"'),
        "conditions.data must be 'generated', 'synthetic', .*'/etc'",
        "correct",
    ),
    (
        edited('method: "fork"', 'method: "borg"'),
        "conditions.worker_start_method must be 'fork', .*, not 'borg'",
        "correct",
    ),
    *(
        (edited(one, f"{one.partition(':')[0]}: {huge}"), "is too large a number", "correct")
        for one in HOLDS_A_NUMBER
        for huge in HUGE
    ),
    (edited("[61.8, 62.9]", f"[1, {'9' * 400}]"), "gives.ci95 is too large a number", "correct"),
    (edited('  precision: "bf16"', f"  workload.lr: {HUGE[0]}"), "workload.lr is too large a number", "correct"),
    (edited('  precision: "bf16"', "  workload.: 1"), "configuration has an unknown knob 'workload.'", ""),
]


@pytest.mark.parametrize(("text", "said", "advice"), REFUSED)
def test_an_invalid_profile_is_refused_in_one_clear_sentence(
    text: str, said: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError, match=said) as caught:
        profiles.parse(text, "it")
    assert str(caught.value).startswith("it")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert advice in str(caught.value.advice)
    assert list(tmp_path.iterdir()) == []  # nothing was executed
