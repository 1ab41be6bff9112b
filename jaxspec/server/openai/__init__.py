"""OpenAI's completions and chat."""
