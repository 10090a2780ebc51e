"""``python -m ipucnn`` is the same program as the console script."""

from ipucnn.cli import main

if __name__ == "__main__":
    main()
