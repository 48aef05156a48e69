"""Rig: a virtual machine with a real kernel, a real systemd and a disk that forgets, whose plug is pulled."""
