"""Integrations of Tilewise into other packages; each is imported only when it is needed."""
