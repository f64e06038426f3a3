"""The modules of tools/gpu_check.py."""
