"""``headrace serve`` with the worker of ``faulty_worker.py``; the same arguments."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from headrace.cli.serve import make_app, read_config
from headrace.gateway.server import run_server

WORKER = (sys.executable, "-u", "-X", "faulthandler", str(Path(__file__).with_name("faulty_worker.py")))

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_server(read_config(words), make_app, reread=partial(read_config, words), worker_command=WORKER))
