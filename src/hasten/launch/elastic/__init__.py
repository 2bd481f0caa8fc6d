"""torch's elastic agent, extended with restarts that work on gloo and an exit code on which all machines agree.

Start with `agent.py`; `torch_agent.py` is the only file that uses private methods of torch's agent.
"""
