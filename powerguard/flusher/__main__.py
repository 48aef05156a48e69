"""Becomes nobody's child, then serves: a launcher that ends a rank's whole family doesn't find the deputy in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """The process that was started ends at once, its child is the deputy."""
    if os.fork():
        os._exit(0)
    from powerguard.flusher.deputy import serve

    sys.exit(serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
