"""Variables for a shell: those that the knobs themselves need, and ``AUTOTUNE_<KNOB>`` for each knob.

The first are in force for any training that the shell starts: the threads of a CPU (``OMP_NUM_THREADS``,
``MKL_NUM_THREADS``), the allocators of host and device, cuBLAS' workspaces. The others do nothing by themselves; a
script reads them: ``int(os.environ["AUTOTUNE_BATCH_SIZE"])``. Values are spelled as in the profile, in quotes where a
shell needs them.
"""

from __future__ import annotations

import re
import shlex

from autotune.agent.site.autotune_agent.in_place import MALLOC_KEEPS
from autotune.knobs import spell
from autotune.knobs.alloc_conf import KNOB as ALLOCATOR
from autotune.knobs.alloc_conf import VARIABLES, setting_of
from autotune.knobs.intra_op_threads import KNOB as THREADS
from autotune.knobs.malloc import KNOB as MALLOC
from autotune.profile import Profile, printable
from autotune.profile.export.format import MARK, NO_MAPS, Exported, Format, Maps, heading
from autotune.space import environment

_PREFIX = "AUTOTUNE_"
_FROM = f"export {_PREFIX}EXPORT="


class _Env(Format):
    name = "env"
    about = "shells and their scripts"
    usage = 'eval "$(autotune export STUDY --format env)"'
    place = 30
    endings = (".env",)
    flat = True

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        config, origin = profile.configuration, profile.provenance
        variables = environment(config)
        allocator = config.get(ALLOCATOR.name, ALLOCATOR.default)
        if allocator != ALLOCATOR.default:
            # Whatever the variables are here.
            variables |= dict.fromkeys(VARIABLES, setting_of(allocator))
        if THREADS.name in config:
            variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), spell(config[THREADS.name]))
        if config.get(MALLOC.name) == "keep":
            variables |= MALLOC_KEEPS
        names = {name: _PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII).upper() for name in config}
        variables |= {names[name]: spell(value) for name, value in config.items()}
        lines = [_FROM + shlex.quote(printable(f"{MARK}: study {origin.study}, trial {origin.trial}"))]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        if config.get(MALLOC.name) == MALLOC.default:
            # Of a profile that the shell had before.
            lines.append(f"unset {' '.join(MALLOC_KEEPS)}")
        return Exported("".join(f"{line}\n" for line in lines), tuple(heading(profile)))

    def is_earlier(self, text: str) -> bool:
        return text.startswith(_FROM)


FORMAT = _Env()
