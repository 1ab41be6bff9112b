"""SGLang's own endpoints."""
