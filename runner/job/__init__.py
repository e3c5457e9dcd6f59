"""From a run file to a job that can start: inputs, checks, plan."""
