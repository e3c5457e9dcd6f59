"""Helpers that know nothing of bundles."""
