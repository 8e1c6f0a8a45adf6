"""``autotune search``: search for the fastest way to train a model on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.cli.dry_run import say_beforehand
from autotune.cli.options import Json, NoInput, make_spec, takes
from autotune.cli.replay import search_surface
from autotune.cli.running import asked_to_stop, end_search, environment
from autotune.search import search as search_study
from autotune.study.options import OPTIONS


@takes(OPTIONS)
def search(typed: Mapping[str, Any], as_json: Json = False, no_input: NoInput = False) -> None:
    """Search for the fastest way to train a model on this machine."""
    spec = make_spec(typed)
    if typed["replay"] is not None:
        search_surface(typed["replay"], spec, typed, as_json=as_json)
    elif typed["dry_run"]:
        say_beforehand(spec, as_json=as_json)
    else:
        with asked_to_stop() as stop:
            found = search_study(spec, typed["studies_dir"], environment(stop))
        end_search(found, as_json=as_json)
