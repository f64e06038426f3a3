"""Test files of other packages, run on ``tilewise.compat``: the parts of run_peer_suites.py."""
