"""What a GPU would run: programs compiled by XLA's GPU compiler on a machine that need not have one."""
