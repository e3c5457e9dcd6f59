"""Environments that arrive whole: what a cluster offers, what an environment needs, and whether the two fit.

Nothing in here reaches the network; what does is in `stage.sources`.
"""
