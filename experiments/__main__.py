"""``python -m experiments``: list, run, tour, report, sweep."""

from experiments.cli import main

if __name__ == "__main__":
    main()
