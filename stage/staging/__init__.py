"""From a manifest to a lock, and from the lock to a bundle: resolve, fetch, load test."""
