"""The parts of `scripts/demo`."""
