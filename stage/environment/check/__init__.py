"""The needs of an environment, and whether a cluster meets them."""
