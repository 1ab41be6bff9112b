"""SGLang's own endpoints, and the server's state (health, version, load)."""
