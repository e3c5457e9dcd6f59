"""The run folder: its files, its lock, its history and its checkpoints."""
