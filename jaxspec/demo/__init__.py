"""The built-in model and its EAGLE-3 head: data only; README.md says how they were made."""
