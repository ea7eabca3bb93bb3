"""HTTP in front of the engine: OpenAI's API with the `cache` field (DESIGN §3)."""
