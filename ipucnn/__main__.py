"""The program's entry point, for the console script and ``python -m ipucnn``.

It installs the signal handlers before it imports the command line, which is slow.
"""

import sys

if __name__ == "__main__" and sys.path and not __file__.startswith(sys.path[0].rstrip("/") + "/"):
    # ``python -m`` puts the current folder first on the path; its files must not be imported.
    del sys.path[0]

from ipucnn import interrupts


def main() -> None:
    """Runs the command line and exits with its exit code."""
    interrupts.listen()
    from ipucnn import cli

    cli.main()


if __name__ == "__main__":
    main()
