"""How slow this machine is just now.

Limits in seconds are meant for a quiet machine, and others run the tests as well.
"""

from __future__ import annotations

import json
import time

_QUIET = 0.17  # processor seconds of the work below, on the machine that the limits were found on
_WORK = {
    "numbers": list(range(100)),
    "objects": {str(number): {"x": number, "y": "z" * 10} for number in range(50)},
}


def slowness() -> float:
    """Factor by which Python is slower here and now than where the limits were found.

    Never below 1.
    """
    begun = time.process_time()
    for _ in range(1000):
        json.loads(json.dumps(_WORK, sort_keys=True))
    return max(1.0, (time.process_time() - begun) / _QUIET)
