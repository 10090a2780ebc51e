"""The program, as console script and as ``python -m ipucnn``: listens for signals, then imports the command line."""

from ipucnn import interrupts


def main() -> None:
    """Runs the command line and exits with the code that says how it went."""
    interrupts.listen()
    from ipucnn import cli

    cli.main()


if __name__ == "__main__":
    main()
