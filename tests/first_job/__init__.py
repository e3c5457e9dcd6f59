"""Failures of first jobs, injected one by one: docs/first-job-failures.md."""
