"""How a training scales: measured over several numbers of workers, and projected to more."""
