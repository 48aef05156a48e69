"""The journal: JSON lines under one head with the boot id, synced before acting, readable wherever it was cut."""

from powerguard.journal.book import Journal
from powerguard.journal.read import Folded, Recording, fold, read
from powerguard.journal.records import Base, Done, Fault, Head, Learnt, Record, Rules, Tick
from powerguard.journal.several import several
from powerguard.journal.write import File

__all__ = [
    "Base",
    "Done",
    "Fault",
    "File",
    "Folded",
    "Head",
    "Journal",
    "Learnt",
    "Record",
    "Recording",
    "Rules",
    "Tick",
    "fold",
    "read",
    "several",
]
