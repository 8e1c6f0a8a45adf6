"""A script's own options, on one line.

``--map KNOB=WORDS`` or ``--map KNOB:VALUE=WORDS`` says by which words the script sets a knob, as in a search; a profile
of a script has those that the search was given. No words are added for what the script does by itself, as far as the
search has seen that. Without any map, options are spelled as autotune's knobs: ``--batch-size 64 --pin-memory``, and
``--no-pin-memory`` for what is off (`argparse.BooleanOptionalAction`).

```bash
python train.py $(autotune export STUDY --format args --map batch_size='-b {batch_size}' --map precision:bf16=--amp)
```
"""

from __future__ import annotations

from autotune.base.records import Value
from autotune.knobs import KNOBS, spell
from autotune.profile import Profile
from autotune.profile.export.format import USUAL, WordsFormat, are_words_with


class _Args(WordsFormat):
    name = "args"
    about = "scripts with options"
    usage = "python train.py $(cat FILE)"
    place = 40
    as_searched = True

    def words(self, profile: Profile) -> list[str]:
        return [word for item in profile.configuration.items() for word in _option(*item)]

    def is_earlier(self, text: str) -> bool:
        options = {option for name in KNOBS for option in (_flag(name), _flag(f"no_{name}"))}
        return are_words_with(text, set(map(_flag, USUAL)), lambda n: n in options or n.startswith("--workload-"))


FORMAT = _Args()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-").replace(".", "-")


def _option(name: str, value: Value) -> list[str]:
    if isinstance(value, bool):
        return [_flag(name if value else f"no_{name}")]
    return [_flag(name), spell(value)]
