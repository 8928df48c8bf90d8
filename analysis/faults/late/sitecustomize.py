"""Makes the clock of every Python process that has this folder in its path an hour late.

It stands for a host whose clock is wrong. A library that does the same to all programs (libfaketime) breaks the
waiting of Ray's own threads, which a wrong clock does not.
"""

import time

HOUR = 3600
now, now_ns = time.time, time.time_ns
time.time = lambda: now() - HOUR
time.time_ns = lambda: now_ns() - HOUR * 10**9
