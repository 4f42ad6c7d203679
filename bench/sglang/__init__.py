"""Whole models under SGLang, with and without ReplaySSM: equal tokens, and what a decode step takes."""
