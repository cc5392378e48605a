"""A background process that does not end by itself in the time of a test; see `test_parallel_compile.py`."""

import time

time.sleep(600)
