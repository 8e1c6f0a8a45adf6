"""``autotune search``: search for the fastest way to train a model on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.cli.dry_run import print_dry_run
from autotune.cli.options import Command, Json, NoInput, Track, make_spec, search_options
from autotune.cli.replay import search_surface
from autotune.cli.running import end_search, environment, stop_signals
from autotune.cli.tracked_search import tracked_search
from autotune.search import search as search_study
from autotune.study.options import OPTIONS


@search_options(OPTIONS)
def search(
    typed: Mapping[str, Any],
    words: Command = None,
    track: Track = None,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Search for the fastest way to train a model on this machine, or a training script as it stands."""
    spec = make_spec(typed, words or ())
    if typed["replay"] is not None:
        search_surface(typed["replay"], spec, typed, as_json=as_json)
    elif typed["dry_run"]:
        print_dry_run(spec, as_json=as_json)
    else:
        with stop_signals() as stop:
            env = environment(stop)
            with tracked_search(env.observer, track or (), typed["studies_dir"]) as observer:
                found = search_study(spec, typed["studies_dir"], replace(env, observer=observer))
                observer.concludes(found.outcome)
        end_search(found, as_json=as_json)
