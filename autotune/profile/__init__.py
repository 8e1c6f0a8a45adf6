"""The profile: what a search hands over, as data. Write it, read it, check it against this machine.

A profile is YAML that a person reads and two generations of parsers read alike: every text is double-quoted,
because YAML 1.1 (PyYAML) takes a bare ``off`` for false, ``12:30:45`` for a number and ``1e3`` for text, where
YAML 1.2 (ruamel.yaml) does not. Reading one never imports or runs anything: aliases, anchors and tags are refused
before a value is made, and nothing that does not belong in a profile is passed over in silence.
"""

from autotune.profile.checking import check, warnings_for
from autotune.profile.reading import MAX_BYTES, parse, read
from autotune.profile.schema import (
    Compared,
    Conditions,
    Gives,
    Measured,
    Profile,
    ProfileWorkload,
    Provenance,
    Versions,
)
from autotune.profile.writing import FORMATS, dump, export, write

__all__ = [
    "FORMATS",
    "MAX_BYTES",
    "Compared",
    "Conditions",
    "Gives",
    "Measured",
    "Profile",
    "ProfileWorkload",
    "Provenance",
    "Versions",
    "check",
    "dump",
    "export",
    "parse",
    "read",
    "warnings_for",
    "write",
]
