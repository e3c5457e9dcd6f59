"""Environments: their files (`spec`), locks (`solve`), fit to a cluster (`compat`), `image`.

Only `solve` and `asset` use the network.
"""
