"""The checks of a run, as tables: those of any run that Slurm starts, and those of a training."""
