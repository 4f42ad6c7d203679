"""Engines that decode with ReplaySSM: one package each, which translates names, indices and configuration."""
