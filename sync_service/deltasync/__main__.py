"""`python -m deltasync` is the `deltasync` command."""

from deltasync.cli.main import main

if __name__ == "__main__":
    main()
