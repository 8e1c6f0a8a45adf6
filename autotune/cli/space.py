"""``autotune space``: list the knobs, their legal values on this machine, and why others are refused."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.base.records import SCHEMA_VERSION
from autotune.cli.options import Command, Json, make_spec, search_options
from autotune.cli.output import environment, print_json, print_rich, stop_signals
from autotune.knobs import KNOBS
from autotune.report import space_table
from autotune.search import make_space
from autotune.study.request import OPTIONS


@search_options([option for option in OPTIONS if option.space])
def space(typed: Mapping[str, Any], words: Command = None, as_json: Json = False) -> None:
    """Show the knobs, their legal values here, and why others are refused.

    Of a training script, instead of a model: which it sets itself, and which can be set from outside.
    """
    spec = make_spec(typed, words or ())
    with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="autotune-space-") as folder:
        legal_space = make_space(spec, environment(stop), Path(folder))
    if not as_json:
        print_rich(space_table(legal_space))
        return
    print_json(
        {
            "schema_version": SCHEMA_VERSION,
            "baseline": dict(legal_space.baseline),
            "inactive": dict(legal_space.inactive),
            "knobs": {
                name: {
                    "changes_maths": name not in KNOBS or KNOBS[name].changes_maths,
                    "choices": [{"value": c.value, "refused": c.refused, "further": c.further} for c in choices],
                }
                for name, choices in legal_space.choices.items()
            },
        }
    )
