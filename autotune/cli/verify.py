"""``autotune verify``: measure whether a profile's promise is kept on this machine now."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.base.errors import NoVerdictError
from autotune.base.records import SCHEMA_VERSION, CommandRef
from autotune.cli.options import (
    AllowBusy,
    Args,
    Command,
    ItsData,
    ItsModel,
    Json,
    ProfileFile,
    ScriptFile,
    search_options,
    typer_option,
    with_script,
)
from autotune.cli.output import environment, print_json, stop_signals
from autotune.profile import Profile, read, warnings_for
from autotune.search.recheck import AT_LEAST, Recheck, recheck, request_for
from autotune.space.formatting import count, interval_text, rate_text, ratio_text
from autotune.stats import Rate
from autotune.study.request import option

#: Exit code if the promise is not kept.
BROKEN = 1


@search_options([*map(option, ("map", "output_flag", "scratch", "rate", "rate_file", "samples_per_step"))])
def command(
    typed: Mapping[str, Any],
    profile: ProfileFile,
    model: ItsModel = "",
    arg: Args = None,
    data: ItsData = "",
    script: ScriptFile = None,
    budget: Annotated[str, typer_option(option("budget"), help_="How long to measure at most.")] = "2m",
    at_least: Annotated[
        float, typer.Option("--at-least", help="The part of the promise that has to be kept.", min=0.0, max=2.0)
    ] = AT_LEAST,
    allow_busy: AllowBusy = False,
    as_json: Json = False,
    words: Command = None,
) -> None:
    """Launch a profile and its baseline again in turns; exit code 1 if its promise is not kept here, and why, 8 if that
    stays open.

    The profile of a script names no command: the script stands behind --, as for `autotune run`."""
    promised = read(profile)
    typed, script_words = with_script(typed, words or (), script)
    spec = request_for(
        promised,
        model=option("model").value(model),
        command=CommandRef(words=tuple(script_words), folder=os.getcwd()) if script_words else None,
        of_script={
            str(search_option.field): search_option.value(typed[search_option.name])
            for search_option in map(option, typed)
        },
        args=option("arg").value(arg),
        data=data and option("data").value(data),
        budget_s=option("budget").value(budget),
        allow_busy=allow_busy,
    )
    with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="autotune-verify-") as folder:
        result = recheck(
            promised, spec, environment(stop), Path(folder), at_least=at_least, any_code=bool(script_words or model)
        )
    verdict = result.verdict(at_least)
    if verdict is not False:
        for sentence in warnings_for(result.differences):
            typer.echo(f"warning: {sentence}", err=True)
    if as_json:
        print_json(_as_json(promised, result, at_least, verdict))
    else:
        for name, line in _lines(promised, result, at_least, verdict):
            typer.echo(f"{name:<9} {line}")
    if verdict is not True:
        raise typer.Exit(BROKEN if verdict is False else NoVerdictError.exit_code)


def _lines(promised: Profile, kept: Recheck, at_least: float, verdict: bool | None) -> list[tuple[str, str]]:
    gives = promised.gives
    promise = f"{rate_text(gives.samples_per_second, gives.ci95)} {promised.unit}"
    if kept.speedup is not None and gives.speedup is not None and gives.speedup_ci95 is not None:
        promise = f"{_speedup((gives.speedup, *gives.speedup_ci95))} the baseline, {promise}"
    lines = [("promised", promise)]
    if kept.rate is not None:
        unit = promised.unit
        now = f"{_rate(kept.rate)} {unit}, {count(kept.launches, 'launch', 'launches')}"
        if kept.speedup is not None and kept.baseline is not None:
            now = f"{_speedup(kept.speedup)} the baseline ({_rate(kept.baseline)} {unit}), {now} of each in turns"
        lines.append(("now", now))
    words = {True: "kept", False: "broken", None: "open"}
    why = [("because", cause) for cause in kept.causes] if verdict is False else []
    if verdict is False and not why:
        why = [("because", "of nothing that was seen: machine, software, data and code are those of then.")]
    if kept.ratio is None:
        return [*lines, (words[verdict], f"{kept.failed}."), *why]
    return [*lines, (words[verdict], _judgement(kept, at_least, verdict)), *why]


def _judgement(kept: Recheck, at_least: float, verdict: bool | None) -> str:
    assert kept.ratio is not None
    ratio = f"{ratio_text(kept.ratio[0])} of what was promised (95 %: {interval_text(kept.ratio[1:])})"
    required = f"at least {ratio_text(at_least * kept.sureness)} is wanted"
    if kept.sureness < 1:
        required += f" ({ratio_text(at_least)} of the promised interval's low end)"
    if verdict is None:
        more = "The launches scatter too much to say; a longer --budget, or a quieter machine, may."
        return f"{ratio}, {required}. {more}"
    if kept.another:
        return f"what was launched is not what was promised. It gives {ratio}."
    if verdict is False and kept.rate_ratio is not None and kept.too_slow(at_least):
        now = f"{ratio_text(kept.rate_ratio[0])} of the promised rate (95 %: {interval_text(kept.rate_ratio[1:])})"
        minimum = f"with the scatter from day to day, at least {ratio_text(at_least * (1 - kept.slack))} is wanted"
        return f"{now}, {minimum}. The speedup is {ratio}."
    return f"{ratio}, {required}."


def _rate(rate: Rate) -> str:
    return rate_text(rate.per_s, (rate.low_per_s, rate.high_per_s))


def _speedup(found: tuple[float, float, float]) -> str:
    return f"{ratio_text(found[0], found[1:])} (95 %: {interval_text(found[1:])})"


def _as_json(promised: Profile, kept: Recheck, at_least: float, verdict: bool | None) -> dict[str, Any]:
    def figures(rate: Rate | None) -> dict[str, Any] | None:
        return None if rate is None else {"samples_per_second": rate.per_s, "ci95": [rate.low_per_s, rate.high_per_s]}

    gives = promised.gives
    return {
        "schema_version": SCHEMA_VERSION,
        "kept": verdict,
        "at_least": at_least,
        "ratio": kept.ratio and kept.ratio[0],
        "ratio_ci95": kept.ratio and list(kept.ratio[1:]),
        "rate_ratio": kept.rate_ratio and kept.rate_ratio[0],
        "rate_ratio_ci95": kept.rate_ratio and list(kept.rate_ratio[1:]),
        "failed": kept.failed,
        "causes": list(kept.causes),
        "launches": kept.launches,
        "promised": {
            "samples_per_second": gives.samples_per_second,
            "ci95": list(gives.ci95),
            "speedup": gives.speedup,
            "speedup_ci95": gives.speedup_ci95 and list(gives.speedup_ci95),
        },
        "now": figures(kept.rate),
        "baseline": figures(kept.baseline),
        "speedup": kept.speedup and kept.speedup[0],
        "speedup_ci95": kept.speedup and list(kept.speedup[1:]),
        "differences": [{"what": what, "then": then, "now": now} for what, then, now in kept.differences],
    }
