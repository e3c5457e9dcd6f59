"""Inside the ranks: the only folder of `runner` that imports torch, with `runner.trials`."""
