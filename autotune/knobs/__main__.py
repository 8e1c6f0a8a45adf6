"""``python -m autotune.knobs > docs/knobs.md``: write the page anew."""

import sys

from autotune.knobs.page import page

sys.stdout.write(page())
