"""``tfdist run``: one script, started once per rank.

The driver starts an agent (`agent.py`) on each host, as `hosts` does, and follows the ranks
(`driver.py`). In a Slurm allocation, one agent starts all ranks as a step (`step.py`). An agent
starts the ranks of the host, forwards their output, and kills all their descendants when the driver
closes the connection.
"""
