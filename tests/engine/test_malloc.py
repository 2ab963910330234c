"""Memory that was freed is there for the next step without a page fault."""

import platform
import resource
import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource, sys, torch
from voxlite.engine.model.malloc import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    kept = [torch.ones(2**19) for _ in range(8)]  # 2 MiB each
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_step_that_frees_and_takes_as_much_again_has_no_page_faults() -> None:
    def num_faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT_FAULTS, how], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    page_bytes = resource.getpagesize()
    # The best of three: now and then the system takes back pages that rest.
    kept = min(num_faults("keep") for _ in range(3))
    assert kept < 8 * 2**21 / page_bytes < num_faults("give back")
