"""Tilewise inside other packages: modules that are imported by those who want them alone."""
