"""Deliberate breaks: what the tests must catch. `python -m tests.breaks` applies each in a copy of the tree and runs its test."""
