"""The theory of PEIRA on laws where everything is known: canonical correlations, energy, critical points, gradient flows. Imports `core` only."""
