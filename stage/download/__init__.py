"""Fetches one file: HTTP, retries, partial files."""
