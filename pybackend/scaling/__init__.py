"""Scaling of training: measured with several numbers of workers, and projected to more."""
