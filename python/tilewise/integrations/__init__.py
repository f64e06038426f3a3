"""Tilewise inside other packages; each module is imported by whoever wants it, and by nobody else."""
