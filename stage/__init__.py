"""stage: everything about the bundle, the folder that travels. Rooms and rules: docs/architecture.md."""

__version__ = "0.1.0"
