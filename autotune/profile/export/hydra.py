"""Overrides for an application with Hydra.

Hydra passes values on and sets nothing itself, so the application has to read them. By default they are
``cfg.autotune.KNOB``, added or replaced (``++``); ``--map KNOB=path.in.your.config={KNOB}`` names keys of your own.

```bash
python train.py $(autotune export STUDY --format hydra --map batch_size='data.batch_size={batch_size}')
```
"""

from __future__ import annotations

import re

from autotune.base.records import Value
from autotune.profile import Profile
from autotune.profile.export.format import USUAL, WordsFormat, are_words_with

#: Text that needs no quotes in an override, unless it would be read as another type.
_PLAIN, _RETYPED = re.compile(r"[A-Za-z_][\w-]*", re.ASCII), ("true", "false", "null", "inf", "nan")
_PREFIX = "++autotune."


class _Hydra(WordsFormat):
    name = "hydra"
    about = "Hydra"
    usage = "python train.py $(cat FILE)"
    place = 120

    def words(self, profile: Profile) -> list[str]:
        return [f"{_PREFIX}{name}={_value(value)}" for name, value in profile.configuration.items()]

    def is_earlier(self, text: str) -> bool:
        return are_words_with(text, {_PREFIX + name for name in USUAL}, lambda n: n.startswith(_PREFIX), equals=True)


FORMAT = _Hydra()


def _value(value: Value) -> str:
    """Return a value in the grammar of overrides (https://hydra.cc/docs/advanced/override_grammar/basic/)."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _RETYPED:
        return value
    # A backslash is literal in an override, except before a quote and at the end.
    text = re.sub(r"\\*'", lambda m: "\\" * (2 * len(m[0]) - 1) + "'", value)
    text = re.sub(r"\\+\Z", lambda m: 2 * m[0], text)
    return f"'{text}'"
