"""Changes to an engine's own source, as recipes: what is edited is found by name and structure, never by line or text."""
