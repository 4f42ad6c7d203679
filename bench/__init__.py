"""Measurements on a GPU and the tables that defaults were chosen from; results/ holds what they wrote."""
