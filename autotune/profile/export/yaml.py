"""The profile itself, with comments: what `autotune train`, `autotune run` and `autotune.load_profile` take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autotune.base.errors import ProfileError
from autotune.profile import Profile, dump, parse
from autotune.profile.export.format import Exported, Format


class _Yaml(Format):
    name = "yaml"
    about = "autotune itself"
    usage = "autotune train --profile FILE"
    place = 10
    endings = (".yaml", ".yml")

    def export(self, profile: Profile, maps: Mapping[str, str] = MappingProxyType({})) -> Exported:
        return Exported(dump(profile))

    def is_earlier(self, text: str) -> bool:
        try:
            parse(text, self.name)
        except ProfileError:
            return False
        return True


FORMAT = _Yaml()
