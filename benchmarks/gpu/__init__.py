"""`jaxspec bench gpu`: checks and times the programs of an 8B model on a GPU (command.py explains how)."""

from .command import main as main
