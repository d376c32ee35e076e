"""Where the deployment files lie.

In the checkout, or, when the wheel is tested, in the installed package.
"""

from __future__ import annotations

from pathlib import Path

import tidegate.infra

DEPLOY = Path(tidegate.infra.__file__).parent / "deploy"
