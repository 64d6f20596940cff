"""Worker groups that Slurm starts."""
