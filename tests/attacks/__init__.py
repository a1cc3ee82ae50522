"""Attacks on a running service, and what each does to it and to those who use it honestly.

    python -m tests.attacks                          all of them, each on a service of its own
    python -m tests.attacks zero-shards --json now.json
    python -m tests.attacks --table without-roles.json with-roles.json

Beside each attack a trainer publishes small cuts at a steady pace and a replica follows it. Memory, disk, threads,
descriptors and lines of the log are those of the service's process, from outside.
"""
