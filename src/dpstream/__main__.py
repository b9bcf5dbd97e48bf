"""`python -m dpstream` is the `dpstream` command."""

from dpstream.cli import main

if __name__ == "__main__":
    main()
