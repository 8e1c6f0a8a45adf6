"""``python -m autotune.knobs > docs/knobs.md``: generate the page."""

import sys

from autotune.knobs.page import page

sys.stdout.write(page())
