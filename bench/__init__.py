"""Measurements on a GPU, ours beside the peers'; results/ holds what they wrote and defaults were chosen from."""
