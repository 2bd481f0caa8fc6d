"""Checks that `accelerate.test_utils` has always offered, as a module and as a script."""

from accelerate._impl.testing.scripts.cli import *

if __name__ == "__main__":
    main()
