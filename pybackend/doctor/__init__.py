"""What this machine and a cluster have, and what they lack."""
