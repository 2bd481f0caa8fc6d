"""torch's elastic agent, extended with restarts that work on gloo and an exit code on which all machines agree.

Start with `agent.py`; `rendezvous.py` brings its machines together, `peers.py` exchanges their state while the job runs.
`torch_agent.py` is the only file that uses private methods of torch's agent.
"""
