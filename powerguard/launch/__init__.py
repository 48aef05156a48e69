"""`powerguard exec`: programs that know nothing of powerguard, saved by the signal that they do know."""
