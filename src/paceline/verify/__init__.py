"""Shows that a layout gives the numbers of one process, and says where it does not.

The package itself can be called: `paceline.verify(model_fn, batch_fn, loss, layouts=...)` is
`check.verify`. It must be one object: once anything in here is imported, `paceline.verify` is this module,
whatever name the front door would give.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verify(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compares layouts of a user's model with one process; see `paceline.verify.check.verify`."""
        from paceline.verify.check import verify

        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Verify
