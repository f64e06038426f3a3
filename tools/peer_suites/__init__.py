"""Test files of other packages, run on ``tilewise.compat``: the modules of run_peer_suites.py."""
