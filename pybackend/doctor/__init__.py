"""What this machine and a cluster have, and what is missing."""
