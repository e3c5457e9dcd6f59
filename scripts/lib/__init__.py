"""Helpers of the scripts and the tests: a Hub on loopback, a conda channel, the demo's parts."""
