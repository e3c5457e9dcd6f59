"""Converts formats that a bundle does not hold: to parquet, to safetensors, archives to files."""
