"""``rebooted.py daemon run …``: the daemon on a machine that seems to have rebooted."""

from autotune.cli.main import main
from autotune.daemon import service

service.boot_id = lambda: "00000000-0000-4000-8000-000000000001"
main()
