"""``python -m autotune.export > docs/exports.md``: generate the page."""

import sys

from autotune.export.page import page

sys.stdout.write(page())
