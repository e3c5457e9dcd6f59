"""A rank's number, its heartbeat, and the address of rank 0."""
