"""Checkpoints, the exported model and its model card."""
