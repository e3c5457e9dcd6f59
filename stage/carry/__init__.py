"""Carries bundles: push, patch, apply."""
