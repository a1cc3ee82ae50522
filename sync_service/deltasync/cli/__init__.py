"""The `deltasync` command: one verb per file. Internal."""
