"""What this machine is and has: cores, memory, GPUs, names, addresses and processes.

Nothing else in the package reads ``/proc`` or ``/sys`` for these.
"""
