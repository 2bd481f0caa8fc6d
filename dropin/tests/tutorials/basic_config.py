"""The settings file that a notebook writes before it launches: write_basic_config()."""

import yaml

from accelerate.utils import write_basic_config

path = write_basic_config()
print(path.name)
for name, value in sorted(yaml.safe_load(path.read_text()).items()):
    print(name, value)
print("a second time", write_basic_config())
