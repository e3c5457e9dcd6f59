"""Assets that are not on a Hub: local folders and plain URLs."""
