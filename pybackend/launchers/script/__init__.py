"""``tfdist run``: one script, started once per rank.

Beside the driver, each host has an agent (`agent.py`), which starts the host's ranks, passes on
what they print, and ends everything that they have started when the driver lets go of it.
"""
