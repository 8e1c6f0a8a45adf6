"""``--map``: flags of a script's own set its knobs, in trials as in ``autotune run``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import profile as profiles
from autotune.base.errors import AutotuneError, UsageError
from autotune.base.records import CommandRef, HeatPlan, LaunchKind, MeasurePlan, StudySpec, TrialStatus, Value
from autotune.launcher import script_entry
from autotune.study.request import command_of

from .conftest import PLAIN, SCRIPTS, Runner, written

SCRIPT = (sys.executable, str(SCRIPTS / "flags.py"))
FLAGS = {
    "precision:bf16": "--amp bfloat16",
    "precision:fp16": "--amp 'float16'",
    "num_workers": "--workers {num_workers}",
}
MAPS = tuple(word for name, words in FLAGS.items() for word in ("--map", f"{name}={words}"))


def ref(*words: str, own: dict[str, Value] | None = None, **flags: str) -> CommandRef:
    return CommandRef(words=words, folder="/", flags={**FLAGS, **flags}, own=own or {})


def test_words_come_last_or_in_their_place() -> None:
    config: dict[str, Value] = {"precision": "bf16", "num_workers": 3, "batch_size": 8}
    more = ["--amp", "bfloat16", "--workers", "3"]
    assert script_entry.words_of(ref("train", "-v"), config) == ["train", "-v", *more]
    assert script_entry.words_of(ref("train", "{flags}", "-b", "{batch_size}"), config) == ["train", *more, "-b", "8"]
    assert script_entry.words_of(ref("train", "{flags}"), {}) == ["train"]
    plain = CommandRef(words=("train", "{flags}"), folder="/")
    assert script_entry.words_of(plain, config) == ["train"], "a place for words of which there are none"


def test_what_a_script_does_by_itself_needs_no_words() -> None:
    command = ref("train", own={"num_workers": 1, "precision": "bf16"})
    assert script_entry.words_of(command, {"num_workers": 1, "precision": "fp32"}) == ["train"]
    # It is named, so it is said.
    assert script_entry.words_of(command, {"num_workers": 1, "precision": "bf16"}) == ["train", "--amp", "bfloat16"]
    # What has no effect is not in a configuration.
    deeper = ref("train", prefetch_factor="--ahead {prefetch_factor}", own={"num_workers": 0})
    assert script_entry.words_of(deeper, {"num_workers": 0, "prefetch_factor": 4}) == ["train"]


def test_what_the_command_sets_is_set_nowhere_else() -> None:
    in_command = script_entry.set_by(ref("train", "{batch_size}"))
    assert in_command == {"batch_size", "num_workers", "precision"}
    assert script_entry.door_arguments({"precision": "bf16", "num_workers": 3}, in_command=in_command) == {}
    told = {"alloc_conf": "expandable_segments"}
    assert "PYTORCH_ALLOC_CONF" in script_entry.agent_environment({}, {}, told)
    assert "PYTORCH_ALLOC_CONF" not in script_entry.agent_environment({}, {}, told, in_command={"alloc_conf"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"precison:bf16": "--amp"}, "unknown knob 'precison'"),
        ({"workload.depth:1": "--depth 1"}, "unknown knob 'workload.depth'"),
        ({"precision:bf61": "--amp"}, "unknown value of precision 'bf61'"),
        ({"num_workers:x": "-j x"}, "num_workers must be a whole number"),
        ({"precision:bf16": " "}, "--map precision:bf16 has no words"),
        ({"precision:bf16": "--amp 'x"}, "a quote is not closed"),
        ({"num_workers": "--workers 4"}, "--map num_workers has no place for its value"),
        ({"precision": "--amp"}, "--map precision has no place for its value"),
        ({"precision:bf16": "--amp -j {num_workers}"}, "--map precision:bf16 has a place for num_workers"),
        ({"num_workers:4": "-j 4", "num_workers:04": "-j 04"}, "--map gives num_workers:4 twice"),
        ({"num_workers": "-j {num_workers}", "num_workers:0": "-j 0"}, "both for any value and for one"),
    ],
)
def test_what_no_map_can_say_is_one_sentence(flags: dict[str, str], message: str) -> None:
    with pytest.raises(AutotuneError) as raised:
        script_entry.flags_of(flags)
    assert message in str(raised.value) and raised.value.exit_code == 2


def test_a_command_says_each_thing_once() -> None:
    with pytest.raises(UsageError, match="both a --map and a place"):
        script_entry.check_flags(ref("train", "-j{num_workers}"))
    with pytest.raises(UsageError, match="in the command twice"):
        script_entry.check_flags(ref("train", "{flags}", "{flags}"))


def test_a_request_keeps_it_and_says_it() -> None:
    command = CommandRef(words=("python", "train.py"), folder="/")
    spec = StudySpec(name="", mark="m", created="c", model="train", command=command, flags=FLAGS)
    assert spec.script == command.model_copy(update={"flags": FLAGS})
    assert StudySpec.model_validate_json(spec.model_dump_json()) == spec
    assert "--map 'precision:bf16=--amp bfloat16'" in command_of(spec)
    assert command_of(spec).endswith(" -- python train.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("space", "--model", "resnet18", *MAPS), "--map is for training scripts"),
        (("space", "--map", "precision:bf16=", "--", *SCRIPT), "--map takes NAME=VALUE"),
        (("space", *MAPS[:2], *MAPS[:2], "--", *SCRIPT), "--map gives precision:bf16 twice"),
        (("space", "--map", "precison:bf16=--amp", "--", *SCRIPT), "unknown knob"),
        (("space", "--map", "batch_size=-b {batch_size}", "--samples-per-step", "2", "--", *SCRIPT), "as many samples"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(run: Runner, words: tuple[str, ...], message: str) -> None:
    ran = run.typed(*words)
    assert ran.code == 2 and message in ran.stderr and "Traceback" not in ran.stderr


def test_nor_can_live(run: Runner) -> None:
    ran = run.run([sys.executable, "-P", "-m", "autotune", "run", "--live", *MAPS, "--", *SCRIPT])
    assert ran.code == 2 and "--live sets nothing by words" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("searching_here")
def test_the_space_has_what_the_map_says(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = str(tmp_path_factory.mktemp("outside") / "log")
    more = ("--map", "batch_size:32=-b 32", "--map", "compile_mode:default=--compile", *MAPS)
    ran = run.typed("space", "--json", *more, "--", *SCRIPT, "--log", log)
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    refused = {n: {c["value"]: c["refused"] for c in knob["choices"]} for n, knob in found["knobs"].items()}
    assert found["baseline"]["num_workers"] == 1 and found["baseline"]["precision"] == "fp32"
    assert set(refused["num_workers"].values()) == {None}
    assert refused["precision"]["fp32"] is None and refused["precision"]["tf32"] == "--map says nothing of it"
    assert refused["precision"]["fp16"] == "needs a CUDA device", "what the machine lacks, no flag gives it"
    assert refused["batch_size"][8] is None and refused["batch_size"][32] is None
    assert refused["batch_size"][16] == "--map says nothing of it"
    assert refused["compile_mode"]["off"] is None
    # It was looked at as it stands.
    assert json.loads(Path(log).read_text())["words"] == ["--log", log]


@pytest.fixture
def launched(command_launch: Any, tmp_path_factory: pytest.TempPathFactory):
    """``launched(config, own, …)``: how a launch of the script ended, and the words it was given."""
    log = tmp_path_factory.mktemp("outside") / "log"

    def run(config: dict[str, Value], own: dict[str, Value], **fields: Any):
        words = (*SCRIPT, "--log", str(log), "--steps", "1000000")
        said = ref(*words, own=own).model_dump(exclude={"words", "folder"})
        result = command_launch(words, {**PLAIN, **config}, said=said, **{"kind": LaunchKind.MEASURE, **fields})
        assert result.status is TrialStatus.COMPLETE, result.cause
        return result, json.loads(log.read_text())["words"][4:]

    return run


@pytest.mark.slow
def test_a_launch_has_the_words_of_its_configuration(launched: Any) -> None:
    plan = MeasurePlan(target_halfwidth=10.0, min_windows=3, min_window_s=0.1, max_measure_s=4.0)
    _, words = launched({"precision": "fp16", "num_workers": 2}, {"num_workers": 1, "precision": "fp32"}, plan=plan)
    assert words == ["--amp", "float16", "--workers", "2"]


@pytest.mark.slow
def test_what_the_command_sets_is_one_thing_for_all_of_a_heat(launched: Any) -> None:
    own: dict[str, Value] = {**PLAIN, "precision": "bf16", "optimizer_impl": "for-loop", "memory_format": "contiguous"}
    heat = HeatPlan(entrants=(own, {**own, "optimizer_impl": "fused"}), turn_s=0.05, all_rounds=True, max_rounds=3)
    result, words = launched(own, {"num_workers": 0}, kind=LaunchKind.HEAT, heat=heat)
    assert words == ["--amp", "bfloat16"]
    assert [len(entrant.turns) for entrant in result.heat.entrants] == [3, 3]


def told(run: Runner, *options: str, **configuration: Value):
    profile = written(run.folder, **configuration)
    return run.run([sys.executable, "-P", "-m", "autotune", "run", "--profile", str(profile), *options, "--", *SCRIPT])


@pytest.mark.slow
def test_a_profile_is_applied_by_the_same_words(run: Runner) -> None:
    ran = told(run, *MAPS, precision="fp16", num_workers=2, prefetch_factor=4)
    assert ran.seen["words"] == ["--amp", "float16", "--workers", "2"]
    assert ran.seen["outputs"] == ["torch.float16"] and ran.seen["workers"] == 2
    assert ran.stderr == "autotune: profile.yaml: fp16, 2 workers, prefetch 4\n"


def test_a_profile_with_a_value_that_has_no_words_is_refused(run: Runner) -> None:
    ran = told(run, *MAPS[:2], precision="fp16")
    assert ran.code == 2 and "the profile has precision=fp16, and --map says nothing of it" in ran.stderr


def test_a_profile_says_what_the_map_was(tmp_path: Path) -> None:
    plain = profiles.read(written(tmp_path))
    assert "flags" not in profiles.dump(plain)
    own = plain.workload.model_copy(update={"flags": {"num_workers": "-j {num_workers}"}, "own": {"num_workers": 1}})
    mapped = plain.model_copy(update={"workload": own})
    text = profiles.dump(mapped)
    assert "autotune run --profile profile.yaml --map 'num_workers=-j {num_workers}' -- python train.py" in text
    assert profiles.parse(text, "profile.yaml") == mapped
