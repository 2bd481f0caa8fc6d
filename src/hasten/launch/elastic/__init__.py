"""torch's elastic agent, with restarts that work on gloo and an exit code that all machines agree on.

Start with `agent.py`; `torch_agent.py` is the one file that reaches into torch's agent.
"""
