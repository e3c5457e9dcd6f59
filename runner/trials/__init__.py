"""bench, evaluate, rehearse: small programs that start trainings."""
