"""The `deltasync` command. Each verb is in the file of its name or of its subject. Internal."""
