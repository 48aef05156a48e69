"""Prints the packages of dependency groups of pyproject.toml, for a pip that has no --group yet."""

import sys
import tomllib
from pathlib import Path

groups = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["dependency-groups"]
for name in sys.argv[1:]:
    for package in groups.get(name, []):
        print(package)
