"""The one place where pynut2 is imported."""

from __future__ import annotations

import warnings

from powerguard.errors import MissingDependency

__all__ = ["PyNUTClient", "PyNUTError"]

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of telnetlib, which pynut2 imports and we never use
        from pynut2.nut2 import PyNUTClient, PyNUTError
except ImportError as missing:
    raise MissingDependency(
        f"the NUT client can't be loaded ({missing})", todo="install it: pip install 'powerguard[node]'"
    ) from missing
