"""What `tests.processes` imports once for all commands that it forks; a warning at an import is an error."""

from __future__ import annotations

import warnings

warnings.simplefilter("error")
