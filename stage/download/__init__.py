"""Fetches one file: HTTP, Xet, retries, partial files, rate limits."""
