"""The profile itself as JSON, for programs; autotune reads it like the YAML."""

from __future__ import annotations

from autotune.profile import Profile
from autotune.profile.export.format import NO_MAPS, Exported, Format, Maps, as_json


class _Json(Format):
    name = "json"
    about = "programs"
    usage = "json.load(open(FILE))"
    place = 20
    endings = (".json",)

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        return Exported(as_json(profile.model_dump(mode="json")))


FORMAT = _Json()
