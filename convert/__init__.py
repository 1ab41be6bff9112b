"""`python -m convert`: converting, exporting and inspecting checkpoints."""
