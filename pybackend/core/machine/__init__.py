"""Properties of this machine: cores, memory, GPUs, names, addresses and processes.

Nothing else in the package reads ``/proc`` or ``/sys`` for these.
"""
