from powerguard.generations import latest as latest
from powerguard.train.attach import attach as attach
from powerguard.train.guard import Guard as Guard
from powerguard.train.verdict import Verdict as Verdict

__all__ = ["Guard", "Verdict", "__version__", "attach", "latest"]
__version__: str
