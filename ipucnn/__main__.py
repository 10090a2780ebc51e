"""The program, as console script and as ``python -m ipucnn``: listens for signals, then imports the command line."""

import sys

if __name__ == "__main__" and sys.path and not __file__.startswith(sys.path[0].rstrip("/") + "/"):
    # ``python -m`` puts the current folder first on the path, and what lies there is not to be imported.
    del sys.path[0]

from ipucnn import interrupts


def main() -> None:
    """Runs the command line and exits with the code that says how it went."""
    interrupts.listen()
    from ipucnn import cli

    cli.main()


if __name__ == "__main__":
    main()
