"""Entry point of `python -m hasten`, the same as the command `hasten`, for environments whose scripts are not on the PATH."""

from hasten.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
