"""Attention of a window of rows over committed pages and over each other."""

from pallas_kernels.tree_attention.api import tree_attention as tree_attention
