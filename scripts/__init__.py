"""Development scripts. A package only so that the tests and the scripts can share `scripts.lib`."""
