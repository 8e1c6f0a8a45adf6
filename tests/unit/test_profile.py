"""Profiles as data: YAML 1.1 and 1.2 parsers read them alike, and invalid ones are refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from autotune import profile as profiles
from autotune.base.errors import MachineError, ProfileError
from autotune.base.records import LARGEST, LARGEST_IMAGE, Fingerprint, TrialStatus
from autotune.knobs import KNOBS
from autotune.profile import Profile, ProfileWorkload
from autotune.workload.catalog import find_workload
from tests.support import PROFILE_DATA, make_profile

BASELINE, BEST = PROFILE_DATA["baseline"]["configuration"], PROFILE_DATA["configuration"]
PROFILE = make_profile()
TEXT = profiles.dump(PROFILE)

# Texts that YAML 1.1, YAML 1.2 or a careless writer would read as another type.
EVIL = [
    *("off", "No", "y", "N", "yes", "ON", "true", "null", "~", "", " ", "=", "<<", "-", "?", "...", "---", "012"),
    *("0o7", "0x1F", "0b1", "1e3", "1.5e3", "1_000", "12:30:45", "190:20:30.15", "2026-05-02", "2026-05-02 10:11:12Z"),
    *(".inf", ".NaN", "1.", "+1", "a: b", "a #b", "# c", "&a", "*a", "!!python/object:os.system", "%YAML 1.1", "@"),
    *(
        "`",
        "|",
        ">",
        "[a, b]",
        "{a: b}",
        '"',
        "'",
        "\\",
        "\\n",
        "\n",
        "a\nb: c",
        "x\n\nconfiguration:\n  precision: fp16",
    ),
    *("\r", "\t", "\0", "\x1b[31m", "\x7f", "\x85", "\xa0", "\u2028", "\u2029", "\ufeff", "\ue000", "\ufffe", "🙂"),
    *("k" * 300, "a " * 200),
]
texts = st.sampled_from(EVIL) | st.text(max_size=20)
ints = st.integers(min_value=0, max_value=LARGEST)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-300, max_value=1e300)
intervals = st.tuples(finite, finite).map(sorted)
optional_texts = st.none() | texts
scalars = st.booleans() | st.integers(-LARGEST, LARGEST) | finite | texts


def counted(most: int = LARGEST) -> st.SearchStrategy[int]:
    return st.integers(min_value=1, max_value=most)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    config = {
        name: draw(st.sampled_from(knob.values) if knob.values else counted(knob.maximum))
        for name, knob in KNOBS.items()
        if name == "batch_size" or draw(st.booleans())
    }
    config = {name: value for name, value in config.items() if config.get(KNOBS[name].needs or "", True)}
    own = st.dictionaries(texts.filter(bool), scalars, max_size=3)
    return {**config, **{f"workload.{name}": value for name, value in draw(own).items()}}


measured = {"configuration": configurations(), "samples_per_second": positive, "ci95": intervals}
compared = {**measured, "speedup": positive, "speedup_ci95": intervals}
random_profiles = st.fixed_dictionaries(
    {
        "workload": st.fixed_dictionaries(
            {
                "name": texts,
                "path": optional_texts,
                "module": optional_texts,
                "sha256": texts,
                "args": st.dictionaries(texts, texts, max_size=4),
            }
        ),
        "configuration": configurations(),
        "gives": st.fixed_dictionaries(
            {
                "samples_per_second": positive,
                "ci95": intervals,
                "speedup": positive,
                "speedup_ci95": intervals,
                "peak_memory_bytes": st.none() | ints,
                "peak_memory_is": st.sampled_from(["device", "host"]),
                "compile_seconds": positive,
                "startup_seconds": positive,
                "loader_wait_fraction": st.floats(min_value=0, max_value=1),
                "epoch_turn_seconds": st.none() | positive,
                "launches": counted(),
                "same_batch": st.booleans(),
                "sustained_samples_per_second": st.none() | positive,
            }
        ),
        "baseline": st.fixed_dictionaries(measured),
        "best_same_batch": st.none() | st.fixed_dictionaries(compared),
        "conditions": st.fixed_dictionaries(
            {
                "device": texts,
                "device_name": texts,
                "image_size": st.none() | counted(LARGEST_IMAGE),
                "data": st.sampled_from(["generated", "synthetic", "folder", "none"]),
                "page_cache": st.sampled_from(["warm", "cold", "unknown", None]),
                "epoch_samples": st.none() | counted(),
                "worker_start_method": st.sampled_from(["fork", "forkserver", "spawn"]),
                "seed": ints,
            }
        ),
        "fingerprint": st.fixed_dictionaries(
            {
                "values": st.dictionaries(texts, st.none() | scalars, max_size=5),
                "device_uuid": optional_texts,
            }
        ),
        "versions": st.fixed_dictionaries({"autotune": texts, "cuda": optional_texts, "driver": optional_texts}),
        "provenance": st.fixed_dictionaries(
            {
                "study": texts,
                "trial": ints,
                "objective": texts,
                "score": st.none() | finite,
                "trials": st.dictionaries(st.sampled_from([s.value for s in TrialStatus]), ints),
                "measured_seconds": positive,
                "elapsed_seconds": positive,
                "created": st.datetimes().map(lambda moment: moment.isoformat()),
            }
        ),
    }
).map(Profile.model_validate)


def typed(value: Any) -> Any:
    """The value with its types, to distinguish 1, 1.0 and True."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value


