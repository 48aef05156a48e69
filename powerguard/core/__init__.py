"""The pure core: values in, decisions out. No time, no I/O, no threads, no logging."""
