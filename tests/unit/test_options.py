"""The options of a search: each is declared once, and a written command line parses to the same request."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.errors import UsageError
from autotune.base.records import LARGEST_IMAGE, StudySpec
from autotune.cli import main
from autotune.study.request import OPTIONS, command_of, option, spec_of

SPEC = StudySpec(name="", mark="m", created="c", model="resnet50")
#: The options of which a request's command line may have one.
WRITTEN = [one for one in OPTIONS if one.field is not None and one.written != "never"]

WORDS = st.text("abé19 .,=-'\"$\\/#", min_size=1)
ONE_NAME = WORDS.filter(lambda text: "," not in text and text.strip() != "")
COUNTS = st.integers(1, LARGEST_IMAGE).map(str)
NAMES = st.text("abc_.-", min_size=1, max_size=5)
PARTS = st.text("ab1.=-' ", min_size=1).filter(str.strip)


def settings_of(prefix: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """NAME=VALUE, each name once; what begins differently can be given to --set and to --fix."""
    found = st.dictionaries(NAMES, values, min_size=1, max_size=3)
    return found.map(lambda pairs: [f"{prefix}{name}={value}" for name, value in pairs.items()])


DURATIONS = st.one_of(
    st.floats(1e-3, 1e9).map(lambda seconds: f"{seconds:.9f}"),
    st.builds("{}h{}m{}s".format, st.integers(1, 10**6), st.integers(0, 90), st.floats(0, 99).map("{:.3f}".format)),
    st.builds("{}{}".format, st.integers(1, 10**7), st.sampled_from(["", "s", "m", "h"])),
)
SIZES = st.builds("{}{}".format, st.integers(1, 10**6), st.sampled_from(["", "B", "K", "GiB", "GB", "TB"]))
#: What people may type behind each of them.
TYPED: dict[str, st.SearchStrategy[Any]] = {
    "model": st.one_of(WORDS, WORDS.map("{}.py".format)),
    "arg": settings_of("", WORDS),
    "data": st.one_of(st.sampled_from(["generated", "synthetic"]), WORDS),
    "storage": st.just("postgresql://tuner@host:5433/tunings?application_name=x"),
    "budget": DURATIONS,
    "trials": COUNTS,
    "objective": st.lists(
        st.one_of(ONE_NAME, ONE_NAME.map("{}.py".format)), min_size=1, max_size=3, unique_by=str.strip
    ).map(",".join),
    "device": WORDS,
    "devices": WORDS,
    "on": WORDS,
    "on_resources": settings_of("", WORDS),
    "workers": st.integers(1, 2**10).map(str),
    "batch_size": COUNTS,
    "nproc_per_node": st.integers(1, 2**10).map(str),
    "image_size": COUNTS,
    "samples_per_step": COUNTS,
    "map": settings_of("", WORDS),
    "output_flag": WORDS,
    "scratch": st.just([]),
    "rate": WORDS,
    "rate_file": WORDS,
    "baseline": settings_of("", WORDS),
    "set": settings_of("s", st.lists(PARTS, min_size=1).map(",".join)),
    "fix": settings_of("f", WORDS),
    "memory_limit": SIZES,
    "sampler": WORDS,
    "seed": st.one_of(st.just("0"), COUNTS),
    "allow_busy": st.just([]),
    "keep_batch_size": st.just([]),
    "global_batch": COUNTS,
    "store_latency": DURATIONS,
    "store_bandwidth": SIZES,
    "store_cache": SIZES,
    "require": st.lists(
        st.tuples(st.sampled_from(["peak_memory", "memory", "host_memory"]), st.sampled_from(["<=", ">="]), SIZES)
        .map("".join)
        .filter(lambda text: " " not in text)
    ),
    "epochs": st.integers(1, 10**6).map(str),
    "samples": COUNTS,
    "price_per_hour": st.one_of(
        st.decimals(min_value="0.0001", max_value=10**6, places=4).map(str), st.just("0.00000001"), st.just("2")
    ),
}


@cache
def search_command() -> Any:
    main.run(["--version"])
    group: Any = typer.main.get_command(main.app)
    return group.commands["search"]


def asked(words: list[str]) -> StudySpec:
    """What `autotune search` makes of a command line."""
    with search_command().make_context("search", list(words)) as parsed:
        return spec_of(parsed.params, mark="m", created="c")


def words_of(typed: dict[str, Any]) -> list[str]:
    words = []
    for name, value in typed.items():
        if name in ("allow_busy", "keep_batch_size", "scratch"):
            words.append(option(name).flag)
        for one in value if isinstance(value, list) else [value]:
            words += [option(name).flag, one]
    return words


def test_every_option_that_is_written_back_is_tried_here() -> None:
    assert TYPED.keys() == {one.name for one in WRITTEN}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_an_option_written_back_asks_for_the_same(name: str) -> None:
    @settings(max_examples=30)
    @given(TYPED[name])
    def check(value: Any) -> None:
        beside = {"on": "ray"} if name == "workers" else {}
        spec = asked(words_of({"model": "resnet50", **beside, name: value}))
        words = shlex.split(command_of(spec))
        assert words[:2] == ["autotune", "search"]
        assert asked(words[2:]) == spec
        assert (option(name).flag in words) or getattr(spec, option(name).field) == getattr(SPEC, option(name).field)

    check()


@pytest.mark.slow
@settings(max_examples=50)
@given(st.fixed_dictionaries({"model": TYPED["model"]}, optional={n: s for n, s in TYPED.items() if n != "model"}))
def test_all_of_them_written_back_ask_for_the_same(typed: dict[str, Any]) -> None:
    if "global_batch" in typed:
        # Most of them would not fit together.
        typed.pop("batch_size", None)
        typed.pop("nproc_per_node", None)
    if "workers" in typed:
        typed["on"] = "ray"
    if "devices" in typed:
        typed.pop("device", None)
        typed.pop("nproc_per_node", None)
    if "epochs" in typed:
        typed.pop("samples", None)
    spec = asked(words_of(typed))
    assert asked(shlex.split(command_of(spec))[2:]) == spec


def test_what_nobody_typed_is_what_a_request_has_by_default() -> None:
    assert asked(["--model", "resnet50"]) == SPEC
    assert spec_of({"model": "resnet50"}, mark="m", created="c") == SPEC
    assert command_of(SPEC) == "autotune search --model resnet50 --budget 10m"


def test_a_budget_is_written_as_people_do() -> None:
    for seconds, text in ((90.5, "90.5s"), (5400, "1h30m"), (7200, "2h"), (1234567, "1234567s")):
        assert command_of(SPEC.model_copy(update={"budget_s": seconds})).endswith(f"--budget {text}")


@pytest.mark.parametrize(("text", "seconds"), [("1.5m", 90), ("1.5h", 5400), ("0.5m30s", 60), ("0.1m", 6), ("7", 7)])
def test_a_budget_takes_fractions(text: str, seconds: float) -> None:
    assert asked(["--model", "resnet50", "--budget", text]).budget_s == seconds


def test_fields_are_declared_once() -> None:
    fields = [one.field for one in OPTIONS if one.field is not None]
    assert len(fields) == len(set(fields)) == len({one.name for one in OPTIONS if one.field is not None})
    # What is left is made by the search itself; a command is no option, but stands behind all of them.
    assert StudySpec.model_fields.keys() - set(fields) == {"schema_version", "mark", "created", "command"}


def test_a_complaint_names_the_option() -> None:
    for one in OPTIONS:
        if one.spelling.many and one.name != "require":
            with pytest.raises(UsageError, match=f"{one.flag} takes NAME=VALUE"):
                one.value(["nothing"])


def test_a_training_has_one_length() -> None:
    with pytest.raises(UsageError, match="--epochs and --samples both say how long"):
        asked(["--model", "resnet50", "--epochs", "3", "--samples", "900"])


@pytest.mark.slow
def test_an_option_declared_once_is_everywhere() -> None:
    script = Path(__file__).with_name("made_up_option.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr
    *became, said = (json.loads(line) for line in done.stdout.splitlines())
    plain = "autotune search --model resnet18 --budget 10m"
    assert became == [
        {"command": command, "more": more, "written": " ".join([plain, *more])}
        for command in ("search", "space", "submit")
        for more in (["--biscuits", "two"], [])
    ]
    assert said.count("Beside the tea.  [default: none]") == 2
    assert "--biscuits and --replay exclude each other" in said
