"""`python -m sync_service` is the `deltasync` command."""

from sync_service.cli.main import main

if __name__ == "__main__":
    main()
