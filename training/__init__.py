"""How the small models that `replayssm run` and `replayssm drift` use were made."""
