"""Brings bundles to clusters: push, patch, apply; ssh, the clusters' names, and their probe."""
