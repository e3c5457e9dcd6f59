"""Small environments: a conda channel, a Python index, a laptop that locks and fetches."""
