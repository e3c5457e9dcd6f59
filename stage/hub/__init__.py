"""Reads a Hub: models, datasets, revisions, licences, files."""
