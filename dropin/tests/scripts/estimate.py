"""`accelerate estimate-memory` of a model of the Hub, which lies in the cache; prints what the command prints."""

import sys

from accelerate.commands.estimate import run

sys.exit(run(["bert-base-uncased", "--dtypes", "float32", "int8"]))
