"""`python -m runner`: the same as the console script."""

from runner.cli import main

if __name__ == "__main__":
    main()
