"""The run file, `--set` and the user's ds_config.json -> one frozen `RunConfig`."""
