"""Progress bars in terminals, notebooks and log files, with throughput, memory and stragglers.

Start with `bar.py`; `build.py` chooses a display, `meter.py` computes rates, `straggler.py` compares the ranks'
speed, `throughput.py` counts tokens and operations, `waiting.py` shows a line while one long operation runs.
"""
