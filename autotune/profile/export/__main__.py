"""``python -m autotune.profile.export > docs/exports.md``: generate the page."""

import sys

from autotune.profile.export.page import page

sys.stdout.write(page())
