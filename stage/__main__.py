"""`python -m stage`: the same as the console script."""

from stage.cli import main

if __name__ == "__main__":
    main()
