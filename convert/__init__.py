"""`python -m convert`: looking into Hugging Face and EAGLE-3 checkpoints."""
