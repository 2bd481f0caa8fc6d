"""Checks that `accelerate.test_utils` has always offered, as a module and as a script."""

from accelerate._impl.testing.scripts.sync import *

if __name__ == "__main__":
    main()
