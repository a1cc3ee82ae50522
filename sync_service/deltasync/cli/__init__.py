"""The `deltasync` command: a verb in the file of its name, or in that of its subject. Internal."""
