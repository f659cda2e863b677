"""Settings that every test process needs before torch is imported."""

from __future__ import annotations

import os

# Tests compute on tiny tensors, where threads cost more than they give, and several test processes
# share the machine. Child processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
