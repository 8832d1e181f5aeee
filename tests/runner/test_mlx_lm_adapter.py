"""What importing mlx-lm does to a process is not done to ours."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from headrace.runner.loading import loader
from headrace.runner.substitutions import decoder_block, moe_decode, packed_linear
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 60))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, False])
def test_the_limit_on_open_files_stays(few: bool) -> None:
    """Where mlx-lm's own limits are more than the process may have, and where they would be others than it has."""
    soft, hard = (256, 256) if few else (150, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    program = PROGRAM.format(soft=soft, hard=hard)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split("\n") == [f"{soft} {hard}", "50 60", ""]
