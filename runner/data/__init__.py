"""Datasets -> memory-mapped stores of tokens or pixels, prepared once and read by all ranks."""
