"""A Hub on loopback: repositories, answers over HTTP, faults on request."""
