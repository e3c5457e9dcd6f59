"""Slurm: its variables, its commands, the sbatch script."""
