"""Engines: each spreads a model over the ranks in one way."""