@pytest.mark.slow
@settings(max_examples=40)
@given(random_profiles)
def test_yaml_1_1_and_1_2_parsers_read_the_same_values(profile: Profile) -> None:
    text = profiles.dump(profile)
    data = typed(profile.model_dump(mode="json"))
    assert typed(pyyaml.safe_load(text)) == data
    assert typed(YAML(typ="safe", pure=True).load(text)) == data
    assert profiles.parse(text, "it") == profile


@pytest.mark.parametrize("evil", EVIL)
def test_a_hostile_text_survives_as_name_key_and_argument_and_stays_within_its_comment(evil: str) -> None:
    data = json.loads(json.dumps(PROFILE_DATA))
    data["workload"].update(name=evil, args={evil: evil})
    data["configuration"] = {**BEST, f"workload.{evil or 'x'}": evil}
    data["conditions"]["device_name"] = evil
    data["fingerprint"]["values"] = {evil: evil}
    profile = Profile.model_validate(data)
    text = profiles.dump(profile)
    assert pyyaml.safe_load(text) == YAML(typ="safe", pure=True).load(text) == profile.model_dump(mode="json")
    assert profiles.parse(text, "it") == profile
    header = text.partition("schema_version: 1\n")[0]
    assert all(line.startswith("#") for line in re.split("[\n\r\x85\u2028\u2029]", header.strip()))


@pytest.mark.parametrize("number", [1e-05, 1e22, 1.5e-07, 1e16, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2])
def test_a_workload_knob_keeps_every_digit(number: float) -> None:
    profile = PROFILE.model_copy(update={"configuration": {**BEST, "workload.lr": number}})
    text = profiles.dump(profile)
    for read in (pyyaml.safe_load(text), YAML(typ="safe", pure=True).load(text)):
        assert repr(read["configuration"]["workload.lr"]) == repr(number)


def test_a_profile_of_an_older_version_says_nothing_of_the_page_cache() -> None:
    older = re.sub(r"  page_cache: .*\n", "", TEXT)
    assert older != TEXT and profiles.parse(older, "it").conditions.page_cache is None


def test_figures_have_six_digits_in_the_object_and_in_the_file() -> None:
    assert PROFILE.gives.samples_per_second == 62.3125
    assert "samples_per_second: 62.3125 " in TEXT


def test_the_text_explains_the_profile_and_its_changes() -> None:
    header = TEXT.partition("schema_version")[0]
    for said in ("resnet50 on Some CPU", "62.31 samples/s", "61.8 to 62.9", "2.08 times", "from 3 launches"):
        assert said in header
    assert "autotune.load_profile(" in header
    assert re.search(r'precision: "bf16" +# baseline: fp32\n', TEXT)
    assert re.search(r'compile_mode: "off" +# same\n', TEXT)
    assert re.search(r"prefetch_factor: 4 +# baseline: not set\n", TEXT)
    assert re.search(r"peak_memory_bytes: 3891232768 +# 3.62 GiB\n", TEXT)
    assert "64, where the baseline has 32" in header


@pytest.mark.parametrize(("per_s", "said"), [(55.0, True), (61.9, False), (None, False)])
def test_a_lower_rate_in_a_longer_run_is_said_at_the_top(per_s: float | None, said: bool) -> None:
    gives = PROFILE.gives.model_copy(update={"sustained_samples_per_second": per_s})
    text = profiles.dump(PROFILE.model_copy(update={"gives": gives}))
    assert ("sustained 55 samples/s in a longer run" in text.partition("schema_version")[0]) == said
    assert profiles.parse(text, "it").gives == gives


def test_the_command_in_the_header_can_be_parsed_by_a_shell() -> None:
    workload = PROFILE.workload.model_copy(update={"path": "/my models/net.py", "args": {"depth": "a b; rm"}})
    text = profiles.dump(PROFILE.model_copy(update={"workload": workload}))
    (line,) = re.findall(r"^#   (autotune train .*)$", text, re.MULTILINE)
    assert shlex.split(line)[4:] == ["--model", "/my models/net.py", "--arg", "depth=a b; rm"]


def test_a_knob_set_only_in_the_baseline_is_named() -> None:
    text = profiles.dump(PROFILE.model_copy(update={"configuration": BASELINE, "baseline": PROFILE.best_same_batch}))
    assert "# Set in the baseline only: memory_format (channels_last), prefetch_factor (4)" in text


