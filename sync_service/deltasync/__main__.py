"""The `deltasync` command, also as `python -m deltasync`."""

import os
import sys


def main() -> None:
    """Run the command line, or say what to install where it is missing: the client does without it."""
    # Peers that fail in a handshake would each leave a line of the C library in the log; ours say what went wrong.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from deltasync.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("deltasync"):
            raise
        install = "pip install 'deltasync[service]', or '.[service]' in a checkout"
        sys.exit(f"Error: the deltasync command needs {error.name}: {install}")
    run()


if __name__ == "__main__":
    main()
