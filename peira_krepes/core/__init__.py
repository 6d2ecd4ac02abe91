"""The ground floor: argument checks, atomic files, two-view moments and linear solvers. Imports nothing of the package."""
