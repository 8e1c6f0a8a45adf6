"""The profile itself, with comments: what `autotune train`, `autotune run` and `autotune.load_profile` take."""

from __future__ import annotations

from autotune.base.errors import ProfileError
from autotune.profile import Profile, dump, parse
from autotune.profile.export.format import NO_MAPS, Exported, Format, Maps


class _Yaml(Format):
    name = "yaml"
    about = "autotune itself"
    usage = "autotune train --profile FILE"
    place = 10
    endings = (".yaml", ".yml")

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        return Exported(dump(profile))

    def is_earlier(self, text: str) -> bool:
        try:
            parse(text, self.name)
        except ProfileError:
            return False
        return True


FORMAT = _Yaml()
