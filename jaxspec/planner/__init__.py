"""`jaxspec plan`: what a model needs, what a GPU allows, and what the GPU would run; no GPU is needed."""
