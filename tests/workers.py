"""How many workers `make test` starts: one a core, at most 16, and 3 GB of memory for each."""

import os
import sys

MOST, BYTES = 16, 3 << 30


def workers(cores: int, memory: int) -> int:
    return max(1, min(cores, MOST, memory // BYTES))


if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    print(workers(cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
