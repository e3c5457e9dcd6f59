"""The rehearsal of a run, on a login node and in a job."""
