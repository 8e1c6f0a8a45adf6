"""The profile: the result of a search as data. Write it, read it, check it against this machine.

A profile is YAML that people can read and that YAML 1.1 and 1.2 parsers read alike. All text is double-quoted, because
YAML 1.1 (PyYAML) takes a bare ``off`` for false, ``12:30:45`` for a number and ``1e3`` for text, where YAML 1.2
(ruamel.yaml) does not. Reading a profile never imports or runs anything: aliases, anchors and tags are rejected before
any value is constructed, and unknown content is an error.
"""

from autotune.profile.schema import *  # noqa: F403
from autotune.profile.yaml import *  # noqa: F403
