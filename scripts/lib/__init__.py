"""Helpers of the scripts in this folder and of the tests: an embedded Hub on loopback, and the demo's parts."""