def test_write_then_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    profiles.write(PROFILE, path)
    assert profiles.read(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["profile.yaml"]
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert profiles.read(path) == PROFILE
    with pytest.raises(MachineError):
        profiles.write(PROFILE, tmp_path / "absent" / "profile.yaml")


def test_a_truncated_file_is_refused() -> None:
    assert profiles.parse(TEXT[:-1], "it") == PROFILE  # only the final newline is missing
    for end in {*range(0, len(TEXT) - 1, 67), *range(len(TEXT) - 40, len(TEXT) - 1)}:
        with pytest.raises(ProfileError):
            profiles.parse(TEXT[:end], "it")


def test_an_illegal_configuration_is_refused() -> None:
    with pytest.raises(ValidationError, match="means nothing"):
        make_profile(configuration={**BASELINE, "prefetch_factor": 2})


def test_check_and_its_warnings() -> None:
    assert profiles.check(PROFILE, PROFILE.fingerprint.model_copy(update={"device_uuid": "another"})) == []
    here = Fingerprint(values={"cores": 4, "torch": "2.11.0", "power_limit_w": None, "moon": "full"})
    rows = profiles.check(PROFILE, here)
    assert rows == [("cores", "2", "4"), ("moon", "absent", "full"), ("torch", "2.15.0", "2.11.0")]
    software, host, other = profiles.warnings_for(rows)
    assert "torch 2.15.0, here 2.11.0" in software
    assert "cores 2, here 4" in host
    assert "moon absent, here full" in other
    assert profiles.warnings_for([]) == []


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("workload_sha256", "training differs"),
        ("device_memory_bytes", "device differs"),
        ("device_name", "device differs"),
        ("dataset_identity", "data differs"),
        ("cuda", "software differs"),
        ("memory_bytes", "host differs"),
        ("worker_start_method", "host differs"),
    ],
)
def test_each_kind_of_difference_has_its_own_warning(name: str, means: str) -> None:
    (warning,) = profiles.warnings_for([(name, "a", "b\x1b")])
    assert means in warning
    assert f"{name} a, here b\\x1b" in warning


def test_learning_rates_are_written_if_they_are_known() -> None:
    assert "learning_rate" not in TEXT
    text = profiles.dump(make_profile(gives={"learning_rate": 0.1}, baseline={"learning_rate": 0.1}))
    assert "The learning rate of 0.1 usually follows: 0.2 in proportion (SGD) or 0.141" in text
    found = profiles.parse(text, "text")
    assert found.gives.learning_rate == found.baseline.learning_rate == 0.1


def test_importing_profiles_does_not_import_torch() -> None:
    code = "import autotune.profile, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_change_by_hand_is_noticed() -> None:
    sealed = PROFILE.sealed()
    text = profiles.dump(sealed)
    assert profiles.parse(text, "p.yaml") == sealed and not sealed.altered and not PROFILE.altered
    assert profiles.check(sealed, sealed.fingerprint) == []
    for there, instead in (
        ("batch_size: 64", "batch_size: 32"),
        ("62.3125", "99.9"),
        ('study: "resnet50-3"', 'study: "resnet50-4"'),
    ):
        assert there in text
        changed = profiles.parse(text.replace(there, instead, 1), "p.yaml")
        assert changed.altered, there
    (sentence,) = profiles.warnings_for(profiles.check(changed, changed.fingerprint))
    assert sentence.startswith("the profile has been changed since it was written") and "export it again" in sentence
    # Comments and layout are not content, and a profile that says nothing was written by an older version.
    assert not profiles.parse(text.replace("# What it gives", "# Mine"), "p.yaml").altered
    assert "sha256" not in profiles.dump(PROFILE).rpartition("provenance:")[2]


def test_another_training_is_not_the_profiles() -> None:
    of_catalog, other = find_workload("convnext_tiny", {}), find_workload("resnet18", {})
    assert of_catalog.sha256 == other.sha256, "many models have one file"
    own = ProfileWorkload(name="convnext_tiny", sha256=of_catalog.sha256)
    profile = PROFILE.model_copy(update={"workload": own})
    assert profiles.unlike(profile, of_catalog, "convnext_tiny", {}) == []
    assert profiles.unlike(profile, other, "resnet18", {}) == [("workload", "convnext_tiny", "resnet18")]
    more = {"classes": "10"}
    assert profiles.unlike(profile, of_catalog, "convnext_tiny", more) == [("workload arguments", "none", "classes=10")]
    changed = profile.model_copy(update={"workload": own.model_copy(update={"sha256": "0" * 64})})
    assert profiles.unlike(changed, of_catalog, "convnext_tiny", {}) == [
        (profiles.CODE, "0" * 12, of_catalog.sha256[:12])
    ]
    # A module has no hash before it is imported.
    module = find_workload("nets.small:NET", {})
    of_module = ProfileWorkload(name="NET", module="nets.small:NET", sha256="1" * 64)
    profile = PROFILE.model_copy(update={"workload": of_module})
    assert profiles.unlike(profile, module, "nets.small:NET", {}) == []
    assert profiles.unlike(profile, module, "others.small:NET", {}) != []
    (sentence,) = profiles.warnings_for(profiles.unlike(profile, other, "resnet18", more))
    assert sentence.startswith("the training differs") and "classes=10" in sentence
