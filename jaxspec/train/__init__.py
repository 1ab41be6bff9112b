"""Training: draft heads for any model (`jaxspec train`), and the demo target (jaxspec/demo/README.md); needs the extra `train`."""
