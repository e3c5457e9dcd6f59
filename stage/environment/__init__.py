"""Environments: their files (`spec`), locks (`solve`), fit to a cluster (`check`), and `image`.

Only `solve` uses the network.
"""
