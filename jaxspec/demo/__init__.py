"""The built-in model and its EAGLE-3 head, as data, and what they were made from; README.md says how."""
