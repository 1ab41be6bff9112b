"""The training of the built-in model and its EAGLE-3 head (jaxspec/demo/README.md); needs the extra `train`."""
